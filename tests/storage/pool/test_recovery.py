"""Sweeping what dead writers left, with real processes that live and die."""

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_contract.errors import PoolUnavailableError, ReadOnlyError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import temporary_path
from pykvcache_storage import recovery
from pykvcache_storage.pool import open_pool
from pykvcache_storage.recovery import AGE_LIMIT_SECONDS, SweepReport, WriterLock, sweep

HOLD = """
import sys
from pykvcache_contract.keys import fingerprint_of
from pykvcache_contract.paths import temporary_path
from pykvcache_storage.recovery import WriterLock
fingerprint = fingerprint_of({"model": "test"})
lock = WriterLock(sys.argv[1], fingerprint)
open(f"{sys.argv[1]}/{temporary_path(fingerprint, lock.writer, 0)}", "wb").write(b"x" * 100)
print(lock.writer, flush=True)
sys.stdin.readline()
lock.close()
"""
WRITE_IN_CIRCLES = """
import os, sys
from pykvcache_contract.keys import fingerprint_of
from pykvcache_contract.paths import temporary_path
from pykvcache_storage.recovery import WriterLock
fingerprint = fingerprint_of({"model": "test"})
for number in range(1000):
    lock = WriterLock(sys.argv[1], fingerprint)
    path = f"{sys.argv[1]}/{temporary_path(fingerprint, lock.writer, number)}"
    open(path, "wb").close()
    os.rename(path, path + ".published")
    os.unlink(path + ".published")
    lock.close()
print("done", flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path, fingerprint: Fingerprint) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(fingerprint, {})
    return directory


@pytest.fixture
def folder(pool: Path, fingerprint: Fingerprint) -> Path:
    return pool / fingerprint[:12] / "tmp"


def no_flock(code: int) -> Callable[[int, int], None]:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.slow
def test_a_killed_writers_files_are_removed_and_a_living_ones_stay(
    pool: Path, folder: Path, fingerprint: Fingerprint, start_python: Callable
) -> None:
    living, killed = start_python(HOLD, pool), start_python(HOLD, pool)
    name, other = living.stdout.readline().strip(), killed.stdout.readline().strip()
    assert sweep(str(pool), fingerprint) == SweepReport(living=2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert sweep(str(pool), fingerprint) == SweepReport(removed=1, removed_bytes=100, living=1, dead=1)
    assert sorted(os.listdir(folder)) == [f"{name}-0.tmp", f"{name}.lock"]
    assert name != other


def test_a_writer_that_ends_in_order_removes_its_lock(pool: Path, folder: Path, fingerprint: Fingerprint) -> None:
    lock = WriterLock(str(pool), fingerprint)
    assert lock.exclusive
    assert os.listdir(folder) == [f"{lock.writer}.lock"]
    lock.close()
    lock.close()
    assert os.listdir(folder) == []


def test_a_file_without_a_lock_belongs_to_a_dead_writer(pool: Path, folder: Path, fingerprint: Fingerprint) -> None:
    (folder / f"{'a' * 32}-7.tmp").write_bytes(b"x" * 10)
    assert sweep(str(pool), fingerprint[:12]) == SweepReport(removed=1, removed_bytes=10, dead=1)


def test_an_abandoned_lock_without_files_is_removed(pool: Path, folder: Path, fingerprint: Fingerprint) -> None:
    (folder / f"{'a' * 32}.lock").touch()
    assert sweep(str(pool), fingerprint) == SweepReport()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", ["notes.txt", f"{'A' * 32}-1.tmp", f"{'a' * 31}-1.tmp", f"{'a' * 32}-1.tmp~", ".lock"])
def test_a_foreign_name_is_never_touched(pool: Path, folder: Path, fingerprint: Fingerprint, name: str) -> None:
    (folder / name).touch()
    assert sweep(str(pool), fingerprint) == SweepReport()
    assert os.listdir(folder) == [name]


def test_links_and_folders_with_our_names_are_never_touched(
    pool: Path, folder: Path, fingerprint: Fingerprint, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    (folder / f"{'a' * 32}-1.tmp").symlink_to(victim)
    (folder / f"{'b' * 32}-1.tmp").mkdir()
    (folder / f"{'c' * 32}.lock").symlink_to(victim)
    assert sweep(str(pool), fingerprint) == SweepReport()
    assert len(os.listdir(folder)) == 3
    assert victim.exists()


@pytest.mark.parametrize("component", ["", "tmp"])
def test_a_sweep_does_not_follow_a_link_out_of_the_pool(
    tmp_path: Path, fingerprint: Fingerprint, component: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "tmp").mkdir(parents=True)
    for directory in (outside, outside / "tmp"):
        (directory / f"{'a' * 32}-1.tmp").touch()
    link = tmp_path / fingerprint[:12] / component
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    assert sweep(str(tmp_path), fingerprint) == SweepReport()
    assert (outside / f"{'a' * 32}-1.tmp").exists()
    assert (outside / "tmp" / f"{'a' * 32}-1.tmp").exists()


def test_a_missing_folder_is_an_empty_one(tmp_path: Path, fingerprint: Fingerprint) -> None:
    assert sweep(str(tmp_path), fingerprint) == SweepReport()


def test_a_writer_whose_new_lock_was_swept_before_it_locked_starts_over(
    pool: Path, folder: Path, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            sweep(str(pool), fingerprint)
            assert os.listdir(folder) == []
        real(descriptor, operation)

    monkeypatch.setattr(recovery.fcntl, "flock", flock)
    lock = WriterLock(str(pool), fingerprint)
    monkeypatch.undo()
    (pool / temporary_path(fingerprint, lock.writer, 0)).touch()
    assert sweep(str(pool), fingerprint) == SweepReport(living=1)


def test_a_sweep_that_opened_a_lock_before_it_was_replaced_spares_the_new_writer(
    pool: Path, folder: Path, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"{'a' * 32}.lock"
    path.touch()
    (folder / f"{'a' * 32}-1.tmp").touch()
    real = fcntl.flock

    def replaced(descriptor: int, operation: int) -> None:
        path.unlink()
        path.touch()
        real(descriptor, operation)

    monkeypatch.setattr(recovery.fcntl, "flock", replaced)
    assert sweep(str(pool), fingerprint).removed == 0
    assert path.exists()


@pytest.mark.slow
def test_writers_that_come_and_go_never_lose_a_file_to_a_sweep(
    pool: Path, folder: Path, fingerprint: Fingerprint, start_python: Callable
) -> None:
    writers = [start_python(WRITE_IN_CIRCLES, pool) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert sweep(str(pool), fingerprint).removed == 0
    assert [writer.communicate()[0] for writer in writers] == ["done\n"] * 2
    assert os.listdir(folder) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_only_files_older_than_a_day_are_removed(
    pool: Path, folder: Path, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(recovery.fcntl, "flock", no_flock(code))
    lock = WriterLock(str(pool), fingerprint)
    assert not lock.exclusive
    temporary = pool / temporary_path(fingerprint, lock.writer, 0)
    temporary.touch()
    written = temporary.stat().st_mtime
    report = sweep(str(pool), fingerprint, clock=lambda: written + AGE_LIMIT_SECONDS)
    assert (report.removed, report.by_age) == (0, True)
    report = sweep(str(pool), fingerprint, clock=lambda: written + AGE_LIMIT_SECONDS + 1)
    assert (report.removed, report.by_age) == (1, True)
    assert os.listdir(folder) == [f"{lock.writer}.lock"]


def test_a_lock_in_a_pool_without_the_folder_says_what_failed(tmp_path: Path, fingerprint: Fingerprint) -> None:
    with pytest.raises(PoolUnavailableError, match=r"cannot lock .*\.lock"):
        WriterLock(str(tmp_path), fingerprint)


def test_a_lock_in_a_read_only_pool_says_so(
    pool: Path, fingerprint: Fingerprint, read_only_view: Callable[[Path], Path]
) -> None:
    with pytest.raises(ReadOnlyError, match="cannot be stored"):
        WriterLock(str(read_only_view(pool)), fingerprint)
