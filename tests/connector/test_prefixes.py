"""How deep blocks lie, and which were wanted twice: what stores carry to the workers."""

import pytest

from pykvcache_connector.scheduler.prefixes import UNKNOWN_DEPTH, Prefixes
from pykvcache_connector.scheduler.sightings import DROPPED_SHARE, Sightings
from pykvcache_connector.vllm_api import make_offload_key
from pykvcache_contract.recency import depth_of, recency_ns


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def keys(*numbers: int, group: int = 0) -> list[bytes]:
    return [bytes(make_offload_key(block_hash, group)) for block_hash in hashes(*numbers)]


@pytest.fixture
def prefixes(wall_clock) -> Prefixes:
    return Prefixes(clock=wall_clock)


def depths(prefixes: Prefixes, request: str, wanted: list[bytes]) -> list[int]:
    return [depth_of(recency) for recency in prefixes.recencies_ns(request, wanted)]


# ---- depth ----


def test_blocks_lie_as_deep_as_their_place_among_the_requests_blocks(prefixes):
    prefixes.begin("r", hashes(*range(300)))
    assert depths(prefixes, "r", keys(*range(300))) == list(range(300))


def test_blocks_come_in_parts_and_some_are_left_out(prefixes):
    prefixes.begin("r", hashes(*range(300)))
    assert depths(prefixes, "r", keys(0, 1, 7)) == [0, 1, 7]
    assert depths(prefixes, "r", keys(8, 200)) == [8, 200]
    assert depths(prefixes, "r", keys(3, 201)) == [3, 201], "and may come again, after a preemption"


def test_blocks_of_generated_tokens_follow_those_of_the_prompt(prefixes):
    growing = hashes(0, 1)
    prefixes.begin("r", growing)
    assert depths(prefixes, "r", keys(1)) == [1]
    growing += hashes(2, 3)
    assert depths(prefixes, "r", keys(2, 3)) == [2, 3]


def test_a_block_of_several_hashes_counts_once(prefixes):
    prefixes.start({0: 4})
    prefixes.begin("r", hashes(*range(16)))
    assert depths(prefixes, "r", keys(3, 7, 15)) == [0, 1, 3]


def test_each_group_has_its_own_order(prefixes):
    prefixes.start({0: 1, 1: 2})
    prefixes.begin("r", hashes(*range(8)))
    wanted = keys(4, 5, group=0) + keys(1, 3, 5, group=1)
    assert depths(prefixes, "r", wanted) == [4, 5, 0, 1, 2]


def test_all_blocks_of_a_request_carry_the_time_of_its_arrival(prefixes, wall_clock):
    arrival = wall_clock()
    prefixes.begin("r", hashes(0, 1))
    early = prefixes.recencies_ns("r", keys(0))
    wall_clock.advance(3600)
    late = prefixes.recencies_ns("r", keys(1))
    assert early + late == [recency_ns(arrival, 0), recency_ns(arrival, 1)]
    assert late < early, "so the tail leaves first, however long the tokens took"


def test_the_last_blocks_of_an_ended_request_are_known_for_one_more_step(prefixes):
    prefixes.begin("r", hashes(0, 1))
    prefixes.end("r")
    assert depths(prefixes, "r", keys(1)) == [1]
    prefixes.step_over()
    assert len(prefixes) == 0


def test_blocks_of_a_request_nobody_knows_count_as_the_end_of_a_prefix_wanted_now(prefixes, wall_clock):
    prefixes.end("unknown")
    prefixes.step_over()
    found = prefixes.recencies_ns("unknown", keys(0, 1, 2))
    assert found == [recency_ns(wall_clock(), UNKNOWN_DEPTH + place) for place in range(3)]


def test_a_block_that_is_not_the_requests_counts_as_the_end_of_its_prefix(prefixes):
    prefixes.begin("r", hashes(0, 1))
    assert depths(prefixes, "r", keys(9, 1)) == [UNKNOWN_DEPTH, 1]


# ---- sightings ----


def test_a_block_is_repeated_once_a_second_request_wants_it():
    sightings = Sightings()
    sightings.switch(on=True)
    sightings.note(keys(0, 1))
    assert not any(sightings.is_repeated(key) for key in keys(0, 1))
    sightings.note(keys(1, 2))
    assert [sightings.is_repeated(key) for key in keys(0, 1, 2, 3)] == [False, True, False, False]


def test_without_a_write_budget_nothing_is_remembered():
    sightings = Sightings()
    sightings.note(keys(0))
    assert len(sightings) == 0
    sightings.switch(on=True)
    sightings.note(keys(0))
    sightings.note(keys(0))
    sightings.switch(on=False)
    assert not sightings.is_repeated(keys(0)[0])
    assert len(sightings) == 0


def test_what_was_wanted_longest_ago_is_forgotten_first():
    sightings = Sightings(capacity=3)
    sightings.switch(on=True)
    sightings.note(keys(0, 1, 2))
    sightings.note(keys(0))
    sightings.note(keys(3))
    assert len(sightings) == 3
    sightings.note(keys(1))
    assert [sightings.is_repeated(key) for key in keys(0, 1)] == [True, False]


def test_a_full_memory_drops_a_share_at_once():
    capacity = 2 * DROPPED_SHARE
    sightings = Sightings(capacity=capacity)
    sightings.switch(on=True)
    sightings.note(keys(*range(capacity + 1)))
    assert len(sightings) == capacity - 1
