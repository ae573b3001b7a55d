"""Policies order blocks: within one fingerprint as LRU does, between fingerprints by what they cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.recency import MAX_DEPTH, recency_ns
from pykvcache_sidecar.policy import DEFAULT_POLICY, POLICY_NAMES, BlockUse, make_policy

NOW_SECONDS = 1_764_500_000.0
NOW_NS = int(NOW_SECONDS * 10**9)
SMALL, LARGE = "5a" * 6, "1a" * 6
COSTS = {SMALL: 0.5, LARGE: 1.5}

moments = st.floats(NOW_SECONDS - 10**8, NOW_SECONDS + 10**6)
"""Three years back, and clocks that run ahead."""
uses = st.tuples(moments, st.integers(0, MAX_DEPTH)).map(lambda use: recency_ns(*use))


def block(fingerprint: str, modified_ns: int) -> BlockUse:
    return BlockUse(fingerprint, modified_ns, 4096)


def idle(fingerprint: str, *, minutes: float) -> BlockUse:
    return block(fingerprint, NOW_NS - int(minutes * 60 * 10**9))


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(times=st.lists(uses, min_size=2, max_size=20), cost=st.floats(1 / 16, 16))
def test_within_one_fingerprint_every_policy_keeps_the_order_of_lru(name, times, cost):
    policy = make_policy(name, {SMALL: cost}, now_ns=NOW_NS)
    ranks = [policy.rank(block(SMALL, modified_ns)) for modified_ns in sorted(times)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(when=moments, depth=st.integers(0, MAX_DEPTH - 1), cost=st.floats(1 / 16, 16))
def test_of_one_use_the_tail_leaves_strictly_before_the_head(name, when, depth, cost):
    policy = make_policy(name, {SMALL: cost}, now_ns=NOW_NS)
    head, tail = (policy.rank(block(SMALL, recency_ns(when, each))) for each in (depth, depth + 1))
    assert tail < head


@given(first=uses, second=uses)
def test_lru_does_not_look_at_the_model(first, second):
    policy = make_policy("lru", COSTS, now_ns=NOW_NS)
    assert (first < second) == (policy.rank(block(SMALL, first)) < policy.rank(block(LARGE, second)))


def test_of_two_blocks_idle_for_equally_long_the_cheaper_leaves_first():
    policy = make_policy("cost", COSTS, now_ns=NOW_NS)
    assert policy.rank(idle(SMALL, minutes=10)) < policy.rank(idle(LARGE, minutes=10))


def test_a_block_of_thrice_the_cost_stays_thrice_as_long():
    policy = make_policy("cost", COSTS, now_ns=NOW_NS)
    small = policy.rank(idle(SMALL, minutes=10))
    assert policy.rank(idle(LARGE, minutes=31)) < small < policy.rank(idle(LARGE, minutes=29))


def test_an_unknown_fingerprint_counts_like_the_median():
    policy = make_policy("cost", COSTS, now_ns=NOW_NS)
    unknown = policy.rank(idle("0" * 12, minutes=10))
    assert policy.rank(idle(SMALL, minutes=10)) < unknown < policy.rank(idle(LARGE, minutes=10))


def test_without_costs_the_cost_policy_orders_as_lru():
    policy = make_policy("cost", {}, now_ns=NOW_NS)
    assert policy.rank(idle(SMALL, minutes=11)) < policy.rank(idle(LARGE, minutes=10))
    assert policy.rank(idle(LARGE, minutes=11)) < policy.rank(idle(SMALL, minutes=10))


def test_an_unknown_policy_is_refused_with_those_that_exist():
    with pytest.raises(ConfigurationError, match=r"'fifo' is unknown; choose one of: lru, cost"):
        make_policy("fifo", {}, now_ns=NOW_NS)


def test_the_default_policy_exists():
    assert DEFAULT_POLICY in POLICY_NAMES
