"""The scheduler's half as vLLM drives it: over real files and a manual clock, without workers."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pykvcache_connector.messages import BlockKeysSpec, Identity, WorkerReport
from pykvcache_connector.scheduler import lookup as lookup_module
from pykvcache_connector.scheduler.admission import FULL_SECONDS, OVER_BUDGET_SECONDS
from pykvcache_connector.scheduler.index import DENIAL_SECONDS
from pykvcache_connector.scheduler.manager import Manager
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import HIT, MISS, RETRY, GroupShape, make_offload_key
from pykvcache_contract import metrics
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_contract.paths import block_path, quarantine_path
from pykvcache_contract.recency import recency_ns

SIZES = (8192, 12288)
"""Sizes of the block files of rank 0 and 1."""


def hash_of(number: int) -> bytes:
    return bytes.fromhex(fingerprint_of({"block": number}))


def key_of(number: int) -> bytes:
    return bytes(make_offload_key(hash_of(number), 0))


class Engine:
    """A manager and what vLLM and the workers would do with it."""

    def __init__(self, pool: Path, clock, wall_clock, ranks: int, options: dict) -> None:
        self.pool, self.clock, self.wall_clock, self.ranks = pool, clock, wall_clock, ranks
        self.counts = Counts()
        self.counted: dict[str, float] = {}
        self.manager = Manager(
            Settings.parse({"pool": str(pool)} | options), self.counts, clock=clock, wall_clock=wall_clock
        )

    def start(self) -> None:
        """Do what the connector does at start-up and in its first step."""
        self.manager.start(
            self.identity,
            block_sizes=tuple({0: size} for size in SIZES[: self.ranks]),
            writers=tuple(range(self.ranks)),
            shapes=(GroupShape(0, 1, 256),),
        )
        self.manager.identity()

    def identity(self, generation: int) -> Identity:
        ranks = range(self.ranks)
        fingerprints = tuple(fingerprint_of({"rank": rank, "generation": generation}) for rank in ranks)
        return Identity(generation, fingerprints, tuple({} for _ in ranks))

    def block_key(self, number: int, rank: int, generation: int = 0) -> BlockKey:
        return BlockKey(self.identity(generation).fingerprints[rank], hash_of(number), 0, rank)

    def make_file(self, number: int, *, rank: int = 0, size: int | None = None, generation: int = 0) -> Path:
        path = self.pool / block_path(self.block_key(number, rank, generation))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(SIZES[rank] if size is None else size)
        (self.pool / path.relative_to(self.pool).parts[0] / "quarantine").mkdir(exist_ok=True)
        return path

    def begin(self, request: str, numbers) -> None:
        hashes = [hash_of(number) for number in numbers]
        self.manager.begin(request, [key_of(number) for number in numbers], hashes=hashes)

    def look_up(self, request: str, number: int):
        return self.manager.lookup(key_of(number), SimpleNamespace(req_id=request))

    def store(self, numbers) -> list[bytes]:
        """Return the keys that are to be stored."""
        output = self.manager.prepare_store([key_of(number) for number in numbers], SimpleNamespace(req_id="r"))
        assert isinstance(output.store_spec, BlockKeysSpec)
        assert output.store_spec.keys == list(output.keys_to_store)
        assert list(output.evicted_keys) == []
        return list(output.keys_to_store)

    def report(self, *, generation: int = 0, stored=(), ranks: int = 1, **news) -> None:
        flags = {name: value for name, value in news.items() if name.startswith(("is_", "has_", "full_"))}
        numbers = {name: {key_of(number) for number in news[name]} for name in news.keys() - flags.keys()}
        counts = {key_of(number): ranks for number in stored}
        self.manager.apply(WorkerReport(generation, counts, **numbers, **flags))

    def declined(self, *labels: str) -> float:
        return self.count(metrics.DECLINED, *labels)

    def count(self, metric: metrics.Metric, *labels: str) -> float:
        for name, value in self.counts.take().data["counters"].items():
            self.counted[name] = self.counted.get(name, 0) + value
        return self.counted.get("\t".join((metric.name, *labels)), 0)


@pytest.fixture
def make_engine(tmp_path, clock, wall_clock):
    engines = []

    def make(*, ranks: int = 1, is_started: bool = True, **options) -> Engine:
        engines.append(Engine(tmp_path, clock, wall_clock, ranks, options))
        if is_started:
            engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.manager.shutdown()


@pytest.fixture
def engine(make_engine) -> Engine:
    return make_engine()


@pytest.fixture
def answer(until):
    """Return a function that returns what a lookup says once it does not ask to come back."""

    def ask(engine: Engine, request: str, number: int):
        until(lambda: engine.look_up(request, number) is not RETRY)
        return engine.look_up(request, number)

    return ask


@pytest.fixture
def held():
    """Return a function that keeps an engine's lookup thread busy until the event it returns is set."""
    gates = []

    def hold(engine: Engine) -> threading.Event:
        reached, opened = threading.Event(), threading.Event()
        gates.append(opened)

        def wait(_key: bytes) -> list[tuple[str, int]]:
            reached.set()
            assert opened.wait(60)
            return [("/nowhere", 0)]

        engine.manager._lookup.ask("held", [b"held"], paths=wait, deadline=0.0)
        assert reached.wait(60)
        return opened

    yield hold
    for gate in gates:
        gate.set()


# ---- lookups ----


def test_a_block_on_disk_is_a_hit_and_another_a_miss(engine, answer):
    engine.make_file(0)
    engine.begin("r", [0, 1])
    assert answer(engine, "r", 0) is HIT
    assert answer(engine, "r", 1) is MISS


def test_a_request_is_deferred_until_its_answer_is_there(engine, held, answer):
    engine.make_file(0)
    gate = held(engine)
    engine.begin("r", [0])
    assert [engine.look_up("r", 0) for _ in range(3)] == [RETRY] * 3
    gate.set()
    assert answer(engine, "r", 0) is HIT


def test_a_request_waits_until_its_answer_is_there_or_late(engine, held, answer):
    opened = held(engine)
    engine.begin("r", [1])
    assert engine.manager.is_waiting("r")
    engine.clock.advance(engine.manager.settings.lookup_timeout_seconds)
    assert not engine.manager.is_waiting("r")
    engine.begin("r2", [1])
    opened.set()
    assert answer(engine, "r2", 1) is MISS
    assert not engine.manager.is_waiting("r2")


def test_a_late_answer_is_a_miss_that_is_counted_once(engine, held, answer):
    engine.make_file(0)
    gate = held(engine)
    engine.begin("r", [0, 1])
    assert engine.look_up("r", 0) is RETRY
    engine.clock.advance(engine.manager.settings.lookup_timeout_seconds)
    assert [engine.look_up("r", number) for number in (0, 1, 0)] == [MISS] * 3
    assert engine.declined("lookup", "timeout") == 1
    gate.set()
    engine.begin("later", [0])
    assert answer(engine, "later", 0) is HIT


def test_when_too_many_lookups_wait_a_request_is_a_miss_at_once(make_engine, held, monkeypatch):
    monkeypatch.setattr(lookup_module, "MAX_WAITING_REQUESTS", 1)
    engine = make_engine()
    held(engine)
    engine.make_file(0)
    engine.begin("first", [0])
    engine.begin("second", [0])
    assert engine.look_up("first", 0) is RETRY
    assert engine.look_up("second", 0) is MISS
    assert engine.declined("lookup", "queue_full") == 1


def test_a_request_that_is_gone_leaves_nothing_behind(engine, held):
    held(engine)
    engine.begin("r", [0])
    engine.manager.forget("r")
    assert engine.look_up("r", 0) is MISS
    assert engine.manager._lookup._deadlines == {"held": 0.0}
    assert engine.declined("lookup", "timeout") == 0


def test_a_block_of_a_wrong_size_is_a_miss_and_moved_to_quarantine(engine, answer, until):
    path = engine.make_file(0, size=4096)
    engine.begin("r", [0])
    assert answer(engine, "r", 0) is MISS
    target = engine.pool / quarantine_path(engine.block_key(0, 0))
    until(target.exists)
    assert not path.exists()
    until(lambda: engine.count(metrics.QUARANTINED))  # a little after the move
    assert engine.count(metrics.QUARANTINED) == 1


def test_with_two_ranks_both_files_must_be_there(make_engine, answer):
    engine = make_engine(ranks=2)
    engine.make_file(0, rank=0)
    engine.make_file(0, rank=1)
    engine.make_file(1, rank=1)
    engine.begin("r", [0, 1, 2])
    assert [answer(engine, "r", number) for number in range(3)] == [HIT, MISS, MISS]


def test_a_lookup_that_finds_a_known_block_gone_makes_it_a_miss(engine, answer):
    engine.report(stored=[0])
    assert engine.look_up("r", 0) is HIT
    engine.begin("r", [0])
    answer(engine, "r", 1)
    assert engine.look_up("r", 0) is MISS


# ---- reports ----


def test_a_block_is_a_hit_from_the_report_that_it_is_published(engine):
    assert engine.store([0]) == [key_of(0)]
    engine.manager.complete_store([key_of(0)], SimpleNamespace(req_id="r"))
    assert engine.look_up("r", 0) is MISS
    engine.report(stored=[0])
    assert engine.look_up("r", 0) is HIT


def test_with_two_ranks_a_block_is_stored_only_when_both_have_reported(make_engine):
    engine = make_engine(ranks=2)
    engine.store([0, 1])
    engine.report(stored=[0, 1])
    assert engine.look_up("r", 0) is MISS
    assert engine.store([0]) == [], "it is still on its way"
    engine.report(stored=[0], dropped=[1])
    assert engine.look_up("r", 0) is HIT
    assert engine.look_up("r", 1) is MISS
    assert engine.store([1]) == [key_of(1)], "what one rank dropped may be stored again"


def test_with_two_ranks_one_report_may_speak_for_both(make_engine):
    engine = make_engine(ranks=2)
    engine.store([0])
    engine.report(stored=[0], ranks=2)
    assert engine.look_up("r", 0) is HIT


def test_a_second_rank_that_reports_after_a_drop_makes_no_hit(make_engine):
    engine = make_engine(ranks=2)
    engine.store([0])
    engine.report(dropped=[0])
    engine.report(stored=[0])
    assert engine.look_up("r", 0) is MISS


def test_a_lost_block_is_a_miss_and_may_be_stored_again(engine):
    engine.report(stored=[0])
    engine.report(lost=[0])
    assert engine.look_up("r", 0) is MISS
    assert engine.store([0]) == [key_of(0)]


def test_an_unreadable_block_is_denied_for_a_while_and_not_stored(engine, answer):
    engine.make_file(0)
    engine.report(stored=[0])
    engine.report(unreadable=[0])
    engine.begin("r", [0])
    assert answer(engine, "r", 0) is MISS
    assert engine.store([0]) == []
    engine.clock.advance(DENIAL_SECONDS)
    engine.begin("s", [0])
    assert answer(engine, "s", 0) is HIT


def test_while_the_disk_is_stalled_everything_is_a_miss(engine):
    engine.report(stored=[0], is_stalled=True)
    assert engine.look_up("r", 0) is MISS
    engine.clock.advance(3600)
    assert engine.look_up("s", 0) is MISS, "an idle engine hears nothing of its disk"
    engine.report(is_stalled=False)
    assert engine.look_up("t", 0) is HIT


def test_a_report_of_another_generation_is_void(engine):
    engine.begin("r", [1])
    for generation in (1, -1):
        engine.report(generation=generation, stored=[0], full_reason="pool_full", is_stalled=True)
    assert engine.look_up("s", 0) is MISS
    assert engine.store([0]) == [key_of(0)]


def test_a_report_before_the_start_is_void(make_engine):
    engine = make_engine(is_started=False)
    engine.report(stored=[0])
    engine.start()
    assert engine.look_up("r", 0) is MISS


# ---- stores ----


def test_only_blocks_that_are_neither_there_nor_on_their_way_are_stored(engine):
    engine.report(stored=[0])
    assert engine.store([0, 1, 2]) == [key_of(1), key_of(2)]
    assert engine.store([0, 1, 2, 3]) == [key_of(3)]
    assert engine.declined("store", "in_progress") == 2


def test_a_dropped_store_may_be_tried_again(engine):
    engine.store([0])
    engine.report(dropped=[0])
    assert engine.store([0]) == [key_of(0)]


@pytest.mark.parametrize(("reason", "other"), [("pool_full", "unavailable"), ("unavailable", "pool_full")])
def test_while_the_pool_takes_nothing_nothing_is_stored_and_nothing_remembered(engine, reason, other):
    engine.report(full_reason=reason)
    assert engine.store([0, 1]) == []
    assert engine.declined("store", reason) == 2
    assert engine.declined("store", other) == 0
    engine.clock.advance(FULL_SECONDS)
    assert engine.store([0, 1]) == [key_of(0), key_of(1)]


def test_stores_that_end_in_any_way_leave_nothing_in_memory(engine):
    engine.store(range(9))
    engine.report(stored=range(3), dropped=range(3, 9))
    assert engine.manager._stored_ranks == {}


# ---- loads ----


def test_loads_are_limited_by_the_bytes_of_the_largest_rank(make_engine):
    engine = make_engine(ranks=2, load_bytes_in_flight=10 * SIZES[1])
    context = SimpleNamespace(req_id="r")
    assert engine.manager.may_start_load({0: 8})
    spec = engine.manager.prepare_load([key_of(number) for number in range(8)], context)
    assert spec.keys == [key_of(number) for number in range(8)]
    assert engine.manager.may_start_load({0: 2})
    assert not engine.manager.may_start_load({0: 3})
    assert engine.declined("load", "in_flight_limit") == 1
    engine.manager.complete_load([key_of(number) for number in range(8)], context)
    assert engine.manager.may_start_load({0: 3})


# ---- identity ----


def test_a_reset_gives_a_new_generation_and_forgets_everything(engine):
    first = engine.manager.identity()
    engine.store([0])
    engine.report(stored=[1])
    engine.manager.prepare_load([key_of(9)], SimpleNamespace(req_id="r"))
    engine.manager.reset_cache()
    second = engine.manager.identity()
    assert (first.generation, second.generation) == (0, 1)
    assert first.fingerprints != second.fingerprints
    assert engine.look_up("r", 1) is MISS
    assert engine.store([0, 1]) == [key_of(0), key_of(1)]
    engine.report(generation=0, stored=[0])
    assert engine.look_up("r", 0) is MISS


def test_lookups_of_the_generation_before_make_no_hits_after_a_reset(engine, held, answer):
    engine.make_file(0)
    gate = held(engine)
    engine.begin("r", [0])
    engine.manager.reset_cache()
    gate.set()
    engine.begin("s", [1])
    assert answer(engine, "s", 1) is MISS
    assert engine.look_up("r", 0) is MISS


def test_a_damaged_file_found_after_a_reset_stays_in_its_own_folder(engine, held, until):
    path = engine.make_file(0, size=100)
    gate = held(engine)
    engine.begin("r", [0])
    engine.manager.reset_cache()
    gate.set()
    until((engine.pool / quarantine_path(engine.block_key(0, 0))).exists)
    assert not path.exists()


def test_a_reset_before_the_first_step_counts_because_weights_may_have_changed(make_engine):
    engine = make_engine(is_started=False)
    engine.manager.reset_cache()
    engine.start()
    assert engine.manager.identity().generation == 1


def test_a_request_with_an_adapter_neither_loads_nor_stores_even_after_its_end(engine, answer):
    engine.make_file(1)
    engine.begin("other", [1])
    assert answer(engine, "other", 1) is HIT
    engine.manager.exclude("r")
    assert engine.look_up("r", 1) is MISS
    engine.manager.forget("r")
    assert engine.store([2]) == []
    assert engine.look_up("other", 1) is HIT
    assert engine.declined("lookup", "adapter") == 1


def test_off_means_miss_and_nothing_stored(make_engine):
    engine = make_engine(is_started=False)
    engine.make_file(0)
    engine.begin("r", [0])
    assert engine.manager.identity() is None
    assert engine.look_up("r", 0) is MISS
    assert engine.store([0, 1]) == []
    assert engine.declined("lookup", "queue_full") == 0


def test_switched_off_later_it_stays_off(engine):
    engine.report(stored=[0])
    engine.manager.off_reason = "a reason"
    assert engine.look_up("r", 0) is MISS
    assert engine.store([1]) == []
    assert engine.manager.identity() is None


def test_vllms_other_questions_have_harmless_answers(engine):
    context = SimpleNamespace(req_id="r")
    engine.manager.on_new_request(context)
    engine.manager.get_load_source(key_of(0), context)
    assert list(engine.manager.take_events()) == []


# ---- recency, limits and the trace ----


def file_times(engine: Engine, numbers, *, rank: int = 0) -> list[int]:
    paths = [engine.pool / block_path(engine.block_key(number, rank)) for number in numbers]
    return [path.stat().st_mtime_ns for path in paths]


def test_a_lookup_notes_the_use_of_blocks_on_all_ranks_that_are_there_completely(make_engine, answer, until):
    engine = make_engine(ranks=2)
    now = engine.wall_clock()
    old = recency_ns(now - 3600, 9)
    for number, ranks in ((0, (0, 1)), (1, (0, 1)), (2, (0,))):
        for rank in ranks:
            os.utime(engine.make_file(number, rank=rank), ns=(old, old))
    engine.begin("r", range(4))
    assert answer(engine, "r", 1) is HIT
    for rank in (0, 1):
        until(lambda rank=rank: file_times(engine, [0, 1], rank=rank) == [recency_ns(now, 0), recency_ns(now, 1)])
    assert file_times(engine, [2]) == [old], "nobody can use a block that a rank lacks"


def test_a_use_is_noted_anew_once_the_last_one_is_old_enough(engine, answer, until):
    engine.make_file(0)
    for request, seconds in (("a", 0.0), ("b", 30.0), ("c", 170.0)):
        engine.wall_clock.advance(seconds)
        engine.begin(request, [0])
        assert answer(engine, request, 0) is HIT
        expected = recency_ns(engine.wall_clock() - (30.0 if request == "b" else 0.0), 0)
        until(lambda expected=expected: file_times(engine, [0]) == [expected])


def prepared(engine: Engine, request: str, numbers) -> BlockKeysSpec:
    context = SimpleNamespace(req_id=request)
    return engine.manager.prepare_store([key_of(number) for number in numbers], context).store_spec


def test_a_store_carries_how_deep_its_blocks_lie(engine):
    engine.begin("r", range(10))
    arrival = engine.wall_clock()
    engine.wall_clock.advance(600)
    assert prepared(engine, "r", [3, 4]).notes.recencies_ns == [recency_ns(arrival, 3), recency_ns(arrival, 4)]
    engine.manager.forget("r")
    assert prepared(engine, "r", [9]).notes.recencies_ns == [recency_ns(arrival, 9)], "offered one step after the end"
    engine.manager.step_over()
    assert prepared(engine, "r", [8]).notes.recencies_ns[0] < recency_ns(engine.wall_clock(), 1000)


def test_a_store_carries_which_blocks_two_requests_wanted_while_there_is_a_write_budget(engine):
    engine.begin("a", [0, 1])
    engine.begin("b", [0, 1])
    assert prepared(engine, "b", [0]).notes.repeated == [False]
    engine.report(has_write_budget=True)
    engine.begin("c", [1, 2])
    engine.begin("d", [2, 3])
    assert prepared(engine, "d", [1, 2, 3]).notes.repeated == [False, True, False]


def test_over_the_write_budget_only_blocks_wanted_twice_are_copied_for_a_while(engine):
    engine.report(has_write_budget=True)
    engine.begin("a", [0, 1])
    engine.begin("b", [1, 2])
    engine.report(is_over_budget=True)
    assert engine.store([0, 1, 2]) == [key_of(1)]
    assert engine.declined("store", "write_budget") == 2
    assert engine.declined("store", "pool_full") == 0
    engine.clock.advance(OVER_BUDGET_SECONDS)
    assert engine.store([0, 2]) == [key_of(0), key_of(2)]


def test_once_the_write_budget_is_spent_nothing_is_copied_for_a_while(engine):
    engine.report(has_write_budget=True)
    engine.begin("a", [0, 1])
    engine.begin("b", [1, 2])
    engine.report(is_budget_spent=True)
    assert engine.store([0, 1]) == []
    assert engine.declined("store", "write_budget") == 2
    assert engine.declined("store", "pool_full") == 0
    engine.clock.advance(OVER_BUDGET_SECONDS)
    assert engine.store([0, 1]) == [key_of(0), key_of(1)]


def test_every_request_with_a_whole_block_leaves_a_line_in_the_trace(make_engine, answer, tmp_path, until):
    trace = tmp_path / "trace.jsonl"
    engine = make_engine(ranks=2, trace=str(trace))
    engine.begin("short", [])
    engine.begin("r", [0, 1])
    assert answer(engine, "r", 0) is MISS
    until(trace.exists)
    until(trace.read_text)
    assert json.loads(trace.read_text()) == {
        "seconds": engine.wall_clock(),
        "fingerprint": engine.identity(0).fingerprints[0][:12],
        "tokens_per_block": 256,
        "block_bytes": sum(SIZES),
        "blocks": [hash_of(number).hex()[:16] for number in (0, 1)],
    }
