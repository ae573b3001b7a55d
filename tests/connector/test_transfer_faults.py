"""A worker's transfer over a simulated disk: hung, slow to answer, full staging, and a new identity in between."""

import errno
import random
import time
from dataclasses import replace

import pytest

from pykvcache_connector.messages import WorkerReport
from pykvcache_connector.worker import transfer as transfer_module
from pykvcache_contract import metrics
from pykvcache_contract.paths import BLOCK_SUFFIX, fingerprint_directory
from pykvcache_storage.reactor.operations import Close as CloseFile
from pykvcache_storage.reactor.operations import Link, MakeDirectory, Open, Read, Rename, Touch, Unlink, Write
from pykvcache_storage.usage import UsageLedger

FOREVER = 1_000_000
SOON_SECONDS = 0.05
"""Deadline of loads in these tests."""
PROMPT_SECONDS = 20.0
"""Far above what a copy takes on a busy machine; who waits for a hung disk waits 30 s, the deadline, or for ever."""


def block_files(disk) -> list[str]:
    return [path for path in disk.files.file_names() if path.endswith(BLOCK_SUFFIX) and "quarantine" not in path]


def temporary_files(disk) -> list[str]:
    return [path for path in disk.files.file_names() if path.endswith(".tmp")]


# ---- a disk that hangs ----


@pytest.mark.parametrize("kind", [Open, Read])
def test_a_load_from_a_hung_disk_ends_at_its_deadline_with_rows_to_recompute(make_simulated_worker, until, kind):
    worker, disk = make_simulated_worker(load_timeout_seconds=SOON_SECONDS)
    worker.store_all(range(6))
    disk.hang(kind, times=FOREVER)
    job = worker.finish(worker.load(range(6)))
    assert job.failed_rows == set(range(12))
    assert worker.total(metrics.LOAD_FAILED, "timeout") == 6
    assert worker.report.unreadable == {worker.key(number) for number in range(6)}
    until(lambda: worker.step() or worker.report.is_stalled)


def test_after_a_hang_the_disk_serves_loads_again_and_no_slot_is_lost(make_simulated_worker, until):
    worker, disk = make_simulated_worker(load_timeout_seconds=SOON_SECONDS)
    worker.store_all(range(6))
    expected = [worker.pages(number) for number in range(6)]
    disk.hang(Read, times=FOREVER)
    worker.finish(worker.load(range(6)))
    worker.wipe()
    until(lambda: worker.step() or worker.report.is_stalled)
    disk.release()
    until(lambda: worker.transfer._reactor.state().slots_used == 0)
    worker.transfer._reactor.barrier().wait()  # a task is noted as over a little after its slot is free
    worker.report = WorkerReport()
    worker.step()
    assert worker.report.is_stalled is False
    worker.transfer.options = replace(worker.transfer.options, load_timeout_seconds=PROMPT_SECONDS)
    assert all(not any(page) for number in range(6) for page in worker.pages(number)), "a late read was copied"
    for number in range(6):
        assert worker.finish(worker.load([number])).failed_rows == set()
    assert [worker.pages(number) for number in range(6)] == expected
    assert disk.files.open_descriptors == 0


def test_a_healthy_disk_is_never_called_stalled(make_simulated_worker):
    worker, _ = make_simulated_worker()
    worker.store_all(range(6))
    worker.finish(worker.load(range(6)))
    worker.step()
    assert not worker.report.is_stalled
    assert worker.report.unreadable == set()


def test_waiting_for_loads_gives_up_those_whose_reads_are_queued(make_simulated_worker):
    worker, disk = make_simulated_worker()
    worker.store_all(range(6))
    disk.hang(Read, times=FOREVER)
    job_id = worker.load(range(6))
    began = time.monotonic()
    worker.transfer.wait({job_id})
    assert time.monotonic() - began < PROMPT_SECONDS
    assert worker.finish(job_id).failed_rows == set(range(12))
    assert worker.total(metrics.LOAD_FAILED, "stopped") == 6
    assert worker.report.unreadable == set(), "giving up says nothing about the disk"


def test_waiting_for_stores_waits_for_copies_and_never_for_a_hung_disk(make_simulated_worker, until):
    worker, disk = make_simulated_worker(slots=4)
    disk.hang(Write, times=FOREVER)
    job_id = worker.store(range(20))
    began = time.monotonic()
    worker.transfer.wait({job_id})
    assert time.monotonic() - began < PROMPT_SECONDS
    worker.finish(job_id)
    assert worker.total(metrics.DECLINED, "store", "staging_full") == 17, "three of four slots are for stores"
    disk.release()
    until(lambda: worker.step() or len(worker.report.stored) == 3)
    assert len(block_files(disk)) == 3
    assert temporary_files(disk) == []


def test_loads_go_on_while_writes_hang_because_stores_leave_them_a_slot(make_simulated_worker):
    worker, disk = make_simulated_worker(slots=4)
    worker.store_all([0])
    disk.hang(Write, times=FOREVER)
    worker.store(range(1, 20))
    assert worker.finish(worker.load([0])).failed_rows == set()


def test_stores_beyond_the_queue_are_dropped_at_once(make_simulated_worker, monkeypatch, until):
    monkeypatch.setattr(transfer_module, "MAX_WAITING_STORES", 10)
    worker, disk = make_simulated_worker(slots=4)
    disk.hang(Write, times=FOREVER)
    first = worker.store(range(10))
    until(lambda: worker.transfer._reactor.state().tasks_waiting == 7)
    second = worker.store(range(10, 20))
    assert worker.finish(second).moved_bytes == 0
    assert worker.total(metrics.DECLINED, "store", "staging_full") == 10
    assert worker.report.dropped == {worker.key(number) for number in range(10, 20)}
    assert worker.transfer._reactor.state().slots_used <= 4
    disk.release()
    worker.finish(first)
    worker.settle(range(10))
    assert len(worker.report.stored) == 10


def test_a_job_whose_request_was_aborted_leaves_gpu_memory_alone_afterwards(make_simulated_worker, until):
    worker, disk = make_simulated_worker()
    worker.store_all(range(4))
    disk.hang(Read, times=FOREVER)
    job_id = worker.load(range(4))
    worker.transfer.wait({job_id})
    worker.wipe()
    disk.release()
    until(lambda: worker.transfer._reactor.state().slots_used == 0)
    assert all(not any(page) for number in range(4) for page in worker.pages(number))


def test_closing_with_a_hung_disk_returns_within_its_limit(make_simulated_worker):
    worker, disk = make_simulated_worker()
    disk.hang(Write, times=FOREVER)
    worker.finish(worker.store(range(3)))
    began = time.monotonic()
    worker.transfer.close(0.05)
    assert time.monotonic() - began < PROMPT_SECONDS


def test_when_the_reactor_fails_every_load_is_recomputed_and_nobody_waits(make_simulated_worker, monkeypatch, until):
    worker, disk = make_simulated_worker()
    worker.store_all(range(3))
    disk.hang(Read, times=FOREVER)
    before = worker.load(range(3))

    def broken(_timeout_seconds):
        raise OSError(errno.ENOMEM, "the ring is gone")

    monkeypatch.setattr(disk, "wait", broken)
    disk.wake()
    until(lambda: not worker.transfer._reactor.is_alive())
    assert worker.finish(before).failed_rows == set(range(6))
    after = worker.load(range(3))
    worker.transfer.wait({after})
    assert worker.finish(after).failed_rows == set(range(6))
    worker.finish(worker.store([7]))
    worker.settle([7])
    assert worker.report.dropped == {worker.key(7)}


# ---- errors ----


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", [Open, Read])
def test_a_block_that_cannot_be_read_is_recomputed_and_denied_but_not_moved(make_simulated_worker, kind, code):
    worker, disk = make_simulated_worker()
    worker.store_all([0])
    before = disk.files.file_names()
    disk.fail(kind, error=code)
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    assert worker.report.unreadable == {worker.key(0)}
    assert worker.report.lost == set()
    assert worker.total(metrics.LOAD_FAILED, "io") == 1
    assert disk.files.file_names() == before
    assert worker.finish(worker.load([0])).failed_rows == set()


@pytest.mark.parametrize(
    ("code", "reason", "full_reason"),
    [
        (errno.ENOSPC, "capacity", "pool_full"),
        (errno.EDQUOT, "capacity", "pool_full"),
        (errno.EFBIG, "capacity", "pool_full"),
        (errno.EROFS, "read_only", "pool_full"),
        (errno.EIO, "io", ""),
    ],
    ids=lambda value: errno.errorcode.get(value) if isinstance(value, int) else None,
)
@pytest.mark.parametrize("kind", [Open, Write, CloseFile, Link, MakeDirectory])
def test_a_block_that_cannot_be_written_is_a_dropped_store(make_simulated_worker, kind, code, reason, full_reason):
    worker, disk = make_simulated_worker()
    disk.fail(kind, error=code)
    worker.finish(worker.store([0]))
    worker.settle([0])
    assert worker.report.dropped == {worker.key(0)}
    assert worker.report.full_reason == full_reason
    worker.expect(1, metrics.STORE_FAILED, reason)
    assert disk.files.file_names() == []
    worker.store_all([1])
    # In the order of the housekeeping's thread, so the store before has been refused or released by now.
    usage = UsageLedger(str(worker.pool)).usage()
    assert usage.used_bytes == worker.transfer.layouts[0].file_size_bytes
    assert (usage.refused_bytes > 0) is (code in {errno.ENOSPC, errno.EDQUOT})


def test_a_temporary_file_that_cannot_be_removed_does_not_spoil_the_store(make_simulated_worker):
    worker, disk = make_simulated_worker()
    disk.fail(Unlink, error=errno.EIO)
    worker.store_all([0])
    assert len(block_files(disk)) == 1


def test_a_damaged_file_that_cannot_be_moved_is_denied(make_simulated_worker, until):
    worker, disk = make_simulated_worker()
    worker.store_all([0])
    disk.files.content(block_files(disk)[0])[5000] ^= 1
    disk.fail(Rename, error=errno.EACCES)
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    until(lambda: worker.step() or worker.report.unreadable == {worker.key(0)})
    assert worker.total(metrics.QUARANTINED) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_under_random_faults_every_block_is_loaded_right_or_reported(make_simulated_worker, until, seed):
    choose = random.Random(seed)
    worker, disk = make_simulated_worker(seed=seed)
    kinds = [Open, Read, Write, CloseFile, Link, MakeDirectory, Rename, Unlink, Touch]
    numbers = range(30)
    expected = [worker.pages(number) for number in numbers]
    for _ in range(5):
        for _ in range(6):
            codes = [errno.EIO, errno.EINTR, errno.ENOSPC, errno.ENOENT]
            disk.fail(choose.choice(kinds), error=choose.choice(codes), nth=choose.randrange(1, 60), times=2)
            disk.shorten(choose.choice([Read, Write]), nth=choose.randrange(1, 30), times=3)
        for path in choose.sample(block_files(disk), min(2, len(block_files(disk)))):
            content = disk.files.content(path)
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        worker.report.stored.clear()
        worker.report.dropped.clear()
        worker.finish(worker.store(numbers))
        worker.settle(numbers)
        saved = [tensor.clone() for tensor in worker.tensors]
        worker.wipe()
        failed = worker.finish(worker.load(numbers)).failed_rows
        for number in numbers:
            rows = set(worker.rows(number))
            assert rows <= failed or worker.pages(number) == expected[number], f"seed {seed}, block {number}"
        for tensor, copy in zip(worker.tensors, saved, strict=True):
            tensor.copy_(copy)
        # Damaged files are moved aside after their load is over; the next round looks at the files that are there.
        until(lambda: worker.transfer._reactor.state().slots_used == 0)
    disk.files.lose_processes()


# ---- a new identity ----


def test_stores_in_flight_at_a_reset_go_to_the_old_folder_and_are_not_reported(make_simulated_worker, until):
    worker, disk = make_simulated_worker(slots=8)
    disk.hang(Write, times=FOREVER)
    worker.finish(worker.store(range(3)))
    worker.use(1)
    disk.release()
    until(lambda: worker.transfer._reactor.state().slots_used == 0)
    worker.step()
    assert worker.report.stored == {}
    assert worker.report.dropped == set()
    old, new = (str(worker.path(0, generation=generation)) for generation in (0, 1))
    assert old in disk.files.file_names()
    assert new not in disk.files.file_names()
    worker.store_all([0])
    assert worker.report.generation == 1
    assert new in disk.files.file_names()


def test_after_a_reset_the_old_blocks_are_missing(make_simulated_worker):
    worker, _ = make_simulated_worker()
    worker.store_all([0])
    worker.use(1)
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    assert worker.report.lost == {worker.key(0)}


def test_loads_that_are_late_after_a_reset_do_not_deny_the_new_blocks(make_simulated_worker):
    worker, disk = make_simulated_worker(load_timeout_seconds=SOON_SECONDS)
    worker.store_all(range(3))
    disk.hang(Read, times=FOREVER)
    job_id = worker.load(range(3))
    worker.use(1)
    assert worker.finish(job_id).failed_rows == set(range(6))
    assert worker.report.unreadable == set()


def test_stores_given_up_after_a_reset_do_not_drop_the_new_ones(make_simulated_worker):
    worker, disk = make_simulated_worker(slots=4)
    disk.hang(Write, times=FOREVER)
    job_id = worker.store(range(10))
    worker.use(1)
    worker.transfer.wait({job_id})
    worker.finish(job_id)
    assert worker.report.dropped == set()


def test_the_same_identity_again_changes_nothing(make_simulated_worker):
    worker, disk = make_simulated_worker()
    worker.finish(worker.store([0]))
    worker.use(0)
    worker.settle([0])
    assert worker.report.stored == {worker.key(0): 1}
    folder = fingerprint_directory(str(worker.path(0).relative_to(worker.pool)))
    assert all(f"/{folder}/" in path for path in block_files(disk))


def test_without_an_identity_loads_fail_softly_and_stores_are_dropped(make_simulated_worker):
    worker, _ = make_simulated_worker()
    worker.transfer._target = None
    worker.transfer.use(None)
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    assert worker.finish(worker.store([0])).moved_bytes == 0
