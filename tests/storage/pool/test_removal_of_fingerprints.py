"""Dropping the folder of a fingerprint that nobody uses, and everything that keeps it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_path, quarantine_path, temporary_path
from pykvcache_storage import removal
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.pool import open_pool
from pykvcache_storage.recovery import WriterLock
from pykvcache_storage.removal import Remover
from pykvcache_storage.usage import UsageLedger

MakeKey = Callable[..., BlockKey]


@pytest.fixture
def pool(tmp_path: Path, fingerprint: Fingerprint) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(fingerprint, {"engine": "test"})
    return directory


@pytest.fixture
def folder(pool: Path, fingerprint: Fingerprint) -> Path:
    return pool / fingerprint[:12]


@pytest.fixture
def drop(pool: Path, folder: Path) -> Callable[[], bool]:
    return lambda: Remover(str(pool), UsageLedger(str(pool))).drop_fingerprint(folder.name)


def write(path: Path, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_an_empty_fingerprint_is_dropped_and_can_be_prepared_again(
    pool: Path, folder: Path, fingerprint: Fingerprint, drop: Callable[[], bool]
) -> None:
    assert drop()
    assert os.listdir(pool) == ["pool.json"]
    assert drop()
    open_pool(str(pool), create=True).prepare_fingerprint(fingerprint, {})
    assert sorted(os.listdir(folder)) == ["config.json", "quarantine", "tmp"]


def test_what_dead_writers_and_evictions_left_goes_with_it_and_quarantined_bytes_are_released(
    pool: Path, folder: Path, fingerprint: Fingerprint, make_key: MakeKey, drop: Callable[[], bool]
) -> None:
    write(pool / quarantine_path(make_key(1)), size=70)
    ledger = UsageLedger(str(pool))
    ledger.recount(lambda: count_bytes(str(pool)) + 5)
    write(pool / temporary_path(fingerprint, "a" * 32, 1))
    write(folder / "tmp" / f"{'b' * 32}.lock")
    (folder / "r0" / "abc" / "de").mkdir(parents=True)
    (folder / "r1").mkdir()
    assert drop()
    assert not folder.exists()
    assert ledger.used_bytes() == 5


def test_one_block_keeps_it_untouched(
    pool: Path, folder: Path, make_key: MakeKey, fingerprint: Fingerprint, drop: Callable[[], bool]
) -> None:
    write(pool / block_path(make_key(1)))
    write(pool / quarantine_path(make_key(2)))
    write(pool / temporary_path(fingerprint, "a" * 32, 1))
    before = sorted(folder.rglob("*"))
    assert not drop()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("has_temporary", [True, False])
def test_a_living_writer_keeps_it_and_a_dead_one_does_not(
    pool: Path, folder: Path, fingerprint: Fingerprint, drop: Callable[[], bool], has_temporary: bool
) -> None:
    lock = WriterLock(str(pool), fingerprint)
    temporary = pool / temporary_path(fingerprint, lock.writer, 1)
    if has_temporary:
        write(temporary)
    assert not drop()
    assert temporary.exists() == has_temporary
    assert sorted(os.listdir(folder)) == ["config.json", "quarantine", "tmp"]
    lock.close()
    assert drop()


@pytest.mark.parametrize("place", [".", "tmp", "quarantine", "r0", "r0/abc", "r0/abc/de"])
@pytest.mark.parametrize("name", [b"notes.txt", b"\xff\xfe\x80", b"new\nline", b".hidden"])
def test_what_is_not_ours_keeps_it_and_survives(
    folder: Path, drop: Callable[[], bool], place: str, name: bytes
) -> None:
    path = write(folder / place / os.fsdecode(name))
    assert not drop()
    assert path.exists()
    assert (folder / "config.json").exists()
    path.unlink()
    assert drop()


@pytest.mark.parametrize("name", ["tmp", "quarantine", "r0", "config.json", "."])
def test_links_are_neither_followed_nor_let_the_folder_go_half(
    pool: Path, folder: Path, drop: Callable[[], bool], name: str
) -> None:
    outside = pool.parent / "outside"
    outside.mkdir()
    victim = write(outside / "victim")
    link = folder / name
    if link.is_dir():
        link.rename(pool.parent / "moved")
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(outside)
    assert drop() == (name == "config.json")
    assert victim.exists()


def test_a_writer_that_starts_meanwhile_keeps_the_folder_and_its_description(
    pool: Path, folder: Path, fingerprint: Fingerprint, drop: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "config.json").read_bytes()
    real = os.rmdir

    def start_writer_first(name: str, *, dir_fd: int) -> None:
        if name == folder.name:
            (folder / "tmp").mkdir()
            WriterLock(str(pool), fingerprint)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(removal.os, "rmdir", start_writer_first)
    assert not drop()
    assert (folder / "config.json").read_bytes() == before
    assert sorted(os.listdir(pool)) == sorted([folder.name, "pool.json"])


@pytest.mark.slow
def test_a_kill_at_any_step_is_made_good_by_the_next_attempt(
    pool: Path,
    folder: Path,
    fingerprint: Fingerprint,
    make_key: MakeKey,
    drop: Callable[[], bool],
    kill_at: Callable[..., bool],
) -> None:
    ledger = UsageLedger(str(pool))
    step, killed = 0, True
    while killed:
        open_pool(str(pool), create=True).prepare_fingerprint(fingerprint, {"engine": "test"})
        write(pool / quarantine_path(make_key(1)))
        write(pool / temporary_path(fingerprint, "a" * 32, 1))
        ledger.recount(lambda: count_bytes(str(pool)))
        killed = kill_at(step, work=drop)
        assert ledger.used_bytes() >= count_bytes(str(pool))
        assert drop()
        assert os.path.lexists(folder) is False
        step += 1
    assert step > 7


@pytest.mark.parametrize("name", ["..", ".", "", "pool.json", "0123456789ab/r0", "0123456789AB"])
def test_what_is_no_fingerprint_is_a_mistake_of_ours(pool: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no fingerprint's folder"):
        Remover(str(pool), UsageLedger(str(pool))).drop_fingerprint(name)


def test_a_missing_pool_drops_nothing(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert not Remover(gone, UsageLedger(gone)).drop_fingerprint("0123456789ab")
