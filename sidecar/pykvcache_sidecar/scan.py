"""One walk over a pool that answers everything at once: what is there, how much, and what may leave first.

Facts: a pool holds millions of files; blocks are removed and stored while they are counted. What they mean: only a
bounded batch of candidates can be kept, and a file that we remove after the walk passed it is counted though it is
gone. Therefore a scan keeps the candidates that rank lowest, remembers which folders it has passed, and whoever removes
a file asks it first; the bytes of such files are taken off at the end.

A folder that cannot be read must not end eviction for the rest of the pool: the scan goes on with the next fingerprint
and says so in its result, whose count is then too small to be used.

A scan runs on a thread of its own, so that eviction never waits for one that it does not need. It takes at most a
fifth of a core, unless room is needed now, and stops within a step. `Scanner` belongs to the thread that cares for
the pool; the walking thread owns its `Scan` until it ends, but for `has_passed`.
"""

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from pykvcache_contract.errors import PyKVCacheError, TransientError
from pykvcache_sidecar.pace import pause_after
from pykvcache_sidecar.policy import BlockUse, Policy
from pykvcache_storage.inventory import (
    STEP_ENTRIES,
    FingerprintSummary,
    Kind,
    PoolFile,
    fingerprint_directories,
    walk,
)

logger = logging.getLogger(__name__)

QUARANTINED_MAX = 4096
"""Damaged files of one batch; more wait for the next scan."""


@dataclass(slots=True)
class ScanResult:
    """What a scan found.

    Args:
        mark: of the ledger, from before the scan.
        counted_bytes: of all our files, whatever their kind.
        candidates: blocks in the order in which they leave.
        is_complete: no block was left out of the candidates.
        unread: why a part of a fingerprint was left out, by its folder; then `counted_bytes` is too small.
    """

    mark: int
    counted_bytes: int
    files: int
    duration_seconds: float
    summaries: list[FingerprintSummary]
    candidates: list[PoolFile]
    quarantined: list[PoolFile]
    is_complete: bool
    unread: dict[str, str] = field(default_factory=dict)


class Batch:
    """The files that rank lowest among all that were added, at most `size`."""

    def __init__(self, policy: Policy, size: int) -> None:
        self._policy = policy
        self._size = size
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, PoolFile]] = []
        self.is_complete = True

    def add(self, file: PoolFile, fingerprint_directory: str) -> None:
        """Take up a file, or not."""
        rank = self._policy.rank(BlockUse(fingerprint_directory, file.modified_ns, file.size_bytes))
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, (-rank, next(self._numbers), file))
            return
        self.is_complete = False
        if rank < -self._heap[0][0]:
            heapq.heapreplace(self._heap, (-rank, next(self._numbers), file))

    def in_order(self) -> list[PoolFile]:
        """Return the files, the one that leaves first at the front."""
        return [file for _, _, file in sorted(self._heap, key=lambda entry: (-entry[0], entry[1]))]


@dataclass(slots=True)
class Scan:
    """One walk, step by step."""

    pool_directory: str
    batch: Batch
    mark: int
    summaries: list[FingerprintSummary] = field(default_factory=list)
    quarantined: list[PoolFile] = field(default_factory=list)
    counted_bytes: int = 0
    files: int = 0
    unread: dict[str, str] = field(default_factory=dict)
    _passed: set[str] = field(default_factory=set)
    _folder: str = ""

    def steps(self) -> Generator[None, None, None]:
        """Walk, giving control back every few hundred entries.

        Raises:
            TransientError: the pool cannot be listed.
        """
        for name in fingerprint_directories(self.pool_directory):
            summary = FingerprintSummary(name)
            self.summaries.append(summary)
            try:
                yield from self._steps_through(summary)
            except TransientError as error:
                self.unread[name] = str(error)
                self._folder = ""  # Counted in part only, so it was not passed.
        self._enter("")

    def _steps_through(self, summary: FingerprintSummary) -> Generator[None, None, None]:
        for number, file in enumerate(walk(self.pool_directory, summary.directory), start=1):
            if file is not None:
                self._add(file, summary)
            if number % STEP_ENTRIES == 0:
                yield

    def has_passed(self, path: str) -> bool:
        """Return whether a block or a quarantined file was surely counted if it was there. Any thread."""
        return _folder_of(path) in self._passed

    def result(self, duration_seconds: float) -> ScanResult:
        """Return what the whole walk found."""
        return ScanResult(
            mark=self.mark,
            counted_bytes=self.counted_bytes,
            files=self.files,
            duration_seconds=duration_seconds,
            summaries=self.summaries,
            candidates=self.batch.in_order(),
            quarantined=self.quarantined,
            is_complete=self.batch.is_complete,
            unread=self.unread,
        )

    def _add(self, file: PoolFile, summary: FingerprintSummary) -> None:
        self.files += 1
        self.counted_bytes += file.size_bytes
        summary.add(file)
        if file.kind is not Kind.TEMPORARY:
            self._enter(_folder_of(file.path))
        if file.kind is Kind.BLOCK:
            self.batch.add(file, summary.directory)
        elif file.kind is Kind.QUARANTINED and len(self.quarantined) < QUARANTINED_MAX:
            self.quarantined.append(file)

    def _enter(self, folder: str) -> None:
        if folder != self._folder:
            self._passed.add(self._folder)
            self._folder = folder


def _folder_of(path: str) -> str:
    """Return the folder that a walk goes through in one go and that there are few of: `<fp12>/r<rank>/<hhh>`.

    Of a quarantined file it is `<fp12>`, which stands for the quarantine.
    """
    return path.rsplit("/", 2)[0]


class Scanner:
    """Starts scans, one at a time, and hands over their results.

    Args:
        begin: makes the next scan; called on its thread.

    Attributes:
        error: why the last scan taken failed as a whole; empty if it did not.
    """

    def __init__(self, begin: Callable[[], Scan], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._begin = begin
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._scan: Scan | None = None
        self._result: ScanResult | None = None
        self._error = self.error = ""

    @property
    def is_running(self) -> bool:
        """Return whether a scan is under way, or its result not yet taken."""
        return self._thread is not None

    def start(self, *, hurry: bool) -> None:
        """Start a scan unless one is under way; `hurry` leaves out the pauses, from now on until told otherwise."""
        self.set_hurry(hurry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pykvcache-scan", daemon=True)
            self._thread.start()

    def set_hurry(self, hurry: bool) -> None:
        """Leave out the pauses, or not."""
        if hurry:
            self._hurry.set()
        else:
            self._hurry.clear()

    def has_passed(self, path: str) -> bool:
        """Return whether a scan under way has counted this block."""
        return self._scan is not None and self._scan.has_passed(path)

    def take(self) -> tuple[bool, ScanResult | None]:
        """Return whether a scan has ended, and its result: None if it failed, and why in `error`. Each comes once."""
        if self._thread is None or self._thread.is_alive():
            return False, None
        result, self._thread, self._scan, self._result = self._result, None, None, None
        self.error, self._error = self._error, ""
        return True, result

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """End a scan under way at its next step; this scanner starts no other."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        started = self._monotonic()
        try:
            scan = self._scan = self._begin()
            with contextlib.closing(scan.steps()) as steps:
                if not self._walk(steps):
                    return
            self._result = scan.result(self._monotonic() - started)
        except PyKVCacheError as error:
            self._error = str(error)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            if self._error != self.error:  # else it would be told again with every scan
                logger.exception("the pool could not be scanned")

    def _walk(self, steps: Iterator[None]) -> bool:
        started = self._monotonic()
        for _ in steps:
            pause = 0.0 if self._hurry.is_set() else pause_after(self._monotonic() - started)
            if self._stopped.wait(pause) if pause else self._stopped.is_set():
                return False
            started = self._monotonic()
        return True
