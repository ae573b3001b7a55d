"""The care of all pool directories of one pool on this node: one loop for each, and the limits they share.

Every namespace's directory is a pool directory of its own, cared for by the same code as `pykvcache-sidecar run`. This
decides only which directories there are and how much each may take now (`shares.py`), and adds up what they tell.

Belongs to the pool's thread, except `snapshots`. A directory that cannot be opened is a problem of its own and keeps
no other waiting.
"""

import logging
import os
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pykvcache_contract.api.pool import EvictionPolicy, KVCachePool
from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.paths import USAGE_FILE
from pykvcache_sidecar.book import Book, Snapshot
from pykvcache_sidecar.care import Care
from pykvcache_sidecar.levels import free_bytes
from pykvcache_sidecar.node.shares import Holding, divide, keep_free, share
from pykvcache_sidecar.settings import CANDIDATES_MAX, CareSettings
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

logger = logging.getLogger(__name__)

QUARANTINE_SECONDS = 86_400.0
"""How long a damaged file is kept for people to look at."""
CANDIDATES_MIN = 1024
"""Of one directory, so that a scan is good for some evictions where many share the memory of one pool's."""
_FOR_ALL = 0o666
_POLICIES = {EvictionPolicy.LRU: "lru", EvictionPolicy.COST_AWARE: "cost"}


@dataclass(slots=True)
class _Caretaker:
    """The care of one directory."""

    settings: CareSettings
    book: Book
    care: Care
    stopped: threading.Event
    thread: threading.Thread

    def change(self, settings: CareSettings) -> None:
        if settings != self.settings:
            self.settings = settings
            self.care.change(settings)


class Caretakers:
    """The care of one pool.

    Args:
        interval_seconds: between two rounds of each loop.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._caretakers: dict[str, _Caretaker] = {}
        self._ending: list[threading.Thread] = []
        self.problems: dict[str, str] = {}
        """Sentences by directory that cannot be cared for."""

    def tend(self, directories: Iterable[str], pool: KVCachePool, *, others_bytes: int) -> None:
        """Care for these directories and no others, as the pool's spec says now.

        Args:
            others_bytes: what other pools hold on the same filesystem.

        Raises:
            OSError: the filesystem does not tell how full it is.
        """
        wanted = list(directories)
        self._end([name for name in self._caretakers if name not in wanted])
        self.problems = {}
        for directory, settings in self._settings(wanted, pool, others_bytes).items():
            _let_pods_write_record(directory)
            if directory in self._caretakers:
                self._caretakers[directory].change(settings)
            else:
                self._start(directory, settings)

    def snapshots(self) -> list[Snapshot]:
        """Return what each directory's care knows; any thread."""
        return [caretaker.book.snapshot() for caretaker in list(self._caretakers.values())]

    def stop(self, timeout_seconds: float = 0.0) -> bool:
        """End all care; return whether every loop ended in time. One that sits on a hung disk is left alone."""
        return self._end(list(self._caretakers), timeout_seconds)

    def have_ended(self, timeout_seconds: float) -> bool:
        """Return whether no care that was told to end is still at work; wait for it at most so long."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        return not self._ending

    def _settings(self, directories: list[str], pool: KVCachePool, others_bytes: int) -> dict[str, CareSettings]:
        spec = pool.spec
        capacity = spec.storage.capacity_per_node_bytes or 0
        holdings = {name: self._holding(name, capacity) for name in directories}
        limits = share(capacity, holdings)
        budgets = divide(spec.write_budget_per_day_bytes, limits)
        used = {name: holding.used_bytes or 0 for name, holding in holdings.items()}
        free = free_bytes(directories[0]) if directories else 0
        floors = keep_free(spec.storage.min_free_bytes, free_bytes=free, used=used, others_bytes=others_bytes)
        general = CareSettings(
            pool_directory="",
            capacity_bytes=1,
            high=spec.eviction.high_watermark_percent / 100,
            low=spec.eviction.low_watermark_percent / 100,
            min_free_bytes=0,
            write_budget_bytes=0,
            policy=_POLICIES[spec.eviction.policy],
            scrub_bytes_per_second=-(-spec.integrity.scrub_bytes_per_second // max(1, len(directories))),
            unused_seconds=float(spec.eviction.unused_after_seconds),
            quarantine_seconds=QUARANTINE_SECONDS,
            require_mount=False,
            interval_seconds=self._interval_seconds,
            candidates_max=max(CANDIDATES_MIN, CANDIDATES_MAX // max(1, len(directories))),
        )
        return {
            name: replace(
                general,
                pool_directory=name,
                capacity_bytes=limits[name],
                min_free_bytes=floors[name],
                write_budget_bytes=budgets[name],
            )
            for name in directories
        }

    def _holding(self, directory: str, capacity_bytes: int) -> Holding:
        """Return what a directory has; pods can write the record of it, so no number in it is taken as it is."""
        caretaker = self._caretakers.get(directory)
        if caretaker is not None:
            used, limit = caretaker.book.snapshot().levels.used_bytes, caretaker.settings.capacity_bytes
            return Holding(None if used is None else min(used, limit), limit)
        usage = UsageLedger(directory).usage()
        if usage is None:
            return Holding(None)
        # As before a restart: equal parts would evict what those hold who had more.
        return Holding(min(usage.used_bytes, capacity_bytes), min(usage.limit_bytes, capacity_bytes) or None)

    def _start(self, directory: str, settings: CareSettings) -> None:
        try:
            pool = open_pool(directory, create=True)
            book, stopped = Book(settings), threading.Event()
            care = Care(settings=settings, pool=pool, book=book, stopped=stopped)
        except (PyKVCacheError, OSError) as error:
            self.problems[directory] = str(error)
            return
        # The name stands in the log: lines of care do not say which pool they are about.
        thread = threading.Thread(target=care.run, name=f"care of {directory}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: nothing may wait for one that never ran
            self.problems[directory] = f"{error}. The node agent has too many threads; raise the limit of processes."
            return
        self._caretakers[directory] = _Caretaker(settings, book, care, stopped, thread)
        logger.info("caring for %s", directory)

    def _end(self, directories: list[str], timeout_seconds: float = 0.0) -> bool:
        ended = [self._caretakers.pop(directory) for directory in directories]
        for caretaker in ended:
            caretaker.stopped.set()
        for caretaker in ended:
            caretaker.thread.join(timeout_seconds)
        threads = (*self._ending, *(caretaker.thread for caretaker in ended))
        self._ending = [thread for thread in threads if thread.is_alive()]
        return not any(caretaker.thread.is_alive() for caretaker in ended)


def _let_pods_write_record(directory: str) -> None:
    """Make the record of the fill level writable for pods of any user, also one that care had to begin anew."""
    try:
        record = os.open(
            os.path.join(directory, USAGE_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return
    try:
        status = os.fstat(record)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & _FOR_ALL != _FOR_ALL:
            os.fchmod(record, _FOR_ALL)
    except OSError:
        return  # read-only: then nobody stores
    finally:
        os.close(record)
