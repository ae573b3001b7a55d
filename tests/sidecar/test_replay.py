"""A simulated pool does what vLLM and the sidecar do, and the fast one does what a slow and simple one does."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.recency import is_due, recency_ns
from pykvcache_sidecar.policy import POLICY_NAMES, BlockUse, make_policy
from pykvcache_sidecar.replay import Bounds, Endless, Replay, Tally, saved_work, total
from pykvcache_sidecar.trace import Request

START = 1_764_500_040.0
"""A whole minute."""
NAMES = ("a" * 12, "b" * 12, "c" * 12)
COSTS = {NAMES[0]: 0.5, NAMES[1]: 2.0}


def request(*blocks, at=0.0, name=NAMES[0], size=10):
    return Request(START + at, name, 256, size, list(blocks))


def replay(capacity, **options):
    return Replay(policy="lru", costs={}, bounds=Bounds(capacity, **options))


class SimplePool:
    """The same rules without any care for speed: one dict, looked through at every step."""

    def __init__(self, *, policy, costs, bounds):
        self.files = {}
        self.policy, self.costs, self.bounds = policy, costs, bounds
        self.now = self.next_look = float("-inf")
        self.seen = {}

    @property
    def used_bytes(self):
        return sum(use.size_bytes for use in self.files.values())

    def serve(self, request):
        self.now = max(self.now, request.seconds)
        if self.now >= self.next_look:
            if self.used_bytes > self.bounds.high * self.bounds.capacity_bytes:
                self.evict()
            interval = self.bounds.interval_seconds
            self.next_look = (self.now // interval + 1) * interval
        self.seen.setdefault(request.fingerprint, len(self.seen))
        keys = [(request.fingerprint, block) for block in request.blocks]
        present = [key in self.files for key in keys]
        for depth, key in enumerate(keys):
            use = BlockUse(request.fingerprint, recency_ns(self.now, depth), request.block_bytes)
            if present[depth] and is_due(self.files[key].modified_ns, self.now):
                self.files[key] = use
        for depth, key in enumerate(keys):
            use = BlockUse(request.fingerprint, recency_ns(self.now, depth), request.block_bytes)
            if key not in self.files and self.used_bytes + use.size_bytes <= self.bounds.capacity_bytes:
                self.files[key] = use
        return [*present, False].index(False)

    def evict(self):
        policy = make_policy(self.policy, self.costs, now_ns=int(self.next_look * 10**9))
        while self.files and self.used_bytes > self.bounds.low * self.bounds.capacity_bytes:
            # Of equal ranks the fingerprint seen first leaves first, and within it the lower number.
            del self.files[min(self.files, key=lambda key: (policy.rank(self.files[key]), self.seen[key[0]], key[1]))]


chains = st.builds(
    lambda chain, length: [100 * chain + depth for depth in range(length)], st.integers(0, 5), st.integers(0, 8)
)
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.4, 1.0, 59.0, 61.0, 120.0, 3600.0, -30.0]), st.sampled_from(NAMES), chains),
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(steps=steps, capacity=st.integers(50, 400))
@example(steps=[(0.0, NAMES[0], [1, 2, 3, 4, 5, 6])] * 4, capacity=55)
def test_the_fast_pool_serves_as_the_simple_one(policy, steps, capacity):
    bounds = Bounds(capacity, high=0.9, low=0.6)
    fast, simple = (each(policy=policy, costs=COSTS, bounds=bounds) for each in (Replay, SimplePool))
    at = 0.0
    for elapsed, name, blocks in steps:
        at += elapsed
        wanted = request(*blocks, at=at, name=name, size=10 + NAMES.index(name))
        assert fast.serve(wanted) == simple.serve(wanted)
        assert fast.used_bytes == simple.used_bytes


def test_what_was_stored_is_found():
    pool = replay(100)
    assert [0, 2, 2] == [pool.serve(request(*blocks)) for blocks in ([1, 2], [1, 2], [1, 2, 3])]


def test_blocks_of_another_fingerprint_are_not_found():
    pool = replay(100)
    assert [0, 0] == [pool.serve(request(1, name=name)) for name in NAMES[:2]]


def test_hits_end_at_the_first_hole():
    pool = replay(100)
    pool.serve(request(1, 3))
    assert 1 == pool.serve(request(1, 2, 3))


def test_a_full_pool_refuses_the_rest_of_a_prefix_as_writers_do():
    pool = replay(35)
    pool.serve(request(1, 2, 3, 4, 5))
    assert 3 == pool.serve(request(1, 2, 3, 4, 5))
    tally = pool.tallies[NAMES[0]]
    assert (30, 40) == (tally.stored_bytes, tally.refused_bytes)


def test_eviction_goes_from_the_high_watermark_to_the_low_one_tail_first():
    pool = replay(100)
    pool.serve(request(*range(9)))
    pool.serve(request(at=5))
    assert 90 == pool.used_bytes  # at the high watermark, not above it
    pool.serve(request(100, at=6))
    pool.serve(request(at=7))
    assert 80 == pool.used_bytes
    assert 7 == pool.serve(request(*range(9), at=7))


def test_the_sidecar_looks_once_an_interval_only():
    pool = replay(100, interval_seconds=10)
    pool.serve(request(*range(10)))
    pool.serve(request(100, at=9.9))
    assert 100 == pool.used_bytes
    pool.serve(request(100, at=10.1))
    assert 90 == pool.used_bytes


def test_a_prefix_used_again_outlives_one_that_was_not():
    pool = replay(100)
    pool.serve(request(1, 2, 3))
    pool.serve(request(11, 12, 13))
    pool.serve(request(1, 2, 3, at=180))
    pool.serve(request(*range(20, 24), at=240))
    assert 3 == pool.serve(request(1, 2, 3, at=300))
    assert 1 == pool.serve(request(11, 12, 13, at=300))


def test_many_uses_do_not_fill_the_memory():
    pool = replay(1000)
    for minute in range(0, 6000, 2):
        pool.serve(request(1, 2, 3, at=minute * 60))
    (shelf,) = pool._shelves.values()
    assert len(shelf.heap) <= 2 * len(shelf.modified) + 1024


@pytest.mark.slow
@given(steps=steps)
def test_no_pool_finds_more_than_the_endless_one(steps):
    endless, pools = Endless(), [replay(capacity) for capacity in (50, 10_000)]
    at = 0.0
    for elapsed, name, blocks in steps:
        at += elapsed
        wanted = request(*blocks, at=at, name=name)
        most = endless.serve(wanted)
        assert [True, True] == [pool.serve(wanted) <= most for pool in pools]
        assert pools[1].used_bytes == total(endless.tallies.values()).stored_bytes


def test_tallies_count_tokens_and_bytes():
    pool = replay(1000)
    for blocks in ([1, 2], [1, 2, 3, 4]):
        pool.serve(request(*blocks))
    expected = Tally(2, lookup_tokens=6 * 256, hit_tokens=2 * 256, lookup_bytes=60, hit_bytes=20, stored_bytes=40)
    assert expected == pool.tallies[NAMES[0]]
    assert 2 / 6 == expected.hit_rate
    assert 0.0 == Tally().hit_rate


def test_saved_work_weighs_bytes_by_their_cost():
    tallies = {
        NAMES[0]: Tally(lookup_bytes=100, hit_bytes=100),
        NAMES[1]: Tally(lookup_bytes=100),
        NAMES[2]: Tally(lookup_bytes=50, hit_bytes=50),  # unknown: 1.0
    }
    assert (50 + 50) / (50 + 200 + 50) == saved_work(tallies, COSTS)
    assert 0.0 == saved_work({}, COSTS)
    assert saved_work(tallies, {}) is None


def test_an_unknown_policy_is_refused_before_the_trace_is_read():
    with pytest.raises(ConfigurationError):
        Replay(policy="fifo", costs={}, bounds=Bounds(1))
