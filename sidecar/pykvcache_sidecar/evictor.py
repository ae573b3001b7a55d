"""Takes files out of a pool, a bounded batch in its order, until enough bytes are gone.

The batch is what one scan found to leave first. A candidate that was used since stays, one that is gone is passed over;
both are known only when its turn comes, so a batch may run out before enough is gone: then another scan is needed.
Damaged files older than their time in quarantine go first, and those that are not before any healthy block: what is
quarantined counts as used. A fingerprint that nobody used for long is taken down block
by block, and then its folder.

Work comes in shifts of a fraction of a second, so that the caring thread looks at the pool, and at its stop, in
between. Belongs to that thread. Nothing here decides how much must go: `limits.py` does.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pykvcache_contract.errors import TransientError
from pykvcache_sidecar.book import Book
from pykvcache_storage.inventory import Kind, PoolFile, walk
from pykvcache_storage.removal import Removed, Remover

logger = logging.getLogger(__name__)

SHIFT_SECONDS = 0.25
UNUSED = "unused"
Walk = Generator[PoolFile | None, None, None]
QUARANTINE = "quarantine"


class Shift:
    """A bounded time to work in.

    Args:
        stopped: ends it at once.
    """

    def __init__(self, stopped: threading.Event, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stopped = stopped
        self._monotonic = monotonic
        self._end = monotonic() + SHIFT_SECONDS

    def is_over(self) -> bool:
        """Return whether to leave the rest to the next shift."""
        return self._stopped.is_set() or self._monotonic() >= self._end


@dataclass(slots=True)
class _Removals:
    """What one shift removed for one reason: sizes by fingerprint's folder."""

    sizes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    total_bytes: int = 0
    last: PoolFile | None = None

    def add(self, file: PoolFile) -> None:
        self.sizes[file.path.partition("/")[0]].append(file.size_bytes)
        self.total_bytes += file.size_bytes
        self.last = file


@dataclass(slots=True)
class Attempts:
    """How many files were to be removed, and the last one for which that failed."""

    removed: int = 0
    failed: int = 0
    failed_path: str = ""


class Evictor:
    """Removes files of one pool.

    Args:
        pool_directory: walked for fingerprints that nobody uses.
        clock: Unix time, for ages.
        has_passed: asks a scan under way whether it counted a block.

    Attributes:
        removed_behind_scan: bytes that a scan under way has counted and that are gone, of blocks by fingerprint's
            folder, of quarantined files by quarantine; whoever takes its result takes them off, and sets this to empty.
    """

    def __init__(
        self,
        *,
        pool_directory: str,
        remover: Remover,
        book: Book,
        clock: Callable[[], float],
        has_passed: Callable[[str], bool],
    ) -> None:
        self._pool_directory = pool_directory
        self._remover = remover
        self._book = book
        self._clock = clock
        self._has_passed = has_passed
        self._candidates: deque[PoolFile] = deque()
        self._quarantined: deque[PoolFile] = deque()
        self._unused: dict[str, Walk | None] = {}
        self._attempts = Attempts()
        self.removed_behind_scan: dict[str, list[int]] = defaultdict(list)

    @property
    def has_candidates(self) -> bool:
        """Return whether the batch has not run out."""
        return bool(self._candidates)

    @property
    def has_unused(self) -> bool:
        """Return whether a fingerprint is being taken down."""
        return bool(self._unused)

    def load(self, *, candidates: list[PoolFile], quarantined: list[PoolFile], unused: list[str]) -> None:
        """Take over what a scan found, in place of what is left of the last one."""
        self._candidates = deque(candidates)
        self._quarantined = deque(sorted(quarantined, key=lambda file: file.modified_ns))
        self._unused = {name: self._unused.get(name) for name in unused}

    def evict(self, goal_bytes: int, reason: str, shift: Shift) -> int:
        """Remove candidates in their order until `goal_bytes` are gone; return how many are."""
        removals = _Removals()
        while self._candidates and removals.total_bytes < goal_bytes and not shift.is_over():
            self._remove(self._candidates.popleft(), removals)
        self._note(removals, reason)
        return removals.total_bytes

    def remove_quarantined(self, older_than_seconds: float, *, goal_bytes: int, shift: Shift) -> int:
        """Remove damaged files, the oldest first; return how many bytes are gone.

        Args:
            older_than_seconds: those whose time in quarantine is over leave in any case.
            goal_bytes: and of the others as many as it takes until so much is gone.
        """
        removals = _Removals()
        limit_ns = int((self._clock() - older_than_seconds) * 1e9)
        while self._quarantined and not shift.is_over():
            if self._quarantined[0].modified_ns > limit_ns and removals.total_bytes >= goal_bytes:
                break
            self._remove(self._quarantined.popleft(), removals)
        self._note(removals, QUARANTINE)
        return removals.total_bytes

    def take_down_unused(self, older_than_seconds: float, shift: Shift) -> None:
        """Remove the blocks of fingerprints that nobody used for so long, and then their folders."""
        removals = _Removals()
        while self._unused and not shift.is_over():
            name = next(iter(self._unused))
            try:
                is_empty = self._take_down(name, older_than_seconds, shift, removals)
            except TransientError as error:
                logger.warning("an unused fingerprint could not be removed: %s", error)
                is_empty = False
                self._unused.pop(name, None)
            if is_empty:
                del self._unused[name]
                if self._remover.drop_fingerprint(name):
                    self._book.count_dropped(name)
                    logger.info("removed a fingerprint that nobody used for long: %s", name)
        self._note(removals, UNUSED)

    def take_attempts(self) -> Attempts:
        """Return what was tried since this was asked last."""
        attempts, self._attempts = self._attempts, Attempts()
        return attempts

    def close(self) -> None:
        """Let go of folders that are open; the rest is memory."""
        for files in self._unused.values():
            _close(files)
        self._unused.clear()

    def _take_down(self, name: str, older_than_seconds: float, shift: Shift, removals: _Removals) -> bool:
        """Remove blocks; return whether all were looked at. One that was used meanwhile ends it: it is in use."""
        files = self._unused[name] = self._unused[name] or walk(self._pool_directory, name)
        limit_ns = int((self._clock() - older_than_seconds) * 1e9)
        for file in files:
            if file is not None and file.kind is Kind.BLOCK:
                if file.modified_ns > limit_ns or self._remove(file, removals) is Removed.USED:
                    _close(files)
                    del self._unused[name]
                    return False
            if shift.is_over():
                return False
        return True

    def _remove(self, file: PoolFile, removals: _Removals) -> Removed:
        was_counted = self._has_passed(file.path)
        removed = self._remover.remove(file)
        if removed is Removed.REMOVED:
            removals.add(file)
            self._attempts.removed += 1
            if was_counted:
                self.removed_behind_scan[_owner_of(file)].append(file.size_bytes)
        elif removed is Removed.FAILED:
            self._attempts.failed += 1
            self._attempts.failed_path = file.path
            logger.debug("%s could not be removed", file.path)
        return removed

    def _note(self, removals: _Removals, reason: str) -> None:
        if removals.last is None:
            return
        is_block = removals.last.kind is Kind.BLOCK
        tells_size = is_block and reason != UNUSED
        age = max(0.0, self._clock() - removals.last.modified_seconds) if tells_size else None
        self._book.count_evictions(reason, removals.sizes, age_seconds=age)
        if is_block:
            self._book.take_off(removals.sizes)


def _owner_of(file: PoolFile) -> str:
    return file.path.partition("/")[0] if file.kind is Kind.BLOCK else file.path.rpartition("/")[0]


def _close(files: Walk | None) -> None:
    if files is not None:
        files.close()
