"""Removing blocks and fingerprints: what stays, what is released, links, kills, rivals and readers."""

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_path, quarantine_path, temporary_path
from pykvcache_storage import removal
from pykvcache_storage.inventory import Kind, PoolFile, count_bytes, walk
from pykvcache_storage.pool import open_pool
from pykvcache_storage.removal import Removed, Remover
from pykvcache_storage.usage import UsageLedger

MakeKey = Callable[..., BlockKey]
NOBODY = 65534
REMOVE_ALL = """
import sys
from pykvcache_storage import usage
usage.LOCK_TIMEOUT_SECONDS = 60.0  # the other may wait for the disk or the processor while it holds the lock
from pykvcache_storage.inventory import iterate_blocks
from pykvcache_storage.removal import Removed, Remover
from pykvcache_storage.usage import UsageLedger
remover = Remover(sys.argv[1], UsageLedger(sys.argv[1]))
files = list(iterate_blocks(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
outcomes = [remover.remove(file) for file in files]
print(outcomes.count(Removed.REMOVED), outcomes.count(Removed.GONE), len(outcomes), flush=True)
"""
PUBLISH_AND_REMOVE = """
import os, sys
from pykvcache_storage.inventory import Kind, PoolFile
from pykvcache_storage.removal import Remover
from pykvcache_storage.usage import UsageLedger
pool, path = sys.argv[1:]
remover = Remover(pool, UsageLedger(pool))
target = os.path.join(pool, path)
print("ready", flush=True)
while True:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target + ".new", "wb") as file:
        file.write(b"good" * 250_000)
    os.rename(target + ".new", target)
    status = os.stat(target)
    remover.remove(PoolFile(Kind.BLOCK, path, status.st_size, status.st_mtime_ns))
"""


@pytest.fixture
def pool(tmp_path: Path, fingerprint: Fingerprint) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(fingerprint, {})
    return directory


@pytest.fixture
def ledger(pool: Path) -> UsageLedger:
    return UsageLedger(str(pool))


@pytest.fixture
def remover(pool: Path, ledger: UsageLedger) -> Remover:
    return Remover(str(pool), ledger)


def write(pool: Path, path: str, size: int = 100) -> Path:
    file = pool / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)
    return file


def files_of(pool: Path, kind: Kind = Kind.BLOCK) -> list[PoolFile]:
    folders = [name for name in os.listdir(pool) if len(name) == 12]
    return [file for folder in folders for file in walk(str(pool), folder) if file and file.kind is kind]


def keys_in_one_folder(make_key: MakeKey) -> list[BlockKey]:
    key = make_key(1)
    return [BlockKey(key.fingerprint, key.block_hash[:3] + bytes([number]) * 29, 0, 0) for number in range(3)]


def test_a_removed_block_releases_its_bytes_and_its_folders(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey
) -> None:
    for number in range(5):
        write(pool, block_path(make_key(number)), size=100 + number)
    ledger.recount(lambda: count_bytes(str(pool)))
    for file in files_of(pool):
        assert remover.remove(file) is Removed.REMOVED
        assert ledger.used_bytes() == count_bytes(str(pool))
    assert os.listdir(pool / make_key(0).fingerprint[:12] / "r0") == []


def test_folders_stay_while_they_hold_another_block(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    paths = [write(pool, block_path(key)) for key in keys_in_one_folder(make_key)]
    sibling = write(pool, block_path(make_key(1)).rsplit("/", 2)[0] + "/zz/mine.txt")
    for file in files_of(pool):
        assert paths[0].parent.is_dir()
        assert remover.remove(file) is Removed.REMOVED
    assert not paths[0].parent.exists()
    assert sibling.exists()


def test_a_block_that_was_used_since_it_was_seen_stays(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    path = write(pool, block_path(make_key(1)))
    os.utime(path, ns=(0, 1_000_000_000_000))
    (file,) = files_of(pool)
    os.utime(path, ns=(0, 1_000_000_000_001))
    assert remover.remove(file) is Removed.USED
    os.utime(path, ns=(0, 1_000_000_000_000))
    assert remover.remove(file) is Removed.REMOVED


def test_a_block_of_another_size_than_seen_stays(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    path = write(pool, block_path(make_key(1)))
    (file,) = files_of(pool)
    path.write_bytes(b"longer than it was" * 100)
    os.utime(path, ns=(0, file.modified_ns))
    assert remover.remove(file) is Removed.USED
    assert path.exists()


def test_a_block_that_is_gone_releases_nothing(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey
) -> None:
    write(pool, block_path(make_key(1)))
    ledger.recount(lambda: 1000)
    (file,) = files_of(pool)
    outcomes = [remover.remove(file) for _ in range(3)]
    assert outcomes == [Removed.REMOVED, Removed.GONE, Removed.GONE]
    assert ledger.used_bytes() == 900


def test_temporary_files_are_refused(pool: Path, remover: Remover, fingerprint: Fingerprint) -> None:
    path = write(pool, temporary_path(fingerprint, "a" * 32, 1))
    (file,) = files_of(pool, Kind.TEMPORARY)
    assert remover.remove(file) is remover.quarantine(file) is Removed.FAILED
    assert path.exists()


@pytest.mark.parametrize("path", ["../victim", "a/../../b/victim", "/etc/victim/a/b/c", "a//b/c/d", "pool.json"])
def test_a_path_that_no_walk_tells_is_a_mistake_of_ours(remover: Remover, path: str) -> None:
    with pytest.raises(ValueError, match="no path that a walk tells"):
        remover.remove(PoolFile(Kind.BLOCK, path, 1, 1))


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("method", [Remover.remove, Remover.quarantine])
def test_a_link_put_in_place_of_a_folder_or_file_is_never_followed(
    pool: Path, remover: Remover, make_key: MakeKey, level: int, method: Callable
) -> None:
    parts = block_path(make_key(1)).split("/")
    write(pool, "/".join(parts))
    (file,) = files_of(pool)
    outside = pool.parent / "outside"
    inside = pool / Path(*parts[: level + 1])
    inside.rename(outside)
    inside.symlink_to(outside)
    assert (pool / file.path).exists()
    assert method(remover, file) is Removed.GONE
    assert (pool / file.path).exists()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_stays(pool: Path, remover: Remover, make_key: MakeKey, make: Callable) -> None:
    path = write(pool, block_path(make_key(1)))
    (file,) = files_of(pool)
    path.unlink()
    make(path)
    assert remover.remove(file) is Removed.GONE
    assert path.exists()


def test_the_pool_itself_may_be_a_link(pool: Path, make_key: MakeKey) -> None:
    write(pool, block_path(make_key(1)))
    link = pool.parent / "link"
    link.symlink_to(pool)
    (file,) = files_of(link)
    assert Remover(str(link), UsageLedger(str(link))).remove(file) is Removed.REMOVED


def test_a_recount_that_ends_between_removal_and_release_does_not_leave_too_little(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(pool, block_path(make_key(number)))
    ledger.recount(lambda: count_bytes(str(pool)))
    real = os.unlink

    def unlink_and_recount(path: str, *, dir_fd: int) -> None:
        real(path, dir_fd=dir_fd)
        UsageLedger(str(pool)).recount(lambda: count_bytes(str(pool)))

    monkeypatch.setattr(removal.os, "unlink", unlink_and_recount)
    assert remover.remove(files_of(pool)[0]) is Removed.REMOVED
    assert ledger.used_bytes() == count_bytes(str(pool)) == 200


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")])
def test_without_a_valid_record_blocks_can_still_be_removed(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey, damage: Callable
) -> None:
    write(pool, block_path(make_key(1)))
    ledger.recount(lambda: 100)
    damage(Path(ledger.path))
    assert remover.remove(files_of(pool)[0]) is Removed.REMOVED
    assert ledger.used_bytes() is None


def test_bytes_that_cannot_be_released_stay_taken_and_the_removal_counts(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pool, block_path(make_key(1)))
    ledger.recount(lambda: 100)

    def locked(*_: object, **__: object) -> None:
        raise TransientError("locked")

    monkeypatch.setattr(ledger, "release", locked)
    assert remover.remove(files_of(pool)[0]) is Removed.REMOVED
    assert ledger.used_bytes() == 100


def test_a_read_only_pool_stays_whole(
    pool: Path, make_key: MakeKey, fingerprint: Fingerprint, read_only_view: Callable[[Path], Path]
) -> None:
    path = write(pool, block_path(make_key(1)))
    view = read_only_view(pool)
    (file,) = files_of(view)
    remover = Remover(str(view), UsageLedger(str(view)))
    assert remover.remove(file) is remover.quarantine(file) is Removed.FAILED
    path.unlink()
    assert not remover.drop_fingerprint(fingerprint[:12])
    assert (pool / fingerprint[:12] / "config.json").exists()


def test_another_users_pool_stays_whole(make_key: MakeKey, fingerprint: Fingerprint, in_child: Callable) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        pool = Path(directory)
        open_pool(directory, create=True).prepare_fingerprint(fingerprint, {})
        write(pool, block_path(make_key(1)))
        (file,) = files_of(pool)
        remover = Remover(directory, UsageLedger(directory))

        def try_all() -> None:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            assert remover.remove(file) is remover.quarantine(file) is Removed.FAILED
            assert not remover.drop_fingerprint(fingerprint[:12])

        assert in_child(try_all) == 0
        assert files_of(pool) == [file]
        assert sorted(os.listdir(pool / fingerprint[:12])) == ["config.json", "quarantine", "r0", "tmp"]


def test_a_damaged_block_moves_to_quarantine_with_its_bytes_and_replaces_an_older_one(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey
) -> None:
    key = make_key(1, rank=3, group=2)
    (pool / key.fingerprint[:12] / "quarantine").rmdir()
    for size in (100, 70):
        path = write(pool, block_path(key), size=size)
        os.utime(path, ns=(0, 5))
        ledger.recount(lambda: count_bytes(str(pool)))
        (file,) = files_of(pool)
        os.utime(path, ns=(0, 6))  # a use does not acquit it
        assert remover.quarantine(file) is Removed.REMOVED
        assert ledger.used_bytes() == count_bytes(str(pool)) == size
    (moved,) = files_of(pool, Kind.QUARANTINED)
    assert (moved.path, moved.size_bytes) == (quarantine_path(key), 70)
    assert moved.modified_ns > 6
    assert not path.parent.parent.exists()
    assert remover.quarantine(file) is Removed.GONE
    assert remover.remove(moved) is Removed.REMOVED
    assert ledger.used_bytes() == 0


def test_a_new_file_in_place_of_the_damaged_one_is_not_moved(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    path = write(pool, block_path(make_key(1)))
    (file,) = files_of(pool)
    path.rename(path.with_suffix(".old"))
    write(pool, block_path(make_key(1)))
    assert remover.quarantine(file) is Removed.USED
    assert path.exists()


def test_a_quarantine_that_is_a_link_gets_nothing(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    path = write(pool, block_path(make_key(1)))
    (pool.parent / "outside").mkdir()
    quarantine = pool / make_key(1).fingerprint[:12] / "quarantine"
    quarantine.rmdir()
    quarantine.symlink_to(pool.parent / "outside")
    assert remover.quarantine(files_of(pool)[0]) is not Removed.REMOVED
    assert path.exists()
    assert os.listdir(pool.parent / "outside") == []


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_removal_leaks_at_most_until_a_recount(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey, kill_at: Callable
) -> None:
    killed = []
    for step in range(6):
        for number in range(3):
            write(pool, block_path(make_key(number)))
        ledger.recount(lambda: count_bytes(str(pool)))
        (file,) = [file for file in files_of(pool) if file.path == block_path(make_key(1))]
        killed.append(kill_at(step, work=lambda file=file: remover.remove(file)))
        assert ledger.used_bytes() >= count_bytes(str(pool)) >= 200
        assert ledger.recount(lambda: count_bytes(str(pool))) == count_bytes(str(pool))
        remover.remove(file)
    assert killed == [True] * 4 + [False] * 2  # unlink, release, two folders


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_quarantine_leaves_one_copy_and_no_byte_uncounted(
    pool: Path, ledger: UsageLedger, remover: Remover, make_key: MakeKey, kill_at: Callable
) -> None:
    killed = []
    for step in range(8):
        write(pool, quarantine_path(make_key(1)), size=70)
        write(pool, block_path(make_key(1)), size=100)
        ledger.recount(lambda: count_bytes(str(pool)))
        (file,) = files_of(pool)
        killed.append(kill_at(step, work=lambda file=file: remover.quarantine(file)))
        assert ledger.used_bytes() >= count_bytes(str(pool))
        sizes = {found.kind: found.size_bytes for kind in Kind for found in files_of(pool, kind)}
        assert sizes in ({Kind.BLOCK: 100, Kind.QUARANTINED: 70}, {Kind.QUARANTINED: 100})
        remover.quarantine(file)
    assert killed == [True] * 6 + [False] * 2  # mkdir, rename, release, utime, two folders


@pytest.mark.slow
def test_two_removers_release_each_byte_exactly_once(
    pool: Path, ledger: UsageLedger, make_key: MakeKey, start_python: Callable
) -> None:
    for number in range(1000):
        write(pool, block_path(make_key(number)), size=1 + number % 7)
    untouched = 123
    ledger.recount(lambda: count_bytes(str(pool)) + untouched)
    processes = [start_python(REMOVE_ALL, pool) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [[int(number) for number in process.communicate()[0].split()] for process in processes]
    assert sum(removed for removed, _, _ in outcomes) == 1000
    assert all(removed + gone == total == 1000 for removed, gone, total in outcomes)
    assert ledger.used_bytes() == untouched
    assert os.listdir(pool / make_key(0).fingerprint[:12] / "r0") == []


@pytest.mark.slow
def test_a_reader_beside_a_remover_has_the_whole_block_or_none(
    pool: Path, ledger: UsageLedger, make_key: MakeKey, start_python: Callable
) -> None:
    ledger.ensure(lambda: 0)
    path = pool / block_path(make_key(1))
    process = start_python(PUBLISH_AND_REMOVE, pool, block_path(make_key(1)))
    assert process.stdout.readline() == "ready\n"
    whole = missing = 0
    while whole < 50 or missing < 50:
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                assert file.read(size) == b"good" * 250_000
                whole += 1
        except FileNotFoundError:
            missing += 1
        assert process.poll() is None


def test_names_of_odd_bytes_and_foreign_files_survive(pool: Path, remover: Remover, make_key: MakeKey) -> None:
    path = os.fsencode(write(pool, block_path(make_key(1))))
    foreign = [
        os.path.dirname(path) + b"/\xff\xfe\x80",
        os.path.dirname(path) + b"/new\nline",
        os.path.dirname(path) + b"/" + b"0" * 64 + b"_g0.kvb",
        os.path.dirname(os.path.dirname(path)) + b"/notes.txt",
    ]
    for name in foreign:
        Path(os.fsdecode(name)).write_bytes(b"mine")
    assert [remover.remove(file) for file in files_of(pool)] == [Removed.REMOVED]
    assert not os.path.exists(path)
    assert all(Path(os.fsdecode(name)).read_bytes() == b"mine" for name in foreign)


def test_no_descriptor_outlasts_a_call(
    pool: Path, remover: Remover, make_key: MakeKey, fingerprint: Fingerprint
) -> None:
    gc.collect()  # what others left may close its files at any moment
    before = os.listdir("/proc/self/fd")
    for number in range(3):
        write(pool, block_path(make_key(number)))
    first, second, third = files_of(pool)
    assert [remover.remove(first), remover.remove(first)] == [Removed.REMOVED, Removed.GONE]
    assert [remover.quarantine(second), remover.quarantine(second)] == [Removed.REMOVED, Removed.GONE]
    assert not remover.drop_fingerprint(fingerprint[:12])
    remover.remove(third)
    assert remover.drop_fingerprint(fingerprint[:12])
    assert os.listdir("/proc/self/fd") == before
