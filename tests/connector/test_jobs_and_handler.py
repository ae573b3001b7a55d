"""vLLM's jobs: when they are over, what is given up, and how vLLM hears of it."""

import threading
import time

import pytest

from pykvcache_connector.messages import BlockKeysSpec
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import GPULoadStoreSpec
from pykvcache_connector.worker.handler import Handler
from pykvcache_connector.worker.jobs import Block, BlockState, Job, Jobs
from pykvcache_connector.worker.layout import BlockRows
from pykvcache_connector.worker.outcomes import Declined, Outcomes
from pykvcache_contract.errors import CapacityError, ReadOnlyError


def make_job(number: int, count: int, *, is_store: bool = False, started: float | None = None) -> Job:
    job = Job(number, is_store, time.monotonic() if started is None else started)
    job.blocks = [Block(job, bytes([index]), BlockRows((2 * index, 2 * index + 1), 0), None) for index in range(count)]
    return job


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def over(jobs: Jobs) -> list[int]:
    return [job.job_id for job, _ in jobs.take_finished()]


def test_a_job_is_over_when_its_last_block_is(jobs):
    job = make_job(1, 2)
    jobs.add(job)
    for block in job.blocks:
        assert over(jobs) == []
        assert jobs.begin_copy(block)
        assert jobs.end(block, moved_bytes=10)
    assert over(jobs) == [1]
    assert over(jobs) == []
    assert (job.moved_bytes, job.failed_rows) == (20, set())


def test_a_job_without_blocks_is_over_at_once(jobs):
    jobs.add(make_job(1, 0))
    assert over(jobs) == [1]


def test_a_block_goes_through_its_states_once(jobs):
    job = make_job(1, 1)
    jobs.add(job)
    (block,) = job.blocks
    assert block.state is BlockState.WAITING
    assert jobs.begin_copy(block)
    assert block.state is BlockState.COPYING
    assert not jobs.begin_copy(block)
    assert jobs.end(block, moved_bytes=1)
    assert block.state is BlockState.DONE
    assert not jobs.end(block, moved_bytes=1, failed=True)
    assert (job.moved_bytes, job.failed_rows) == (1, set())


def test_failed_blocks_name_their_rows(jobs):
    job = make_job(1, 3)
    jobs.add(job)
    for index, block in enumerate(job.blocks):
        jobs.end(block, moved_bytes=0, failed=index == 1)
    assert job.failed_rows == {2, 3}


@pytest.mark.parametrize("is_store", [False, True])
def test_giving_up_ends_waiting_blocks_only(jobs, is_store):
    job = make_job(1, 3, is_store=is_store)
    jobs.add(job)
    jobs.begin_copy(job.blocks[0])
    jobs.end(job.blocks[1], moved_bytes=5)
    assert jobs.give_up([1, 77]) == [job.blocks[2]]
    assert over(jobs) == []
    assert not jobs.begin_copy(job.blocks[2])
    jobs.end(job.blocks[0], moved_bytes=5)
    assert over(jobs) == [1]
    assert job.failed_rows == (set() if is_store else {4, 5})
    assert jobs.give_up([1]) == []


def test_waiting_lasts_until_the_running_copy_ends_and_no_longer(jobs):
    job, other = make_job(1, 2), make_job(2, 1)
    jobs.add(job)
    jobs.add(other)
    jobs.begin_copy(job.blocks[0])
    jobs.give_up([1])
    waiting = threading.Thread(target=jobs.wait, args=[{1, 77}])
    waiting.start()
    assert waiting.is_alive()
    jobs.end(job.blocks[0], moved_bytes=1)
    waiting.join(60)
    assert not waiting.is_alive()
    assert over(jobs) == [1]


def test_waiting_for_jobs_that_are_over_or_unknown_returns_at_once(jobs):
    jobs.add(make_job(1, 0))
    jobs.wait({1, 2})


def test_only_loads_are_late(jobs):
    now = time.monotonic()
    jobs.add(make_job(1, 1, started=now - 10))
    jobs.add(make_job(2, 1, started=now - 10, is_store=True))
    jobs.add(make_job(3, 1, started=now + 1000))
    assert jobs.late(5) == [1]
    assert jobs.late(60) == []


def test_a_late_job_that_is_over_is_late_no_more(jobs):
    job = make_job(1, 1, started=time.monotonic() - 10)
    jobs.add(job)
    jobs.give_up(jobs.late(5))
    assert jobs.late(5) == []
    assert over(jobs) == [1]


# ---- what became of a store ----


@pytest.mark.parametrize("result", [CapacityError("full"), ReadOnlyError("read-only"), Declined("write_budget")])
def test_a_store_is_told_as_dropped_only_once_its_reason_is_told_and_counted(monkeypatch, result):
    counts, told_before = Counts(), []
    outcomes = Outcomes(counts, rank=0)
    monkeypatch.setattr(counts, "add", lambda *_what: told_before.append(outcomes.take_report()))
    (block,) = make_job(1, 1, is_store=True).blocks
    outcomes.store_ended(block, 0, result, 4096)
    assert told_before == [None]
    report = outcomes.take_report()
    assert report.dropped == {block.key}
    assert (report.full_reason == "pool_full", report.is_over_budget) == (
        not isinstance(result, Declined),
        isinstance(result, Declined),
    )


# ---- the handler ----


def gpu(*rows: int, first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(rows), group_sizes=[len(rows)], block_indices=[first])


def results_of(handler: Handler, until, count: int) -> dict[int, object]:
    results: dict[int, object] = {}

    def are_there() -> bool:
        results.update({result.job_id: result for result in handler.get_finished()})
        return len(results) >= count

    until(are_there)
    return results


def test_a_store_and_a_load_succeed_for_vllm(make_worker, until):
    worker = make_worker()
    handler = Handler(worker.transfer)
    keys = BlockKeysSpec([worker.key(0), worker.key(1)])
    expected = worker.pages(0), worker.pages(1)
    assert handler.submit_store(1, gpu(0, 1, 2, 3), keys)
    results = results_of(handler, until, 1)
    assert (results[1].success, results[1].transfer_size) == (True, 2 * worker.transfer.layouts[0].used_size_bytes)
    worker.settle([0, 1])
    worker.wipe()
    assert handler.submit_load(2, keys, gpu(0, 1, 2, 3))
    assert results_of(handler, until, 1)[2].success
    assert (worker.pages(0), worker.pages(1)) == expected
    assert handler.take_failed_rows() == set()


def test_the_older_interface_tells_direction_by_the_target(make_worker, until):
    worker = make_worker()
    handler = Handler(worker.transfer)
    keys = BlockKeysSpec([worker.key(0)])
    expected = worker.pages(0)
    assert handler.transfer_async(1, (gpu(0, 1), keys))
    results_of(handler, until, 1)
    worker.settle([0])
    worker.wipe()
    assert handler.transfer_async(2, (keys, gpu(0, 1)))
    assert results_of(handler, until, 1)[2].success
    assert worker.pages(0) == expected


def test_a_load_whose_front_is_on_the_gpu_already_takes_the_rest(make_worker, until):
    worker = make_worker()
    worker.store_all([0, 1])
    expected = worker.pages(0)[1], worker.pages(1)
    worker.wipe()
    handler = Handler(worker.transfer)
    handler.submit_load(7, BlockKeysSpec([worker.key(0), worker.key(1)]), gpu(1, 2, 3, first=1))
    results_of(handler, until, 1)
    assert (worker.pages(0)[1], worker.pages(1)) == expected
    assert not any(worker.pages(0)[0])


def test_a_failed_load_is_a_success_for_vllm_and_its_rows_are_told_once(make_worker, until):
    worker = make_worker()
    handler = Handler(worker.transfer)
    handler.submit_load(3, BlockKeysSpec([worker.key(5)]), gpu(10, 11))
    assert results_of(handler, until, 1)[3].success
    assert handler.take_failed_rows() == {10, 11}
    assert handler.take_failed_rows() == set()


def test_without_a_pool_loads_fail_softly_and_stores_are_dropped():
    handler = Handler(None)
    handler.submit_load(1, BlockKeysSpec([b"key-0000"]), gpu(4, 5))
    handler.submit_store(2, gpu(6, 7), BlockKeysSpec([b"key-0000"]))
    handler.wait({1, 2})
    results = handler.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(1, True), (2, True)]
    assert handler.get_finished() == []
    assert handler.take_failed_rows() == {4, 5}
    handler.shutdown()


def test_shutting_down_publishes_what_has_begun(make_worker):
    worker = make_worker()
    handler = Handler(worker.transfer)
    handler.submit_store(1, gpu(*range(8)), BlockKeysSpec([worker.key(number) for number in range(4)]))
    worker.transfer._reactor.barrier().wait()
    handler.shutdown()
    assert len(worker.files()) == 4
    handler.shutdown()
