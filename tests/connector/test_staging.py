"""Which blocks are staged for whom: the scheduler's side of two-phase loads, with a manual clock and no workers."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from pykvcache_connector import vllm_api
from pykvcache_connector.scheduler.staging import (
    Progress,
    Staging,
    longest_end,
    needed,
    smallest_blocks_max,
)
from pykvcache_connector.vllm_api import GroupShape

SECONDS = 30.0
WAITING, READY, LATE = Progress.WAITING, Progress.READY, Progress.LATE


def keys(*numbers: int) -> list[bytes]:
    return [f"key-{number:04}".encode() for number in numbers]


class Bench:
    """Staging, and workers that do what they are told when the test says so."""

    def __init__(self, clock, *, blocks_max: int, ranks: int) -> None:
        self.clock, self.blocks_max, self.ranks = clock, blocks_max, ranks
        self.late = 0
        self.staging = Staging(timeout_seconds=SECONDS, on_late=self.note_late, clock=clock)
        self.staging.start(blocks_max=blocks_max, rank_count=ranks)
        self.told: dict[int, bytes] = {}

    def note_late(self, waited_for_reads: bool) -> None:
        self.late += 1
        self.waited_for_reads = waited_for_reads

    def step(self) -> None:
        """Send one step's orders to the workers."""
        orders = self.staging.orders()
        if orders is not None:
            for ticket in orders.release:
                self.told.pop(ticket, None)
            self.told.update(orders.stage)
        assert len(self.told) <= self.blocks_max
        assert len(set(self.told.values())) == len(self.told), "a block is staged twice at once"

    def read(self, *, ranks: int | None = None, numbers: list[bytes] | None = None) -> None:
        """Let ranks finish reading, all blocks or these."""
        done = {ticket: ranks or self.ranks for ticket, key in self.told.items() if numbers is None or key in numbers}
        self.staging.staged(done)

    def held(self) -> list[bytes]:
        return sorted(self.told.values())


@pytest.fixture
def make_bench(clock):
    def make(*, blocks_max: int = 4, ranks: int = 1) -> Bench:
        return Bench(clock, blocks_max=blocks_max, ranks=ranks)

    return make


def test_a_request_is_ready_when_every_rank_has_every_block(make_bench):
    bench = make_bench(ranks=2)
    assert bench.staging.want("r", keys(1, 2)) is WAITING
    bench.step()
    assert bench.held() == keys(1, 2)
    bench.read(ranks=1)
    assert bench.staging.want("r", keys(1, 2)) is WAITING
    assert bench.staging.is_waiting("r")
    bench.read(ranks=1, numbers=keys(1))
    assert bench.staging.want("r", keys(1, 2)) is WAITING
    bench.read(ranks=1, numbers=keys(2))
    assert not bench.staging.is_waiting("r")
    assert bench.staging.want("r", keys(1, 2)) is READY


def test_nothing_is_told_twice_and_nothing_when_there_is_no_news(make_bench):
    bench = make_bench()
    assert bench.staging.orders() is None
    bench.staging.want("r", keys(1))
    first = bench.staging.orders()
    assert bench.staging.orders() is None
    bench.staging.forget("r")
    second = bench.staging.orders()
    assert (first.number, second.number) == (1, 2)
    assert second.release == tuple(first.stage)


def test_blocks_are_held_from_the_promise_to_the_end_of_the_load(make_bench):
    bench = make_bench()
    bench.staging.want("r", keys(1, 2))
    bench.step()
    bench.read()
    assert bench.staging.want("r", keys(1, 2)) is READY
    bench.staging.load_began("r", keys(2))
    bench.clock.advance(10 * SECONDS)
    bench.step()
    assert bench.held() == keys(2), "only what is loaded"
    bench.staging.forget("r")
    bench.step()
    assert bench.held() == keys(2), "the request is gone, its load is not"
    bench.staging.load_ended(keys(2))
    bench.step()
    assert bench.held() == []
    assert bench.late == 0


def test_requests_share_blocks_and_the_last_lets_them_go(make_bench):
    bench = make_bench(blocks_max=3)
    bench.staging.want("one", keys(1, 2))
    bench.step()
    bench.read()
    assert bench.staging.want("two", keys(1, 2, 3)) is WAITING
    bench.step()
    assert bench.held() == keys(1, 2, 3)
    bench.staging.forget("one")
    bench.read(numbers=keys(3))
    assert bench.staging.want("two", keys(1, 2, 3)) is READY
    bench.step()
    assert bench.held() == keys(1, 2, 3)
    bench.staging.forget("two")
    bench.step()
    assert bench.held() == []


def test_a_block_that_another_request_joins_is_spoken_of_again(make_bench):
    bench = make_bench()
    bench.staging.want("one", keys(1))
    first = bench.staging.orders()
    bench.staging.want("two", keys(1))
    assert bench.staging.orders().stage == first.stage, "or the worker would think it forgotten"


def test_a_request_gets_all_its_blocks_or_none_in_order_of_arrival(make_bench):
    bench = make_bench(blocks_max=4)
    assert bench.staging.want("one", keys(1, 2, 3)) is WAITING
    assert bench.staging.want("two", keys(4, 5, 6)) is WAITING
    assert bench.staging.want("small", keys(7)) is WAITING
    bench.step()
    assert bench.held() == keys(1, 2, 3), "the third would fit, but the second is before it"
    bench.staging.forget("one")
    bench.step()
    assert bench.held() == keys(4, 5, 6, 7)


def test_a_failed_block_makes_its_request_choose_anew_before_others(make_bench):
    bench = make_bench(blocks_max=3)
    bench.staging.want("one", keys(1, 2, 3))
    bench.staging.want("two", keys(4))
    bench.step()
    bench.read(numbers=keys(1, 2))
    bench.staging.failed(keys(3)[0])
    assert not bench.staging.is_waiting("one")
    assert bench.staging.want("one", keys(1, 2)) is READY, "what was staged for it still is"
    bench.step()
    assert bench.held() == keys(1, 2, 4)


def test_a_failed_block_is_of_no_concern_once_it_is_staged(make_bench):
    bench = make_bench()
    bench.staging.want("r", keys(1))
    bench.step()
    bench.read()
    bench.staging.failed(keys(1)[0])
    assert bench.staging.want("r", keys(1)) is READY


def test_a_late_report_of_an_earlier_reading_counts_for_nothing(make_bench):
    bench = make_bench(ranks=2)
    bench.staging.want("one", keys(1))
    bench.step()
    earlier = dict(bench.told)
    bench.staging.forget("one")
    bench.step()
    bench.staging.want("two", keys(1))
    bench.step()
    bench.staging.staged(dict.fromkeys(earlier, 2))
    assert bench.staging.want("two", keys(1)) is WAITING
    bench.read()
    assert bench.staging.want("two", keys(1)) is READY


def test_at_its_deadline_a_request_lets_go_and_stays_late(make_bench):
    bench = make_bench()
    bench.staging.want("r", keys(1, 2))
    bench.step()
    bench.clock.advance(SECONDS - 0.001)
    assert bench.staging.want("r", keys(1, 2)) is WAITING
    bench.clock.advance(0.001)
    assert not bench.staging.is_waiting("r")
    bench.step()
    assert bench.held() == []
    bench.read()
    assert bench.staging.want("r", keys(1, 2)) is LATE
    bench.staging.drop("r")
    assert bench.staging.want("r", keys(1)) is LATE
    assert bench.late == 1
    assert bench.waited_for_reads
    bench.staging.forget("r")
    assert bench.staging.want("r", keys(1)) is WAITING


def test_a_request_whose_disk_is_found_to_hang_at_its_deadline_counts_as_late(make_bench):
    bench = make_bench()
    bench.staging.want("early", keys(1))
    bench.staging.drop("early")
    bench.staging.want("r", keys(1, 2))
    bench.step()
    bench.clock.advance(SECONDS)
    bench.staging.drop("r")  # in this step a worker has told that its disk hangs, so vLLM was told of a miss
    assert bench.late == 1
    assert bench.waited_for_reads
    assert bench.staging.want("r", keys(1, 2)) is LATE


def test_who_waits_in_the_queue_is_late_too(make_bench):
    bench = make_bench(blocks_max=2)
    bench.staging.want("one", keys(1, 2))
    bench.clock.advance(SECONDS / 2)
    bench.staging.want("two", keys(3, 4))
    bench.clock.advance(SECONDS / 2)
    bench.step()
    assert bench.held() == keys(3, 4)
    bench.read()
    bench.clock.advance(SECONDS / 2)
    assert bench.staging.want("two", keys(3, 4)) is LATE
    assert bench.late == 2
    assert not bench.waited_for_reads, "it was ready, vLLM never came for it"


def test_choosing_anew_keeps_the_deadline(make_bench):
    bench = make_bench()
    bench.staging.want("r", keys(1, 2))
    bench.clock.advance(SECONDS / 2)
    bench.staging.want("r", keys(1))
    bench.clock.advance(SECONDS / 2)
    assert bench.staging.want("r", keys(1)) is LATE


def test_after_a_reset_nothing_is_held_and_old_tickets_mean_nothing(make_bench):
    bench = make_bench()
    bench.staging.want("r", keys(1, 2))
    bench.step()
    bench.read()
    bench.staging.want("r", keys(1, 2))
    bench.staging.load_began("r", keys(1, 2))
    old = dict(bench.told)
    bench.staging.reset()
    bench.told.clear()
    assert bench.staging.orders() is None, "the workers let go by themselves"
    bench.staging.load_ended(keys(1, 2))
    assert bench.staging.want("s", keys(1, 2, 3, 4)) is WAITING
    bench.step()
    assert bench.held() == keys(1, 2, 3, 4)
    bench.staging.staged(dict.fromkeys(old, 1))
    assert bench.staging.want("s", keys(1, 2, 3, 4)) is WAITING


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_requests_end_slots_suffice_and_promises_hold(make_bench, seed):
    """Requests over few slots, read, failing, aborted, loaded in any order: each is promised or given up in time."""
    source = random.Random(seed)
    bench = make_bench(blocks_max=source.randrange(3, 9), ranks=source.randrange(1, 3))
    wanted = {
        f"r{index}": keys(*source.sample(range(20), source.randrange(1, bench.blocks_max + 1))) for index in range(30)
    }
    bad = set(keys(*source.sample(range(20), 3)))
    loading: list[list[bytes]] = []
    while wanted:
        bench.clock.advance(source.choice((0, 0.1, 1)))
        for name in list(wanted):
            wanted[name] = [key for key in wanted[name] if key not in bad]
            if not wanted[name] or source.random() < 0.01:
                bench.staging.forget(name)
                del wanted[name]
                continue
            progress = bench.staging.want(name, wanted[name])
            if progress is READY:
                assert set(wanted[name]) <= set(bench.told.values())
                bench.staging.load_began(name, wanted[name])
                loading.append(wanted.pop(name))
            elif progress is LATE:
                bench.staging.forget(name)
                del wanted[name]
        bench.step()
        assert {key for load in loading for key in load} <= set(bench.told.values()), "a promised block was let go"
        if bench.told:
            some = source.sample(sorted(bench.told.items()), source.randrange(len(bench.told) + 1))
            fresh = {ticket: 1 for ticket, _ in some if bench.staging._blocks[bench.told[ticket]].ranks < bench.ranks}
            bench.staging.staged(fresh)
        if source.random() < 0.05 and bad:
            bench.staging.failed(source.choice(sorted(bad)))
        if loading and source.random() < 0.5:
            bench.staging.load_ended(loading.pop(source.randrange(len(loading))))
    for load in loading:
        bench.staging.load_ended(load)
    bench.step()
    assert bench.held() == []
    assert bench.staging._held == 0
    assert bench.staging._blocks == bench.staging._keys == bench.staging._wishes == {}


# ---- which blocks a load needs ----

FULL = GroupShape(0, 1, 64)
WINDOW = GroupShape(1, 1, 64, window_blocks=2)


@pytest.mark.parametrize(
    ("shape", "computed", "end", "expected"),
    [
        (FULL, 0, 256, range(4)),
        (FULL, 64, 256, range(1, 4)),
        (FULL, 96, 255, range(1, 4)),
        (WINDOW, 0, 256, range(2, 4)),
        (WINDOW, 0, 255, range(1, 4)),
        (WINDOW, 192, 256, range(3, 4)),
        (WINDOW, 0, 64, range(1)),
    ],
)
def test_a_load_needs_the_prefix_of_full_attention_and_the_end_of_a_window(shape, computed, end, expected):
    assert needed(shape, computed_tokens=computed, end_tokens=end) == expected


def test_a_prefix_is_cut_to_what_can_be_staged():
    shapes = [FULL, WINDOW]

    def cut(end: int, blocks_max: int, computed: int = 0) -> int:
        return longest_end(shapes, computed_tokens=computed, end_tokens=end, blocks_max=blocks_max)

    assert cut(255, 7) == 255
    assert cut(255, 6) == 192
    assert cut(640, 6) == 256
    assert cut(640, 6, computed=320) == 576
    assert cut(640, 1) == 0
    assert cut(640, 1, computed=128) == 128
    assert smallest_blocks_max(shapes) == 2
    assert smallest_blocks_max([GroupShape(0, 1, 64), GroupShape(1, 1, 16, window_blocks=2)]) == 3


# ---- which models need two phases ----


def cache_of(*specs) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def attention(**options):
    options = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **options}
    kind = SlidingWindowSpec if "sliding_window" in options else FullAttentionSpec
    return kind(**options)


def mamba() -> MambaSpec:
    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("cache", "recomputes", "unsupported", "window"),
    [
        (cache_of(attention()), True, None, None),
        (cache_of(attention(), attention(sliding_window=96)), False, None, 96),
        (cache_of(attention(sliding_window=96), attention(sliding_window=64)), False, None, 64),
        (cache_of(attention(sliding_window=96)), False, None, 96),
        (cache_of(attention(), mamba()), False, "Mamba", None),
        (cache_of(UniformTypeKVCacheSpecs(32, kv_cache_specs={"a": attention(), "b": attention()})), True, None, None),
    ],
)
def test_models_are_told_apart_by_the_kinds_of_their_cache(cache, recomputes, unsupported, window):
    assert vllm_api.can_recompute(cache) is recomputes
    assert vllm_api.unsupported_layers(cache) == unsupported
    assert vllm_api.shortest_window_tokens(cache) == window
