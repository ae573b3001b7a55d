"""Modification times as recency: older uses leave first, tails before heads, and clocks that are set."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pykvcache_contract.recency import MAX_DEPTH, QUANTUM_SECONDS, depth_of, is_due, recency_ns

MOMENTS = st.floats(QUANTUM_SECONDS, 4e9)
DEPTHS = st.integers(0, MAX_DEPTH)


def minute(now_seconds: float) -> int:
    return int(now_seconds // QUANTUM_SECONDS)


@given(MOMENTS, DEPTHS, MOMENTS, DEPTHS)
def test_an_older_use_sorts_first_and_within_one_minute_the_deeper_block(
    one: float, depth_of_one: int, other: float, depth_of_other: int
) -> None:
    by_use_then_depth = (minute(one), -depth_of_one) < (minute(other), -depth_of_other)
    assert by_use_then_depth == (recency_ns(one, depth_of_one) < recency_ns(other, depth_of_other))


@given(MOMENTS, st.lists(DEPTHS, min_size=2))
def test_the_blocks_of_one_use_leave_tail_first(now: float, depths: list[int]) -> None:
    leaving = sorted(depths, key=lambda depth: recency_ns(now, depth))
    assert leaving == sorted(depths, reverse=True)


@given(MOMENTS, DEPTHS)
def test_the_time_tells_its_depth_and_lies_at_most_two_minutes_back(now: float, depth: int) -> None:
    modified_ns = recency_ns(now, depth)
    assert depth_of(modified_ns) == depth
    assert 0 <= now * 1e9 - modified_ns < 2 * QUANTUM_SECONDS * 1e9


@given(MOMENTS, st.integers(MAX_DEPTH, 10**12))
def test_a_depth_beyond_the_last_counts_as_the_last_and_stays_in_its_minute(now: float, depth: int) -> None:
    assert recency_ns(now, depth) == recency_ns(now, MAX_DEPTH)
    assert recency_ns(now, depth) > recency_ns(now - QUANTUM_SECONDS, 0)


@given(MOMENTS, DEPTHS, st.lists(st.floats(0, 3 * QUANTUM_SECONDS), max_size=40))
def test_uses_are_noted_once_per_minute_of_the_clock(now: float, depth: int, pauses: list[float]) -> None:
    modified_ns, noted = recency_ns(now, depth), [minute(now)]
    minutes = set(noted)
    for pause in pauses:
        now += pause
        minutes.add(minute(now))
        if is_due(modified_ns, now):
            modified_ns = recency_ns(now, depth)
            noted.append(minute(now))
    assert sorted(minutes) == noted


@given(MOMENTS, DEPTHS, st.floats(2 * QUANTUM_SECONDS, 1e9))
def test_a_clock_that_jumped_back_notes_the_next_use_and_then_rests(now: float, depth: int, back: float) -> None:
    earlier = max(now - back, 0.0)
    if minute(earlier) < minute(now) - 1:
        assert is_due(recency_ns(now, depth), earlier)
    assert not is_due(recency_ns(earlier, depth), earlier)


@pytest.mark.parametrize(
    ("elapsed", "due"), [(0, False), (59.9, False), (60, True), (90, True), (-0.1, False), (-59.9, False), (-60, True)]
)
def test_a_use_is_due_from_the_next_minute_on_and_a_whole_minute_before_the_noted_one(
    elapsed: float, due: bool
) -> None:
    begin = 28_333_333 * QUANTUM_SECONDS
    assert is_due(recency_ns(begin + 30, 5), begin + elapsed) == due


@given(MOMENTS, st.floats(0, QUANTUM_SECONDS))
def test_a_time_that_is_a_plain_now_is_not_due_within_its_minute(now: float, pause: float) -> None:
    if minute(now + pause) == minute(now):
        assert not is_due(int(now * 1e9), now + pause)


CHAINS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6), (7, 8, 9))
"""Blocks of prefixes, head first, some of which share heads."""


@given(
    st.lists(
        st.tuples(
            st.sampled_from((0, 1, 29, 30, 59, 60, 61, 90, 119, 120, 121, 600)),
            st.integers(0, QUANTUM_SECONDS - 1),
            st.sampled_from(CHAINS),
            st.integers(1, 4),
        ),
        max_size=60,
    )
)
@example([(0, 0, (0, 1, 2, 3), 2), (90, 0, (0, 1, 2, 3), 4)])
def test_a_head_is_never_older_than_its_tail(requests: list[tuple[int, int, tuple[int, ...], int]]) -> None:
    # Clocks of nodes that share a pool differ by less than a minute; what is asked for is any beginning of a chain.
    modified: dict[int, int] = {}
    now = 28_333_333 * QUANTUM_SECONDS
    for pause, behind, chain, length in requests:
        now += pause
        for depth, block in enumerate(chain[:length]):
            if block not in modified or is_due(modified[block], now - behind):
                modified[block] = recency_ns(now - behind, depth)
        for each in CHAINS:
            noted = [modified[block] for block in each if block in modified]
            assert noted == sorted(noted, reverse=True)


def test_whole_seconds_lose_the_depth_and_keep_the_order_of_uses() -> None:
    earlier, later = (recency_ns(now, 3) // 10**9 * 10**9 for now in (1200.0, 1260.0))
    assert earlier < later
    assert not is_due(earlier, 1201.0)
