"""A pool that vanishes, comes back or turns blank under a worker that stores in it. Real mounts, a real ledger."""

import contextlib
import json
import logging
import os
import shutil
import subprocess

import pytest

from pykvcache_connector.messages import WorkerReport
from pykvcache_connector.worker import housekeeping as housekeeping_module
from pykvcache_connector.worker.foothold import Foothold
from pykvcache_contract import metrics
from pykvcache_contract.keys import Fingerprint, fingerprint_of
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr(housekeeping_module, "LOOK_SECONDS", 0.0)


@pytest.fixture
def disk(tmp_path, mounts):
    """A pool on a disk of its own, counted."""
    point = tmp_path / "disk"
    mounts.tmpfs(point)
    open_pool(str(point), create=True)
    UsageLedger(str(point)).recount(lambda: 0)
    return point


def unmount(point) -> None:
    subprocess.run(["umount", "--lazy", point], check=True)


def mount_blank(point) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)


def store(worker, number: int) -> bool:
    """Store a block; return whether it was published."""
    worker.report = WorkerReport()
    job = worker.store([number])
    assert worker.finish(job).moved_bytes > 0, "vLLM's thread never waits for the pool"
    worker.settle([number])
    return worker.report.stored.get(worker.key(number), 0) == 1


@pytest.fixture
def store_again(until):
    """Return a function that tries to store a block until it is published."""
    return lambda worker, number: until(lambda: store(worker, number))


def test_on_a_bare_mount_point_nothing_is_created_and_stores_are_declined(make_worker, disk, caplog):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    unmount(disk)
    caplog.set_level(logging.WARNING)
    try:
        assert [store(worker, number) for number in (1, 2, 3)] == [False] * 3
        assert list(disk.iterdir()) == []
        worker.expect(3, metrics.DECLINED, "store", "unavailable")
        assert worker.report.full_reason == "unavailable", "so that the scheduler does not have them copied for nothing"
        assert worker.finish(worker.load([0])).failed_rows == {0, 1}
    finally:
        mount_blank(disk)
    warnings = [record.message for record in caplog.records if "not stored for now" in record.message]
    assert len(warnings) == 1
    assert "mount the disk again" in warnings[0]


def test_a_new_generation_on_a_bare_mount_point_creates_nothing(make_worker, disk, until, store_again):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    unmount(disk)
    try:
        worker.use(1)
        assert not store(worker, 1)
        assert list(disk.iterdir()) == []
    finally:
        mount_blank(disk)
    store_again(worker, 1)
    assert worker.path(1, generation=1).exists()


def test_a_blank_disk_on_the_same_mount_point_is_prepared_and_stored_in(make_worker, disk, store_again):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    unmount(disk)
    mount_blank(disk)
    store_again(worker, 1)
    assert UsageLedger(str(disk)).used_bytes() == worker.path(1).stat().st_size
    expected = worker.pages(1)
    worker.wipe()
    assert worker.finish(worker.load([1])).failed_rows == set()
    assert worker.pages(1) == expected


def test_of_two_workers_on_a_blank_disk_both_store_again(make_worker, disk, store_again):
    workers = [make_worker(pool=disk, rank=rank) for rank in (0, 1)]
    assert all(store(worker, 0) for worker in workers)
    unmount(disk)
    mount_blank(disk)
    for worker in workers:
        store_again(worker, 1)


def test_a_disk_that_comes_back_is_used_again_with_a_new_lock(make_worker, tmp_path, mounts):
    below, point = tmp_path / "below", tmp_path / "point"
    mounts.tmpfs(below)
    mounts.bind(below, point)
    open_pool(str(point), create=True)
    UsageLedger(str(point)).recount(lambda: 0)
    worker = make_worker(pool=point)
    assert store(worker, 0)
    unmount(point)
    assert not store(worker, 1)
    subprocess.run(["mount", "--bind", below, point], check=True)
    assert store(worker, 2)
    assert len(list(below.glob("*/tmp/*.lock"))) == 1, "the lock of before is swept"
    assert worker.finish(worker.load([0])).failed_rows == set()


def test_another_pool_in_its_place_is_left_alone(make_worker, disk, tmp_path):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    other = tmp_path / "other"
    other.mkdir()
    open_pool(str(other), create=True)
    (other / "pool.json").write_text((other / "pool.json").read_text().replace("202", "201"))
    before = sorted(other.rglob("*"))
    subprocess.run(["mount", "--bind", other, disk], check=True)
    try:
        assert not store(worker, 1)
        worker.expect(1, metrics.DECLINED, "store", "unavailable")
        assert sorted(other.rglob("*")) == before
    finally:
        unmount(disk)
    assert store(worker, 2)


def test_a_pool_that_was_emptied_by_hand_is_prepared_and_counted_again(make_worker, disk, store_again):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    store_again(worker, 1)
    assert UsageLedger(str(disk)).used_bytes() == worker.path(1).stat().st_size


def test_a_models_folder_that_was_removed_is_made_again(make_worker, disk, store_again):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    shutil.rmtree(worker.path(0).parents[3])
    store_again(worker, 1)


def test_a_usage_file_that_was_removed_is_made_again_by_a_count(make_worker, disk, store_again):
    worker = make_worker(pool=disk)
    assert store(worker, 0)
    (disk / "usage").unlink()
    store_again(worker, 1)
    assert UsageLedger(str(disk)).used_bytes() == sum(worker.path(number).stat().st_size for number in (0, 1))


def standing(pool, count: int) -> tuple[Foothold, list[Fingerprint]]:
    """Return a foothold in a new pool, and fingerprints for it."""
    return Foothold(open_pool(str(pool), create=True)), [fingerprint_of({"number": n}) for n in range(count)]


def locked(pool) -> set[Fingerprint]:
    documents = (json.loads((path.parents[1] / "config.json").read_text()) for path in pool.glob("*/tmp/*.lock"))
    return {Fingerprint(document["fingerprint"]) for document in documents}


def open_locks(pool) -> int:
    """Return how many lock files below a pool this process has open, also removed ones."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith(str(pool)) and ".lock" in name for name in names)


def test_resets_of_the_prefix_cache_leave_two_locks_at_most(make_worker, pool):
    worker = make_worker()
    descriptors = []
    for generation in range(5):
        worker.use(generation)
        assert store(worker, generation)
        assert worker.path(generation, generation=generation).exists()
        locks = sorted(path.parents[1].name for path in pool.glob("*/tmp/*.lock"))
        recent = range(max(0, generation - 1), generation + 1)
        assert locks == sorted(worker.path(0, generation=number).parents[3].name for number in recent)
        descriptors.append(open_locks(pool))
    assert descriptors == [1, 2, 2, 2, 2]


def test_a_lock_taken_late_for_an_older_fingerprint_is_dropped_with_the_next_one(tmp_path):
    foothold, fingerprints = standing(tmp_path, 4)
    for fingerprint in fingerprints[:3]:
        foothold.prepare(fingerprint, {})
    foothold.writer(fingerprints[0])
    assert locked(tmp_path) == set(fingerprints[:3])
    foothold.prepare(fingerprints[3], {})
    assert locked(tmp_path) == set(fingerprints[2:])
    foothold.prepare(fingerprints[3], {})
    assert locked(tmp_path) == {fingerprints[3]}
    foothold.leave()
    assert locked(tmp_path) == set()


def test_a_pool_directory_that_is_gone_is_declined(make_worker, pool):
    worker = make_worker()
    assert store(worker, 0)
    pool.rename(pool.with_name("moved"))
    assert not store(worker, 1)
    worker.expect(1, metrics.DECLINED, "store", "unavailable")
    assert not pool.exists()
    pool.with_name("moved").rename(pool)
    assert store(worker, 2)
