"""What follows from a request's use of blocks, once its lookup was answered: their recency, and a line in the trace.

Facts: a use is noted in the modification times of hundreds of files; a filesystem that is frozen, or busy with its
journal, makes every such change wait, while it still answers questions; only a file's owner may set a time of his
choice. What they mean: none of it may be on the way of an answer, so a thread of its own does it, and what waits for it
is small: only files that are due. Where the time cannot be chosen it is set to now, which loses only the depth; where
it cannot be set at all, refreshing pauses, and is tried again: until it works, blocks leave by the age of their last
noted use. Nothing here is an error to anybody.
"""

import errno
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pykvcache_connector.scheduler.trace import Trace, Traced
from pykvcache_connector.vllm_api import split_offload_key
from pykvcache_contract.recency import is_due, recency_ns

logger = logging.getLogger(__name__)

MAX_WAITING_FILES = 200_000
"""Due files and traced keys that may wait, some 50 MB, and one request more. Further requests are not noted: their
blocks look a little older than they are."""
MAX_REFUSALS = 100
"""Files in a row that may not be changed before refreshing pauses: a pool may hold other users' files among ours."""
PAUSE_SECONDS = 60.0
"""Without refreshing after refusals: as long as the quantum of the times, so a fault that passes costs one of them."""

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


Found = list[tuple[str, int]] | None
"""Of one block: path and modification time in nanoseconds of every rank's file; None if one is missing."""


@dataclass(frozen=True, slots=True)
class Use:
    """One request.

    Args:
        seconds: of its arrival, Unix time.
        files: those that are due, with the modification times they get, in nanoseconds.
        keys: of all its whole blocks, group by group; empty without a line in the trace.
        traced: what its line in the trace needs, None for no line.
    """

    seconds: float
    files: Sequence[tuple[str, int]]
    keys: Sequence[bytes] = ()
    traced: Traced | None = None


def use_of(*, seconds: float, keys: Sequence[bytes], found: Sequence[Found], traced: Traced | None) -> Use:
    """Return what must be kept of a request whose lookup was answered.

    Args:
        keys: of all its whole blocks, group by group, head first.
        found: the files of each; empty if they could not be looked up.
    """
    files = due_files(seconds=seconds, keys=keys, found=found)
    return Use(seconds, files) if traced is None else Use(seconds, files, keys, traced)


def due_files(*, seconds: float, keys: Sequence[bytes], found: Sequence[Found]) -> list[tuple[str, int]]:
    """Return the files in which a use must be noted, with the modification times they get."""
    if not found:
        return []
    due: list[tuple[str, int]] = []
    firsts: dict[int, int] = {}
    for place, (key, files) in enumerate(zip(keys, found, strict=True)):
        first = firsts.setdefault(split_offload_key(key)[1], place)
        for path, modified_ns in files or ():
            if is_due(modified_ns, seconds):
                due.append((path, recency_ns(seconds, place - first)))
    return due


class Refresher:
    """Sets the recency of block files. One thread; may block.

    Args:
        clock: monotonic seconds; a parameter for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_until = -math.inf
        self._refusals = 0
        self._warned: set[int | None] = set()

    @property
    def is_paused(self) -> bool:
        """Return whether files are left as they are, because the last ones could not be changed."""
        return self._clock() < self._paused_until

    def refresh(self, files: Iterable[tuple[str, int]]) -> None:
        """Set modification times, in nanoseconds, one after the other; a file that is gone meanwhile is left out."""
        for path, modified_ns in files:
            if self.is_paused:
                return
            self._set(path, modified_ns)

    def _set(self, path: str, modified_ns: int) -> None:
        try:
            os.utime(path, ns=(modified_ns, modified_ns), follow_symlinks=False)
            self._worked()
        except OSError as error:
            if error.errno == errno.EPERM:
                self._set_now(path)
            elif error.errno not in _GONE:
                self._refused(path, error)

    def _set_now(self, path: str) -> None:
        """Set the time of a file of another user: whoever may write it may set it to now, and to nothing else."""
        try:
            os.utime(path, follow_symlinks=False)
            self._worked()
        except OSError as error:
            if error.errno not in _GONE:
                self._refused(path, error)

    def _worked(self) -> None:
        self._refusals = 0
        if self._warned:
            self._warned.clear()
            logger.info("uses of blocks are noted again")

    def _refused(self, path: str, error: OSError) -> None:
        self._refusals += 1
        if error.errno != errno.EROFS and self._refusals < MAX_REFUSALS:
            return
        self._refusals = 0
        self._paused_until = self._clock() + PAUSE_SECONDS
        if error.errno not in self._warned:
            self._warned.add(error.errno)
            logger.warning(
                "setting the time of %s failed: %s. Blocks in use may leave the pool early until it works; "
                "it is tried again every %d seconds. Mount the pool writable, for the user of vLLM",
                path,
                error.strerror,
                PAUSE_SECONDS,
            )


class Uses:
    """A thread that notes uses, in order of arrival.

    Args:
        trace: None for no trace.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self._refresher = Refresher()
        self._waiting: queue.SimpleQueue[Use | None] = queue.SimpleQueue()
        self._waiting_files = 0
        self._lock = threading.Lock()  # guards the number of files and keys that wait or are being noted
        self._thread = threading.Thread(target=self._main, name="pykvcache-uses", daemon=True)
        self._thread.start()

    def note(self, use: Use) -> None:
        """Have a use noted; returns at once. Any thread."""
        size = len(use.files) + len(use.keys)
        if not size:
            return
        with self._lock:
            if self._waiting_files >= MAX_WAITING_FILES:
                return
            self._waiting_files += size
        self._waiting.put(use)

    def close(self, timeout_seconds: float) -> None:
        """Note what still waits, and end the thread; a disk that hangs keeps it."""
        self._waiting.put(None)
        self._thread.join(timeout_seconds)

    def _main(self) -> None:
        while (use := self._waiting.get()) is not None:
            try:
                self._note(use)
            except Exception:
                logger.exception("a use of blocks was not noted; please report it")
            with self._lock:
                self._waiting_files -= len(use.files) + len(use.keys)
        if self._trace is not None:
            self._trace.close()

    def _note(self, use: Use) -> None:
        if self._trace is not None:
            if use.traced is not None:
                self._trace.add(use.traced, seconds=use.seconds, keys=use.keys)
            if self._waiting.empty():
                self._trace.flush()
        self._refresher.refresh(use.files)
