"""Walking pools: exact totals, foreign names, links, vanishing files, bounded steps."""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_contract.keys import BlockKey, Fingerprint, fingerprint_of
from pykvcache_contract.paths import block_path, quarantine_path, temporary_path
from pykvcache_storage import inventory
from pykvcache_storage.inventory import (
    STEP_ENTRIES,
    count_bytes,
    count_bytes_in_steps,
    iterate_blocks,
    summarise,
    summarise_in_steps,
    walk,
)
from pykvcache_storage.pool import open_pool

MakeKey = Callable[..., BlockKey]


@pytest.fixture
def pool(tmp_path: Path, fingerprint: Fingerprint) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(fingerprint, {})
    return directory


def write(pool: Path, path: str, size: int = 8192, modified: float | None = None) -> Path:
    file = pool / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)
    if modified is not None:
        os.utime(file, (modified, modified))
    return file


def test_an_empty_fingerprint_is_listed_with_nothing_in_it(pool: Path, fingerprint: Fingerprint) -> None:
    (summary,) = summarise(str(pool))
    assert summary.directory == fingerprint[:12]
    assert (summary.blocks.count, summary.blocks.oldest_seconds, summary.ranks) == (0, None, {})


def test_blocks_are_counted_per_fingerprint_and_rank(pool: Path, make_key: MakeKey) -> None:
    other = fingerprint_of({"model": "other"})
    for number in range(5):
        write(pool, block_path(make_key(number, rank=number % 2)), size=4096 * (number + 1), modified=1000.0 + number)
    write(pool, block_path(BlockKey(other, b"\1" * 32, 3, 7)), size=100, modified=5.0)
    summaries = {summary.directory: summary for summary in summarise(str(pool))}
    ours, theirs = summaries[make_key(0).fingerprint[:12]], summaries[other[:12]]
    assert (ours.blocks.count, ours.blocks.size_bytes) == (5, 4096 * 15)
    assert (ours.blocks.oldest_seconds, ours.blocks.newest_seconds) == (1000.0, 1004.0)
    assert {rank: (tally.count, tally.size_bytes) for rank, tally in ours.ranks.items()} == {
        0: (3, 4096 * 9),
        1: (2, 4096 * 6),
    }
    assert (theirs.blocks.count, theirs.blocks.size_bytes, list(theirs.ranks)) == (1, 100, [7])


def test_temporaries_and_quarantined_blocks_are_counted_apart(
    pool: Path, fingerprint: Fingerprint, make_key: MakeKey
) -> None:
    write(pool, temporary_path(fingerprint, "a" * 32, 1), size=10)
    write(pool, temporary_path(fingerprint, "a" * 32, 2), size=10)
    write(pool, quarantine_path(make_key(1)), size=5)
    (summary,) = summarise(str(pool))
    assert (summary.blocks.count, summary.temporaries.count, summary.quarantined.count) == (0, 2, 1)
    assert count_bytes(str(pool)) == 25


def test_totals_agree_with_du(pool: Path, make_key: MakeKey) -> None:
    for number in range(50):
        write(pool, block_path(make_key(number)), size=4096 * (1 + number % 7))
    command = f"find {pool} -name '*.kvb' -print0 | du --apparent-size --block-size=1 --files0-from=- -c | tail -1"
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    (summary,) = summarise(str(pool))
    assert summary.blocks.size_bytes == int(output.split()[0]) == count_bytes(str(pool))


def test_iteration_gives_back_the_keys_that_made_the_paths(
    pool: Path, fingerprint: Fingerprint, make_key: MakeKey
) -> None:
    keys = {make_key(number, rank=number % 3, group=number % 2) for number in range(40)}
    for key in keys:
        write(pool, block_path(key))
    found = list(iterate_blocks(str(pool)))
    assert {file.key(fingerprint) for file in found} == keys
    assert {file.path for file in found} == {block_path(key) for key in keys}
    assert list(iterate_blocks(str(pool), "0" * 12)) == []
    assert len(list(iterate_blocks(str(pool), fingerprint[:12]))) == 40


def test_the_walk_tells_a_modification_time_to_the_nanosecond_and_the_inode(
    pool: Path, fingerprint: Fingerprint, make_key: MakeKey
) -> None:
    block, aside = write(pool, block_path(make_key(1))), write(pool, quarantine_path(make_key(2)))
    for file in (block, aside):
        os.utime(file, ns=(0, 1_700_000_039_999_997_000))
    found = [file for file in walk(str(pool), fingerprint[:12]) if file is not None]
    assert {file.modified_ns for file in found} == {1_700_000_039_999_997_000}
    assert {file.inode for file in found} == {block.stat().st_ino, aside.stat().st_ino}
    assert found[0].modified_seconds == block.stat().st_mtime


@pytest.mark.parametrize(
    "name",
    [b"notes.txt", b"\xff\xfe\x80", b"new\nline", b"00_g0.kvb.tmp", b"0" * 63 + b"_g0.kvb", b"0" * 64 + b"_g00.kvb"],
)
def test_foreign_names_are_passed_over_whatever_their_bytes(
    pool: Path, fingerprint: Fingerprint, make_key: MakeKey, name: bytes
) -> None:
    write(pool, block_path(make_key(1)))
    top = os.fsencode(pool / fingerprint[:12])
    folders = [os.fsencode(pool), top, top + b"/tmp", top + b"/quarantine", top + b"/r0", top + b"/r0/000/00"]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
        with open(folder + b"/" + name, "wb") as file:
            file.write(b"x" * 99)
        os.mkdir(folder + b"/x" + name)
    (summary,) = summarise(str(pool))
    assert (summary.blocks.count, summary.temporaries.count, summary.quarantined.count) == (1, 0, 0)
    assert count_bytes(str(pool)) == 8192


def test_a_block_in_another_blocks_folder_or_a_misspelt_rank_is_foreign(pool: Path, make_key: MakeKey) -> None:
    path = block_path(make_key(1))
    write(pool, path)
    folder, name = os.path.split(path)
    write(pool, f"{os.path.dirname(folder)}/zz/{name}")
    write(pool, f"{folder[:-2]}{'00' if folder[-2:] != '00' else '01'}/{name}")
    write(pool, path.replace("/r0/", "/r00/"))
    assert [file.path for file in iterate_blocks(str(pool))] == [path]


@pytest.mark.parametrize("level", range(5))
def test_links_are_never_followed_at_any_level(tmp_path: Path, make_key: MakeKey, level: int) -> None:
    parts = block_path(make_key(1)).split("/")
    write(tmp_path / "outside", "/".join(parts))
    link = tmp_path / "pool" / Path(*parts[: level + 1])
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside" / Path(*parts[: level + 1]))
    assert (tmp_path / "pool" / Path(*parts)).exists()
    assert list(iterate_blocks(str(tmp_path / "pool"))) == []
    assert list(iterate_blocks(str(tmp_path / "pool"), parts[0])) == []


def test_files_that_vanish_during_the_walk_are_passed_over(pool: Path, make_key: MakeKey) -> None:
    files = [write(pool, block_path(make_key(number))) for number in range(20)]
    walk = iterate_blocks(str(pool))
    next(walk)
    for file in files:
        file.unlink()
    assert len(list(walk)) < 20
    assert count_bytes(str(pool)) == 0


def test_a_folder_that_cannot_be_read_is_an_error_not_a_smaller_count(
    pool: Path, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pool, block_path(make_key(1)))
    real = os.open

    def fail(path: str, flags: int, **options: int) -> int:
        if path == "r0":
            raise OSError(5, "Input/output error")
        return real(path, flags, **options)

    monkeypatch.setattr(inventory.os, "open", fail)
    with pytest.raises(TransientError, match="Input/output error"):
        count_bytes(str(pool))


def test_a_missing_pool_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="No such file"):
        summarise(str(tmp_path / "gone"))


def test_the_throttled_variants_pause_often_and_agree(pool: Path, fingerprint: Fingerprint, make_key: MakeKey) -> None:
    for number in range(3 * STEP_ENTRIES):
        write(pool, temporary_path(fingerprint, "a" * 32, number), size=1)
    results = []

    def run() -> Iterator[None]:
        results.append((yield from count_bytes_in_steps(str(pool))))

    pauses = sum(1 for _ in run())
    assert results == [3 * STEP_ENTRIES]
    assert pauses >= 3
    assert sum(1 for _ in summarise_in_steps(str(pool))) == pauses


def test_an_abandoned_walk_closes_its_descriptors(pool: Path, make_key: MakeKey) -> None:
    for number in range(5):
        write(pool, block_path(make_key(number)))
    gc.collect()  # what others left may close its files at any moment
    before = len(os.listdir("/proc/self/fd"))
    walk = iterate_blocks(str(pool))
    next(walk)
    assert len(os.listdir("/proc/self/fd")) > before
    walk.close()
    del walk
    assert len(os.listdir("/proc/self/fd")) == before
