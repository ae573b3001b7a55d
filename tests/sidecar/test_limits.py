"""What a pool may take and how much must go, as a table; and clocks and rates, with time as an input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_sidecar.clocks import CautiousClock
from pykvcache_sidecar.levels import settled_count
from pykvcache_sidecar.limits import Plan, Room, RoomMade, decide, has_helped
from pykvcache_sidecar.pace import TokenBucket
from pykvcache_sidecar.pending import Pending
from pykvcache_storage.usage import Usage


def room(used, *, free=10_000, capacity=1000, min_free=0, is_evicting=False, refused=0, block=0, pending=0):
    return Room(
        used_bytes=used,
        free_bytes=free,
        capacity_bytes=capacity,
        min_free_bytes=min_free,
        high=0.9,
        low=0.8,
        is_evicting=is_evicting,
        refused_bytes=refused,
        block_bytes=block,
        pending_bytes=pending,
    )


@pytest.mark.parametrize(
    ("situation", "plan"),
    [
        pytest.param(room(None), Plan(1000), id="unknown fill level: nothing is evicted"),
        pytest.param(room(0), Plan(1000), id="empty"),
        pytest.param(room(900), Plan(1000), id="at the high watermark"),
        pytest.param(room(901), Plan(1000, 101, "capacity"), id="above it: down to the low one"),
        pytest.param(room(801, is_evicting=True), Plan(1000, 1, "capacity"), id="on the way down"),
        pytest.param(room(800, is_evicting=True), Plan(1000), id="arrived"),
        pytest.param(room(1500), Plan(1000, 700, "capacity"), id="a capacity that was lowered"),
        pytest.param(room(500, free=600, min_free=100), Plan(1000), id="just enough free for the whole capacity"),
        pytest.param(room(500, free=599, min_free=100), Plan(999), id="not enough free: writers stop earlier"),
        pytest.param(room(500, free=100, min_free=100), Plan(500, 100, "min_free"), id="minFree is reached"),
        pytest.param(room(500, free=0, min_free=100), Plan(400, 180, "min_free"), id="minFree is violated"),
        pytest.param(room(500, free=0, min_free=500), Plan(1, 500, "min_free"), id="more is lacking than the pool has"),
        pytest.param(room(500, free=0, min_free=9000), Plan(1, 500, "min_free"), id="much more: nothing is left"),
        pytest.param(room(0, free=0, min_free=100), Plan(1), id="nothing to evict: writers stay stopped"),
        pytest.param(room(500, free=0), Plan(500, 100, "min_free"), id="a full disk needs no minFree"),
        pytest.param(room(950, free=0), Plan(950, 190, "capacity"), id="both"),
        pytest.param(room(500, refused=500), Plan(500, 100, "refused"), id="a quota that nothing else shows"),
        pytest.param(room(420, refused=500, is_evicting=True), Plan(500, 20, "refused"), id="on the way down from it"),
        pytest.param(room(400, refused=500, is_evicting=True), Plan(500), id="arrived below it"),
        pytest.param(room(0, refused=1), Plan(1), id="refused although empty: nothing to evict"),
        pytest.param(room(800, block=200), Plan(1000), id="room for exactly one block"),
        pytest.param(room(801, block=200), Plan(1000, 1, "capacity"), id="no room for one: it is made"),
        pytest.param(room(5, block=2000), Plan(1000, 5, "capacity"), id="a block larger than the pool"),
        pytest.param(room(400, free=0, pending=100), Plan(500), id="removed bytes that are not free yet"),
    ],
)
def test_the_plan_for_a_situation(situation, plan):
    assert plan == decide(situation)


@pytest.mark.parametrize(
    ("made", "refused", "helped"),
    [
        pytest.param(RoomMade(1000, 800), 1000, True, id="a quota: all of the room was used"),
        pytest.param(RoomMade(1000, 800), 841, True, id="further up than what stores in flight explain"),
        pytest.param(RoomMade(1000, 800), 840, False, id="a little above the level evicted down to"),
        pytest.param(RoomMade(1000, 800), 800, False, id="at it"),
        pytest.param(RoomMade(1000, 800), 600, False, id="below it: others took more than we gave"),
        pytest.param(RoomMade(1000, 970), 986, True, id="watermarks close together: most of the room was used"),
        pytest.param(RoomMade(1000, 970), 985, False, id="half of it"),
        pytest.param(RoomMade(1, 0), 1, True, id="next to nothing"),
    ],
)
def test_room_has_helped_if_stores_could_use_it(made, refused, helped):
    assert has_helped(made, refused) is helped


@given(
    used=st.integers(0, 10**13),
    free=st.integers(0, 10**13),
    capacity=st.integers(1, 10**13),
    min_free=st.integers(0, 10**13),
    is_evicting=st.booleans(),
)
def test_a_plan_carried_out_leads_to_rest_and_keeps_what_must_stay_free(used, free, capacity, min_free, is_evicting):
    plan = decide(room(used, free=free, capacity=capacity, min_free=min_free, is_evicting=is_evicting))
    assert 1 <= plan.allowed_bytes <= capacity
    assert 0 <= plan.evict_bytes <= used
    left = used - plan.evict_bytes
    goes_on = plan.evict_bytes > 0
    after = decide(room(left, free=free + used - left, capacity=capacity, min_free=min_free, is_evicting=goes_on))
    assert after.evict_bytes == 0
    assert after.allowed_bytes == plan.allowed_bytes
    assert left <= max(capacity, 1)
    if left:
        assert free + used - left >= min_free


def test_a_fill_level_that_may_be_right_survives_a_recount():
    usage = Usage(used_bytes=150, added_bytes=1100)
    for counted in (49, 50, 100, 150, 151):
        used = settled_count(usage, mark=1000, counted_bytes=counted) + 100
        assert used == {49: 149, 151: 151}.get(counted, 150)
    assert settled_count(None, mark=0, counted_bytes=7) == 7
    assert settled_count(Usage(used_bytes=1, added_bytes=5), mark=1000, counted_bytes=7) == 7


def test_a_clock_that_jumps_makes_nothing_look_older():
    wall, steady = [1_000_000.0], [50.0]
    clock = CautiousClock(lambda: wall[0], lambda: steady[0])
    assert clock() == 1_000_000.0
    wall[0] += 10**9
    assert clock() == 1_000_000.0
    steady[0] += 5
    assert clock() == 1_000_005.0
    wall[0] = 3.0
    assert clock() == 3.0


def test_bytes_are_paid_for_at_the_rate_and_idle_time_saves_a_second_at_most():
    now = [0.0]
    bucket = TokenBucket(100, clock=lambda: now[0])
    assert bucket.take(50) == 0.5
    now[0] = 0.5
    assert bucket.take(300) == 3.0
    now[0] = 1000.0
    assert bucket.take(100) == 0.0
    assert bucket.take(100) == 1.0
    now[0] = 999.0  # a clock that goes back pays nothing back
    assert bucket.take(0) == 1.0


def test_removed_bytes_count_as_free_until_they_are_or_half_a_minute_has_passed():
    now = [0.0]
    pending = Pending(monotonic=lambda: now[0])
    assert pending.bytes_at(50) == 0
    pending.note(100, free_before=50)
    assert [pending.bytes_at(free) for free in (50, 90, 150, 500, 0)] == [100, 60, 0, 0, 100]
    now[0] = 20.0
    pending.note(30, free_before=50)
    now[0] = 49.0
    assert pending.bytes_at(50) == 130
    now[0] = 50.0
    assert pending.bytes_at(50) == 0


def test_a_filesystem_that_frees_late_does_not_lose_the_pool_round_by_round():
    now, used, free = [0.0], 1000, 0
    pending = Pending(monotonic=lambda: now[0])
    rounds = 0
    while True:
        plan = decide(
            room(used, free=free, capacity=10_000, min_free=100, is_evicting=rounds > 0, pending=pending.bytes_at(free))
        )
        if not plan.evict_bytes:
            break
        pending.note(plan.evict_bytes, free_before=free)
        used -= plan.evict_bytes
        rounds += 1
        now[0] += 1.0
    assert (rounds, used) == (1, 720)
