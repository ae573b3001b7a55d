"""Writes and reads of test files through a reactor: one call measures one point, for a moment.

As in the product every block is a task: its file is opened, one block written or read, the file closed. A file is as
long as the largest block; smaller blocks are read from it one after another. The files hold random bytes, so that no
filesystem can compress them. A measurement counts from the first submission until nothing is in flight any more.

The caller's thread waits; tasks run on the reactor's. Memory is one mapping, cut anew for each block size.
"""

import errno
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count as count_up
from itertools import islice
from typing import Any

from pykvcache_contract.errors import TransientError
from pykvcache_storage.memory import Slot, StagingMemory
from pykvcache_storage.probe import ProbeResult, make_ring
from pykvcache_storage.reactor.operations import Close, Open, Read, Sync, Task, Write
from pykvcache_storage.reactor.reactor import Priority, Reactor

PIECE_SIZE_BYTES = 256 << 10
"""What memory is cut from: every block is some of these, side by side."""
HANG_SECONDS = 30.0
"""A disk that has not answered for so long is not measured; no healthy one takes as long for what is in flight."""
STOP_SECONDS = 10.0

_ABANDONED: list[StagingMemory] = []
"""Memory into which a hung disk may still write; it stays until the process ends."""
_BLOCKS_MIN = 8
"""However short a measurement is: one block may have waited for something else than the disk."""
_RANDOM_PIECES = 64
_STAMP_SIZE_BYTES = 8
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_Job = Callable[[Slot], Task[int]]


@dataclass(frozen=True, slots=True)
class Rate:
    """What one measurement saw.

    Args:
        latency_seconds: median from the start of a block's open to its last byte.
    """

    bytes: int
    seconds: float
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


@dataclass(slots=True)
class DataFiles:
    """The files that were written whole, all of one length, in the order in which they were finished.

    Args:
        is_full: whether the disk or a quota took no more.
    """

    folder: str
    file_bytes: int
    numbers: list[int] = field(default_factory=list)
    is_full: bool = False

    def path(self, number: int) -> str:
        return os.path.join(self.folder, f"{number}.dat")

    def block_count(self, block_bytes: int) -> int:
        return len(self.numbers) * (self.file_bytes // block_bytes)

    def place(self, index: int, block_bytes: int) -> tuple[str, int]:
        """Return the file and the offset of a block, counted over all files."""
        file, block = divmod(index, self.file_bytes // block_bytes)
        return self.path(self.numbers[file]), block * block_bytes

    def drop_from_page_cache(self) -> None:
        """Let the next reads come from the disk; what the kernel keeps all the same (tmpfs) is no disk's."""
        for number in self.numbers:
            descriptor = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Bench:
    """Measures in one directory.

    Args:
        found: what the storage probe said about it.
        memory_bytes: bound of all blocks in flight.
    """

    def __init__(self, found: ProbeResult, *, memory_bytes: int) -> None:
        self._found = found
        self._flags = os.O_DIRECT if found.direct_io else 0
        self._memory = StagingMemory(slot_size_bytes=PIECE_SIZE_BYTES, budget_bytes=memory_bytes)
        # The kernel makes random bytes slower than any disk here takes them, so they are repeated, far apart.
        content = memoryview(os.urandom(_RANDOM_PIECES * PIECE_SIZE_BYTES))
        for slot in self._memory.slots:
            begin = slot.index % _RANDOM_PIECES * PIECE_SIZE_BYTES
            slot.data[:] = content[begin : begin + PIECE_SIZE_BYTES]

    def depth_max(self, block_bytes: int) -> int:
        """Return how many blocks of a size fit into memory."""
        return len(self._memory.slots) // (block_bytes // PIECE_SIZE_BYTES)

    def write(self, files: DataFiles, *, count: int, depth: int, seconds: float) -> Rate:
        """Write up to `count` files for up to some seconds, each in one piece as a block is stored.

        Fewer where the disk is full before; `files.numbers` tells how many.

        Raises:
            OSError: the disk refuses for another reason.
        """
        deadline = time.perf_counter() + seconds

        def jobs() -> Iterator[_Job]:
            for number in range(count):
                # The first ones are written in any case: there must be something to read.
                if files.is_full or (number >= depth and time.perf_counter() > deadline):
                    return
                yield partial(self._write_task, files=files, number=number)

        return self._measure([jobs()], files.file_bytes, depth)

    def read(
        self, files: DataFiles, *, block_bytes: int, depth: int, start: float, readers: int, seconds: float
    ) -> Rate:
        """Read blocks for some seconds, through the page cache each of them once at most.

        Args:
            depth: blocks in flight, spread evenly over the readers.
            start: where the first reader begins, 0 ≤ start < 1 of all files; the others follow at equal distances.
        """
        if not self._found.direct_io:
            files.drop_from_page_cache()
        deadline = time.perf_counter() + seconds
        count = files.block_count(block_bytes)
        limit = None if self._found.direct_io else max(1, count // readers)

        def jobs(reader: int) -> Iterator[_Job]:
            first = int((start + reader / readers) * count)
            for step in count_up() if limit is None else range(limit):
                if step * readers >= max(depth, _BLOCKS_MIN) and time.perf_counter() > deadline:
                    return
                path, offset = files.place((first + step) % count, block_bytes)
                yield partial(self._read_task, path=path, offset=offset, block_bytes=block_bytes)

        return self._measure([jobs(reader) for reader in range(readers)], block_bytes, depth)

    def _write_task(self, slot: Slot, *, files: DataFiles, number: int) -> Task[int]:
        slot.data[:_STAMP_SIZE_BYTES] = number.to_bytes(_STAMP_SIZE_BYTES, "little")
        try:
            written = yield from self._write_file(files.path(number), slot.address, files.file_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            files.is_full, written = True, 0
        if written == files.file_bytes:
            files.numbers.append(number)
        return written

    def _write_file(self, path: str, address: int, size_bytes: int) -> Task[int]:
        descriptor = yield Open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        try:
            written = yield Write(descriptor, address, size_bytes, 0)
            if not self._found.direct_io:
                # Without it the rate is the memory's, and what is dirty cannot leave the page cache.
                yield Sync(descriptor)
        finally:
            yield Close(descriptor)
        return int(written)

    def _read_task(self, slot: Slot, *, path: str, offset: int, block_bytes: int) -> Task[int]:
        descriptor = yield Open(path, os.O_RDONLY | self._flags)
        try:
            count = yield Read(descriptor, slot.address, block_bytes, offset)
        finally:
            yield Close(descriptor)
        return int(count)

    def _measure(self, lanes: list[Iterator[_Job]], block_bytes: int, depth: int) -> Rate:
        pieces = block_bytes // PIECE_SIZE_BYTES
        # A block's memory is whole pieces side by side; the first of them knows where it begins.
        slots = self._memory.slots[: depth * pieces : pieces]
        reactor = Reactor(make_ring(self._found, threads=depth), slots, depth=depth, store_reserve=0)
        try:
            return _Drive(reactor, lanes, depth).run()
        finally:
            if not reactor.stop(STOP_SECONDS):
                _ABANDONED.append(self._memory)


class _Drive:
    """Keeps `depth` tasks of a reactor in flight, spread over lanes, until the lanes end."""

    def __init__(self, reactor: Reactor, lanes: list[Iterator[_Job]], depth: int) -> None:
        self._reactor = reactor
        self._lanes = lanes
        self._depth = depth
        self._running = 0
        self._bytes = 0
        self._ended = 0.0
        self._latencies: list[float] = []
        self._failure: BaseException | None = None
        self._idle = threading.Event()

    def run(self) -> Rate:
        """Return what was seen.

        Raises:
            TransientError: the disk does not answer.
            OSError: it refuses.
        """
        share = self._depth // len(self._lanes)
        # Taken before the reactor runs: from then on the lanes are its thread's.
        first = [(lane, job) for lane in self._lanes for job in islice(lane, share)]
        self._running = len(first)
        started = time.perf_counter()
        for lane, job in first:
            self._submit(lane, job)
        answers = 0
        while not self._idle.wait(HANG_SECONDS):
            if len(self._latencies) == answers:
                raise TransientError(f"the disk has not answered for {HANG_SECONDS:.0f} s: look at the kernel's log")
            answers = len(self._latencies)
        if self._failure is not None:
            raise self._failure
        return Rate(self._bytes, self._ended - started, statistics.median(self._latencies))

    def _submit(self, lane: Iterator[_Job], job: _Job) -> None:
        started = time.perf_counter()
        self._reactor.submit(job, priority=Priority.DEMAND, on_done=lambda result: self._on_done(lane, started, result))

    def _on_done(self, lane: Iterator[_Job], started: float, result: Any) -> None:
        now = time.perf_counter()
        if isinstance(result, int):
            self._bytes += result
            self._latencies.append(now - started)
        else:
            self._failure = self._failure or result
        job = next(lane, None) if self._failure is None else None
        if job is not None:
            self._submit(lane, job)
            return
        self._running -= 1
        if self._running == 0:
            self._ended = now
            self._idle.set()
