"""Limits that the sidecar sets in the pool's ledger, as a worker meets them; and the times its files get."""

import time

import pytest

from pykvcache_connector.messages import StoreNotes, WorkerReport
from pykvcache_connector.worker import housekeeping as housekeeping_module
from pykvcache_connector.worker.layout import BlockRows
from pykvcache_contract import metrics
from pykvcache_contract.recency import depth_of, recency_ns
from pykvcache_storage.usage import UsageLedger

SIZE = 12288
"""Of one block file."""


@pytest.fixture
def ledger(pool) -> UsageLedger:
    return UsageLedger(str(pool))


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr(housekeeping_module, "LOOK_SECONDS", 0.0)


def store(worker, numbers, *, repeated: bool = False, recency: int = 0) -> set[int]:
    """Store blocks; return which were published."""
    worker.report = WorkerReport()
    worker.next_job += 1
    worker.transfer.submit(
        worker.next_job,
        is_store=True,
        keys=[worker.key(number) for number in numbers],
        rows=[BlockRows(worker.rows(number), 0) for number in numbers],
        notes=StoreNotes([recency] * len(numbers), [repeated] * len(numbers)),
    )
    assert worker.finish(worker.next_job).moved_bytes > 0, "vLLM never waits for room"
    worker.settle(numbers)
    return {number for number in numbers if worker.key(number) in worker.report.stored}


# ---- capacity ----


def test_above_the_limit_in_the_ledger_stores_are_refused_and_below_it_resume(make_worker, ledger, used_on_disk, pool):
    worker = make_worker()
    assert store(worker, range(4)) == set(range(4))
    ledger.set_limits(capacity_bytes=4 * SIZE, write_budget_bytes=0)
    assert store(worker, [4, 5]) == set()
    assert worker.report.full_reason == "pool_full"
    worker.expect(2, metrics.STORE_FAILED, "capacity")
    ledger.set_limits(capacity_bytes=5 * SIZE, write_budget_bytes=0)
    assert len(store(worker, [4, 5])) == 1
    assert used_on_disk(pool) == 5 * SIZE


def test_room_that_the_sidecar_makes_is_used(make_worker, ledger, pool):
    worker = make_worker()
    ledger.set_limits(capacity_bytes=2 * SIZE, write_budget_bytes=0)
    assert store(worker, [0, 1]) == {0, 1}
    assert store(worker, [2]) == set()
    worker.path(0).unlink()
    ledger.release(SIZE)
    assert store(worker, [2]) == {2}


def test_the_smaller_of_two_limits_counts(make_worker, ledger):
    ledger.set_limits(capacity_bytes=1 << 30, write_budget_bytes=0)
    worker = make_worker(capacity=SIZE)
    assert len(store(worker, [0, 1])) == 1
    ledger.set_limits(capacity_bytes=1, write_budget_bytes=0)
    assert store(worker, [2]) == set()


def test_without_an_own_capacity_the_sidecars_counts(make_worker, ledger):
    worker = make_worker()
    assert store(worker, [0]) == {0}, "the default is larger than a block"
    ledger.set_limits(capacity_bytes=2 * SIZE, write_budget_bytes=0)
    assert len(store(worker, [1, 2])) == 1


def test_a_capacity_below_the_sidecars_is_warned_of_because_eviction_would_begin_above_it(make_worker, ledger, caplog):
    ledger.set_limits(capacity_bytes=1 << 30, write_budget_bytes=0)
    worker = make_worker(capacity=SIZE)
    assert store(worker, [0]) == {0}
    (line,) = [record.getMessage() for record in caplog.records if "capacity" in record.getMessage()]
    assert "Leave capacity out, or give both the same" in line


# ---- write budget ----


def test_over_the_write_budget_stores_are_declined_and_are_no_failures(make_worker, ledger, until):
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=3 * SIZE)
    worker = make_worker()
    until(lambda: worker.step() or worker.report.has_write_budget)
    assert len(store(worker, range(4), repeated=True)) == 3
    worker.expect(1, metrics.DECLINED, "store", "write_budget")
    assert worker.report.full_reason == ""
    assert worker.total(metrics.STORE_FAILED, "capacity") == 0
    assert ledger.used_bytes() == 3 * SIZE


@pytest.mark.parametrize("repeated", [False, True])
def test_a_block_that_exceeds_the_budget_is_told_to_the_scheduler(make_worker, ledger, repeated):
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=1)
    worker = make_worker()
    assert store(worker, [0], repeated=repeated) == set()
    assert (worker.report.is_over_budget, worker.report.is_budget_spent) == (not repeated, repeated)


def test_the_scheduler_hears_of_a_write_budget_that_comes_and_goes(make_worker, ledger, until):
    worker = make_worker()
    assert store(worker, [0]) == {0}
    assert worker.report.has_write_budget is None
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=1 << 40)
    store(worker, [1], repeated=True)
    assert worker.report.has_write_budget
    worker.report = WorkerReport()
    worker.use(1)
    until(lambda: worker.step() or worker.report.has_write_budget)
    assert worker.report.generation == 1
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=0)
    store(worker, [2])
    until(lambda: worker.step() or worker.report.has_write_budget is False)


@pytest.mark.parametrize(
    ("one", "other", "merged"), [(None, None, None), (None, True, True), (False, True, True), (None, False, False)]
)
def test_of_two_ranks_either_may_tell_of_a_write_budget(one, other, merged):
    first = WorkerReport(has_write_budget=one, is_budget_spent=True)
    second = WorkerReport(has_write_budget=other, is_over_budget=True)
    assert first.merge(second).has_write_budget is second.merge(first).has_write_budget is merged
    assert first.merge(second).is_over_budget
    assert first.merge(second).is_budget_spent


# ---- times of files ----


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_stored_file_has_the_time_that_the_scheduler_said(make_worker, engine):
    worker = make_worker(engine=engine)
    recency = recency_ns(1_800_000_003.5, 41)
    assert store(worker, [0], recency=recency) == {0}
    assert worker.path(0).stat().st_mtime_ns == recency


def test_without_notes_a_block_counts_as_a_head_wanted_now(make_worker):
    worker, begin = make_worker(), time.time()
    worker.store_all([0])
    modified = worker.path(0).stat().st_mtime_ns
    assert recency_ns(begin, 0) <= modified <= recency_ns(time.time(), 0)
    assert depth_of(modified) == 0
