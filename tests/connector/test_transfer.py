"""Stores and loads of one worker on a real reactor, a real pool and KV tensors in host memory."""

import os
import sys
import threading

import pytest
import torch

from pykvcache_connector.worker.layout import BlockRows
from pykvcache_contract import metrics
from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_storage.usage import UsageLedger

ENGINES = ["auto", "threads"]


def damage_payload(path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_SIZE_BYTES + 1234] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_stored_is_loaded_byte_for_byte(make_worker, engine, direct_io, fsync):
    worker = make_worker(engine=engine, direct_io=direct_io, fsync=fsync)
    worker.store_all(range(10))
    expected = [worker.pages(number) for number in range(12)]
    worker.wipe()
    job = worker.finish(worker.load(range(10)))
    assert job.failed_rows == set()
    assert [worker.pages(number) for number in range(10)] == expected[:10]
    assert all(not any(page) for page in worker.pages(11)), "rows of other requests stay as they are"


def test_another_process_of_the_same_model_loads_what_was_stored(make_worker):
    worker, other = make_worker(seed=1), make_worker(seed=2)
    worker.store_all(range(4))
    other.finish(other.load(range(4)))
    assert [other.pages(number) for number in range(4)] == [worker.pages(number) for number in range(4)]
    assert [other.pages(4)] != [worker.pages(4)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefix_longer_than_the_staging_pool_is_stored_and_loaded(make_worker, engine):
    worker = make_worker(slots=2, engine=engine)
    worker.store_all(range(50))
    expected = [worker.pages(number) for number in range(50)]
    worker.wipe()
    assert worker.finish(worker.load(range(50))).failed_rows == set()
    assert [worker.pages(number) for number in range(50)] == expected
    worker.expect(50, metrics.LOAD_BLOCKS)
    worker.expect(50, metrics.STORE_BLOCKS)


def test_a_load_may_leave_out_the_front_of_its_first_block(make_worker):
    worker = make_worker()
    worker.store_all([0, 1])
    expected = worker.pages(0), worker.pages(1)
    worker.wipe()
    parts = [BlockRows((1,), 1), BlockRows((2, 3), 0)]
    worker.transfer.submit(99, is_store=False, keys=[worker.key(0), worker.key(1)], rows=parts)
    assert worker.finish(99).failed_rows == set()
    assert worker.pages(1) == expected[1]
    first, second, third, fourth = worker.pages(0)
    assert (second, fourth) == (expected[0][1], expected[0][3])
    assert not any(first + third)


def test_bytes_and_blocks_are_counted_once_for_each_block(make_worker):
    worker = make_worker()
    size = worker.transfer.layouts[0].file_size_bytes
    worker.store_all(range(3))
    worker.finish(worker.load(range(3)))
    worker.step()
    worker.expect(3 * size, metrics.STORE_BYTES)
    worker.expect(3 * worker.transfer.layouts[0].used_size_bytes, metrics.LOAD_BYTES)
    assert worker.total(metrics.LOAD_ACTIVE) > 0
    assert worker.total(metrics.STORE_ACTIVE) > 0
    assert UsageLedger(str(worker.pool)).used_bytes() == 3 * size


def test_a_block_that_is_there_already_counts_as_stored_and_takes_no_room(make_worker, until):
    worker = make_worker()
    worker.store_all([0])
    again = make_worker()
    again.store_all([0])
    again.transfer.close(60)
    assert again.total(metrics.STORE_BLOCKS) == 0
    ledger = UsageLedger(str(worker.pool))
    # Taken before the block was published, and given back by the housekeeping's thread a little after.
    until(lambda: ledger.used_bytes() == worker.transfer.layouts[0].file_size_bytes)


# ---- damage ----


def test_a_damaged_payload_behind_an_intact_header_is_recomputed_and_quarantined(make_worker):
    worker = make_worker()
    worker.store_all(range(3))
    expected = [worker.pages(number) for number in range(3)]
    damage_payload(worker.path(1))
    job = worker.finish(worker.load(range(3)))
    assert job.failed_rows == set(worker.rows(1))
    worker.expect(1, metrics.QUARANTINED)
    assert worker.report.lost == {worker.key(1)}
    worker.expect(1, metrics.LOAD_FAILED, "corrupt")
    assert not worker.path(1).exists()
    assert any(name.split("/")[1] == "quarantine" for name in worker.files())
    assert [worker.pages(number) for number in (0, 2)] == [expected[0], expected[2]]


def test_after_a_damaged_file_was_moved_aside_a_later_store_writes_a_good_one(make_worker):
    worker = make_worker()
    worker.store_all([1])
    expected = worker.pages(1)
    damage_payload(worker.path(1))
    worker.finish(worker.load([1]))
    worker.expect(1, metrics.QUARANTINED)
    worker.tensors[0][2:4] = torch.frombuffer(bytearray(b"".join(expected[:2])), dtype=torch.int8).view(2, -1)
    worker.tensors[1][2:4, :1000] = torch.frombuffer(bytearray(b"".join(expected[2:])), dtype=torch.int8).view(2, -1)
    worker.report.stored.clear()
    worker.store_all([1])
    worker.wipe()
    assert worker.finish(worker.load([1])).failed_rows == set()
    assert worker.pages(1) == expected


def test_with_header_integrity_the_same_damage_goes_unnoticed(make_worker):
    worker = make_worker(integrity="header")
    worker.store_all([1])
    expected = worker.pages(1)
    damage_payload(worker.path(1))
    assert worker.finish(worker.load([1])).failed_rows == set()
    assert worker.pages(1) != expected
    assert worker.report.lost == set()


@pytest.mark.parametrize("size", [0, 100, HEADER_SIZE_BYTES, 9000, 40960])
def test_a_file_of_a_wrong_length_is_recomputed_and_quarantined(make_worker, size):
    worker = make_worker()
    worker.store_all([0])
    os.truncate(worker.path(0), size)
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    worker.expect(1, metrics.QUARANTINED)
    assert worker.report.lost == {worker.key(0)}
    assert not worker.path(0).exists()


def test_a_block_of_another_key_is_recomputed_and_quarantined(make_worker):
    worker = make_worker()
    worker.store_all([0, 1])
    os.replace(worker.path(0), worker.path(1))
    assert worker.finish(worker.load([1])).failed_rows == {2, 3}
    worker.expect(1, metrics.QUARANTINED)
    assert worker.report.lost == {worker.key(1)}


def test_a_file_deleted_between_lookup_and_load_is_recomputed_and_a_miss(make_worker):
    worker = make_worker()
    worker.store_all(range(3))
    worker.path(2).unlink()
    assert worker.finish(worker.load(range(3))).failed_rows == {4, 5}
    assert worker.report.lost == {worker.key(2)}
    worker.expect(1, metrics.LOAD_FAILED, "missing")


def test_a_pool_that_vanishes_is_a_miss_and_stores_are_dropped(make_worker):
    worker = make_worker()
    worker.store_all([0])
    os.rename(worker.pool, worker.pool.with_name("moved"))
    assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    worker.finish(worker.store([1]))
    worker.settle([1])
    assert worker.key(1) in worker.report.dropped
    assert worker.total(metrics.STORE_FAILED, "io") + worker.total(metrics.STORE_FAILED, "capacity") == 1


# ---- room ----


def test_at_capacity_stores_are_declined_and_the_pool_never_grows_beyond_it(make_worker, used_on_disk):
    size = 12288
    worker = make_worker(capacity=3 * size + 100)
    assert worker.transfer.layouts[0].file_size_bytes == size
    worker.finish(worker.store(range(10)))
    worker.settle(range(10))
    assert len(worker.report.stored) == 3
    assert len(worker.report.dropped) == 7
    assert worker.report.full_reason == "pool_full"
    worker.expect(7, metrics.STORE_FAILED, "capacity")
    assert used_on_disk(worker.pool) == 3 * size
    assert [name for name in worker.files() if name.endswith(".tmp")] == []
    numbers = [number for number in range(10) if worker.path(number).exists()]
    assert worker.finish(worker.load(numbers)).failed_rows == set()


def test_two_workers_together_never_exceed_the_capacity(make_worker, used_on_disk):
    workers = [make_worker(capacity=5 * 12288) for _ in range(2)]
    for start, worker in enumerate(workers):
        worker.store(range(start * 10, start * 10 + 10))
    for start, worker in enumerate(workers):
        worker.settle(range(start * 10, start * 10 + 10))
    assert sum(len(worker.report.stored) for worker in workers) == 5
    assert used_on_disk(workers[0].pool) == 5 * 12288


def test_a_full_disk_drops_stores_and_leaves_nothing_half_written(make_worker, tmp_path, mounts, used_on_disk, until):
    small = tmp_path / "small"
    mounts.tmpfs(small, size="256k")
    worker = make_worker(pool=small)
    until_counted(small)
    worker.finish(worker.store(range(40)))
    worker.settle(range(40))
    stored = [number for number in range(40) if worker.key(number) in worker.report.stored]
    assert 5 < len(stored) < 22
    worker.expect(40 - len(stored), metrics.STORE_FAILED, "capacity")
    assert worker.report.full_reason == "pool_full"
    assert used_on_disk(small) == len(stored) * 12288
    assert [name for name in worker.files() if name.endswith(".tmp")] == []
    assert worker.finish(worker.load(stored)).failed_rows == set()
    until(lambda: UsageLedger(str(small)).used_bytes() == len(stored) * 12288)  # given back a little after


def until_counted(pool) -> None:
    """Count a pool before its worker does, so that stores are not declined meanwhile."""
    UsageLedger(str(pool)).recount(lambda: 0)


def test_a_read_only_pool_serves_loads_and_refuses_stores(make_worker, read_only_view):
    writer = make_worker()
    writer.store_all(range(3))
    before = writer.files()
    reader = make_worker(pool=read_only_view(writer.pool), seed=5)
    job = reader.finish(reader.load(range(3)))
    assert job.failed_rows == set()
    assert [reader.pages(number) for number in range(3)] == [writer.pages(number) for number in range(3)]
    reader.finish(reader.store([7, 8]))
    reader.step()
    assert reader.report.dropped == {reader.key(7), reader.key(8)}
    assert reader.report.full_reason == "pool_full"
    reader.expect(2, metrics.STORE_FAILED, "read_only")
    assert writer.files() == before


def test_a_damaged_file_of_a_read_only_pool_stays_and_its_key_is_denied(make_worker, read_only_view, until):
    writer = make_worker()
    writer.store_all([0])
    damage_payload(writer.path(0))
    reader = make_worker(pool=read_only_view(writer.pool))
    assert reader.finish(reader.load([0])).failed_rows == {0, 1}
    until(lambda: reader.step() or reader.report.unreadable)
    assert reader.report.unreadable == {reader.key(0)}
    assert reader.total(metrics.QUARANTINED) == 0
    assert writer.path(0).exists()


def test_a_budget_too_small_for_two_blocks_is_a_start_up_error(make_worker):
    with pytest.raises(ConfigurationError, match="Set staging to at least 24576 bytes"):
        make_worker(slots=1)


def test_staging_memory_never_exceeds_its_budget(make_worker):
    worker = make_worker(staging=5 * 12288 + 12287)
    gauges = worker.counts.take().data["gauges"]
    assert gauges[f"{metrics.STAGING_BYTES.name}\t0"] == 5 * 12288
    assert gauges[f"{metrics.STAGING_SLOTS.name}\t0"] == 5
    worker.store_all(range(40))
    assert worker.finish(worker.load(range(40))).failed_rows == set()


# ---- several ranks and writers ----


def test_a_rank_that_holds_equal_bytes_reads_the_files_of_rank_0_and_writes_none(make_worker):
    writer = make_worker()
    writer.store_all(range(3))
    before = writer.files()
    other = make_worker(rank=1, is_replicated=True, seed=9)
    assert other.finish(other.load(range(3))).failed_rows == set()
    assert [other.pages(number) for number in range(3)] == [writer.pages(number) for number in range(3)]
    assert other.finish(other.store([5])).moved_bytes == 0
    other.step()
    assert other.report.dropped == set(), "rank 0 speaks for this block"
    assert writer.files() == before


def test_a_rank_with_bytes_of_its_own_has_files_of_its_own(make_worker):
    workers = [make_worker(), make_worker(rank=1, seed=9)]
    for worker in workers:
        worker.store_all([0])
    assert len(workers[0].files()) == 2
    expected = [worker.pages(0) for worker in workers]
    for worker, pages in zip(workers, expected, strict=True):
        worker.wipe()
        worker.finish(worker.load([0]))
        assert worker.pages(0) == pages


def test_two_transfers_that_store_the_same_keys_at_once_both_succeed(make_worker):
    workers = [make_worker(seed=3), make_worker(seed=3, engine="threads")]
    together = threading.Barrier(2)

    def store(worker) -> None:
        together.wait(60)
        worker.store_all(range(40))

    threads = [threading.Thread(target=store, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sum(worker.total(metrics.STORE_BLOCKS) for worker in workers) == 40
    assert len(workers[0].files()) == 40
    expected = [workers[0].pages(number) for number in range(40)]
    workers[1].wipe()
    assert workers[1].finish(workers[1].load(range(40))).failed_rows == set()
    assert [workers[1].pages(number) for number in range(40)] == expected


STORE_IN_A_PROCESS = """
import pathlib, runpy, sys, warnings
warnings.simplefilter("ignore")
helpers = runpy.run_path(sys.argv[1])
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.worker.copies import KVTensors
from pykvcache_connector.worker.start import make_transfer

layout = helpers["LAYOUT"]
settings = Settings.parse({"pool": sys.argv[2], "staging": 4 * layout.file_size_bytes})
tensors, counts = helpers["make_tensors"](3), Counts()
transfer = make_transfer(settings, [KVTensors(tensors, layout)], rank=0, is_replicated=False, counts=counts)
worker = helpers["Worker"](transfer, tensors, counts, pathlib.Path(sys.argv[2]))
worker.use(0)
print("ready", flush=True)
sys.stdin.readline()
worker.store_all(range(100))
transfer.close(60)
print("stored", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_that_store_the_same_keys_at_once_both_succeed(make_worker, start_python):
    worker = make_worker(seed=3, slots=4)
    conftest = sys.modules[type(worker).__module__].__file__
    other = start_python(STORE_IN_A_PROCESS, conftest, worker.pool)
    lines = iter(other.stdout.readline, "")
    assert "ready\n" in lines
    other.stdin.write("\n")
    other.stdin.flush()
    worker.store_all(range(100))
    assert "stored\n" in lines
    assert len(worker.files()) == 100
    expected = [worker.pages(number) for number in range(100)]
    worker.wipe()
    assert worker.finish(worker.load(range(100))).failed_rows == set()
    assert [worker.pages(number) for number in range(100)] == expected
