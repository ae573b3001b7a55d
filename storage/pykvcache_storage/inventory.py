"""What a pool holds, in bounded memory: one pass over its folders, no list of its files.

The walk goes folder by folder (`os.scandir` reads a few hundred names at a time) relative to descriptors, so that no
link leads out of the pool. Names that are not ours are passed over, whatever bytes they contain; files that vanish
meanwhile too. A folder that cannot be read is an error: a count that leaves it out would be wrong.

Runs in the CLI, the sidecar and, at start-up, on a background thread inside vLLM; there the `…_in_steps` variants give
control back every few hundred entries, so that the caller can sleep or stop. Blocking calls, any thread.
"""

import errno
import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from pykvcache_contract.errors import TransientError
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import (
    BLOCK_FILE,
    FINGERPRINT_DIRECTORY,
    QUARANTINE_DIRECTORY,
    RANK_DIRECTORY,
    TEMPORARY_DIRECTORY,
    TEMPORARY_FILE,
)

STEP_ENTRIES = 256
"""Names looked at between two pauses: 2 to 5 ms of work on a local disk."""
PAUSE_SECONDS_MIN = 0.002
PAUSE_SECONDS_MAX = 0.25
"""Bounds of a pause; a step that took long for a slow disk's sake need not be made up for."""
FINGERPRINTS_MAX = 16_384
"""A pool of some models has some hundreds. Whoever may write to a pool must not fill the memory of those who look."""

FIRST_LEVEL = re.compile(r"[0-9a-f]{3}")
SECOND_LEVEL = re.compile(r"[0-9a-f]{2}")
_QUARANTINED_FILE = re.compile(r"r\d{1,5}_[0-9a-f]{2,128}_g\d{1,4}\.kvb")
_NOT_A_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]


class Kind(Enum):
    """What a file of ours is."""

    BLOCK = "block"
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class PoolFile:
    """One file of ours, as the walk saw it.

    Args:
        path: relative to the pool.
        size_bytes: length of the file, which is what the usage ledger counts.
        modified_ns: of a block, when it was last wanted (`contract: recency.py`).
        rank, block_hash, group: of a block; zero and empty for other kinds.
        inode: tells a file from a later one of the same name; 0 if unknown.
    """

    kind: Kind
    path: str
    size_bytes: int
    modified_ns: int
    rank: int = 0
    block_hash: str = ""
    group: int = 0
    inode: int = 0

    @property
    def modified_seconds(self) -> float:
        """Return the modification time as Unix time, for people; the depth is lost in it."""
        return self.modified_ns / 1e9

    def key(self, fingerprint: Fingerprint) -> BlockKey:
        """Return the key of a block; its fingerprint stands in the folder's config.json."""
        return BlockKey(fingerprint, bytes.fromhex(self.block_hash), self.group, self.rank)


@dataclass(slots=True)
class Tally:
    """A number of files, their bytes, and the age of the oldest and newest (Unix time, None if there is none)."""

    count: int = 0
    size_bytes: int = 0
    oldest_seconds: float | None = None
    newest_seconds: float | None = None

    def add(self, file: PoolFile) -> None:
        """Count one file."""
        when = file.modified_seconds
        self.count += 1
        self.size_bytes += file.size_bytes
        self.oldest_seconds = when if self.oldest_seconds is None else min(when, self.oldest_seconds)
        self.newest_seconds = when if self.newest_seconds is None else max(when, self.newest_seconds)


@dataclass(slots=True)
class FingerprintSummary:
    """What one fingerprint's folder holds.

    Args:
        directory: its name, the fingerprint's first 12 digits.
        ranks: blocks per rank.
    """

    directory: str
    blocks: Tally = field(default_factory=Tally)
    ranks: dict[int, Tally] = field(default_factory=dict)
    temporaries: Tally = field(default_factory=Tally)
    quarantined: Tally = field(default_factory=Tally)

    def add(self, file: PoolFile) -> None:
        """Count one file."""
        if file.kind is Kind.BLOCK:
            self.blocks.add(file)
            self.ranks.setdefault(file.rank, Tally()).add(file)
        elif file.kind is Kind.TEMPORARY:
            self.temporaries.add(file)
        else:
            self.quarantined.add(file)


def pause_after(step_seconds: float, *, ratio: float) -> float:
    """Return how long to leave processor and interpreter to others after a step: so many times its duration.

    >>> [pause_after(seconds, ratio=9.0) for seconds in (0.0, 0.01, 60.0)]
    [0.002, 0.09, 0.25]
    """
    return min(max(step_seconds * ratio, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX)


def fingerprint_directories(pool_directory: str) -> list[str]:
    """Return the names of the fingerprints' folders, sorted.

    Raises:
        TransientError: the pool cannot be listed, or holds more than `FINGERPRINTS_MAX`.
    """
    try:
        with os.scandir(pool_directory) as entries:
            ours = (e.name for e in entries if FINGERPRINT_DIRECTORY.fullmatch(e.name) and _is_folder(e))
            names = sorted(itertools.islice(ours, FINGERPRINTS_MAX + 1))
    except OSError as error:
        raise TransientError(f"list {pool_directory}: {error.strerror}") from error
    if len(names) > FINGERPRINTS_MAX:
        raise TransientError(
            f"list {pool_directory}: it holds more than {FINGERPRINTS_MAX} fingerprints. Remove those that nobody uses."
        )
    return names


def iterate_blocks(pool_directory: str, fingerprint_directory: str | None = None) -> Iterator[PoolFile]:
    """Yield every published block of a pool, or of one of its fingerprints, in no particular order."""
    names = [fingerprint_directory] if fingerprint_directory else fingerprint_directories(pool_directory)
    for name in names:
        for file in walk(pool_directory, name):
            if file is not None and file.kind is Kind.BLOCK:
                yield file


def summarise(pool_directory: str) -> list[FingerprintSummary]:
    """Return what a pool holds, per fingerprint."""
    return _finish(summarise_in_steps(pool_directory))


def summarise_in_steps(pool_directory: str) -> Steps[list[FingerprintSummary]]:
    """Do the same, yielding every few hundred entries; the summary is the generator's return value."""
    summaries = []
    for name in fingerprint_directories(pool_directory):
        summary = FingerprintSummary(name)
        summaries.append(summary)
        yield from _for_each(walk(pool_directory, name), summary.add)
    return summaries


def count_bytes(pool_directory: str) -> int:
    """Return the bytes of all blocks, temporary and quarantined files: what `UsageLedger.recount` needs."""
    return _finish(count_bytes_in_steps(pool_directory))


def count_bytes_in_steps(pool_directory: str) -> Steps[int]:
    """Do the same, yielding every few hundred entries; the bytes are the generator's return value."""
    total = Tally()
    for name in fingerprint_directories(pool_directory):
        yield from _for_each(walk(pool_directory, name), total.add)
    return total.size_bytes


def walk(pool_directory: str, fingerprint_directory: str) -> Generator[PoolFile | None, None, None]:
    """Yield every file of ours below one fingerprint, and None for every other thing looked at.

    Raises:
        TransientError: a folder cannot be read.
    """
    directory = os.path.join(pool_directory, fingerprint_directory)
    try:
        top = os.open(directory, _OPEN_FLAGS)
    except OSError as error:
        if error.errno in _NOT_A_FOLDER:
            return
        raise TransientError(f"scan {directory}: {error.strerror}") from error
    try:
        for name, folder in _folders(top, None):
            path = f"{fingerprint_directory}/{name}"
            if (match := RANK_DIRECTORY.fullmatch(name)) and match[1] == str(int(match[1])):
                yield from _walk_rank(folder, rank=int(match[1]), path=path)
            elif name == TEMPORARY_DIRECTORY:
                yield from _walk_flat(folder, path=path, pattern=TEMPORARY_FILE, kind=Kind.TEMPORARY)
            elif name == QUARANTINE_DIRECTORY:
                yield from _walk_flat(folder, path=path, pattern=_QUARANTINED_FILE, kind=Kind.QUARANTINED)
    except OSError as error:
        raise TransientError(f"scan {directory}: {error.strerror}") from error
    finally:
        os.close(top)


def _walk_rank(folder: int, *, rank: int, path: str) -> Iterator[PoolFile | None]:
    for first, outer in _folders(folder, FIRST_LEVEL):
        yield None
        for second, inner in _folders(outer, SECOND_LEVEL):
            yield None
            with os.scandir(inner) as entries:
                for entry in entries:
                    match = BLOCK_FILE.fullmatch(entry.name)
                    # A block in another block's folder is never found by a lookup: not ours.
                    if match is None or not entry.name.startswith(first + second):
                        yield None
                    else:
                        yield _block(entry, match, rank=rank, folder=f"{path}/{first}/{second}")


def _walk_flat(folder: int, *, path: str, pattern: "re.Pattern[str]", kind: Kind) -> Iterator[PoolFile | None]:
    with os.scandir(folder) as entries:
        for entry in entries:
            status = _status(entry) if pattern.fullmatch(entry.name) else None
            if status is None:
                yield None
            else:
                target = f"{path}/{entry.name}"
                yield PoolFile(kind, target, status.st_size, status.st_mtime_ns, inode=status.st_ino)


def _block(entry: "os.DirEntry[str]", match: "re.Match[str]", *, rank: int, folder: str) -> PoolFile | None:
    block_hash, group = match[1], int(match[2])
    status = _status(entry)
    if status is None or len(block_hash) % 2 or match[2] != str(group):
        return None
    path = f"{folder}/{entry.name}"
    return PoolFile(Kind.BLOCK, path, status.st_size, status.st_mtime_ns, rank, block_hash, group, inode=status.st_ino)


def _status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _folders(parent: int, pattern: "re.Pattern[str] | None") -> Iterator[tuple[str, int]]:
    """Yield name and descriptor of every folder (no link) whose name matches; the descriptor lasts for one turn."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if (pattern is not None and not pattern.fullmatch(entry.name)) or not _is_folder(entry):
                continue
            try:
                folder = os.open(entry.name, _OPEN_FLAGS, dir_fd=parent)
            except OSError as error:
                if error.errno in _NOT_A_FOLDER:
                    continue
                raise
            try:
                yield entry.name, folder
            finally:
                os.close(folder)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)


def _for_each(files: Iterator[PoolFile | None], add: Callable[[PoolFile], None]) -> Steps[None]:
    for number, file in enumerate(files, start=1):
        if file is not None:
            add(file)
        if number % STEP_ENTRIES == 0:
            yield


def _finish(steps: Steps[ResultT]) -> ResultT:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: ResultT = stop.value
            return result
