"""What became of a worker's blocks: counted for metrics, collected for the scheduler.

Called from vLLM's thread and the reactor's; `_lock` guards all fields but the counts, which guard themselves.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache_connector.messages import POOL_FULL, UNAVAILABLE, WorkerReport
from pykvcache_connector.stats import Counts
from pykvcache_connector.worker.jobs import Block
from pykvcache_contract import metrics
from pykvcache_contract.errors import (
    BlockMissingError,
    CapacityError,
    CorruptBlockError,
    PyKVCacheError,
    ReadOnlyError,
)
from pykvcache_storage.block import Quarantined
from pykvcache_storage.publish import Published
from pykvcache_storage.reactor.reactor import ReactorState

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Declined:
    """A store that was passed over on purpose after its copy; `reason` is one of the metric's."""

    reason: str


class _ActiveTime:
    """Adds up the time during which at least one task is running."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def enter(self) -> None:
        if not self._count:
            self._since = time.monotonic()
        self._count += 1

    def leave(self) -> None:
        self._count -= 1

    def take(self) -> float:
        """Return the active seconds since the last call; call it before `enter` and after `leave`."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return seconds


class Outcomes:
    """Counts and reports of one worker.

    Args:
        rank: label of the gauges.
    """

    def __init__(self, counts: Counts, *, rank: int) -> None:
        self.counts = counts
        self._rank = str(rank)
        self._lock = threading.Lock()
        self._report = WorkerReport()
        self._news = False
        self._was_overdue = False
        self._has_write_budget = False
        self._began: dict[object, float] = {}
        self._loading, self._storing = _ActiveTime(), _ActiveTime()
        self._logged: dict[str, float] = {}

    def begin_generation(self, generation: int) -> None:
        """Void what was collected for an older fingerprint."""
        with self._lock:
            self._report = WorkerReport(generation)
            self._news = False
            if self._has_write_budget:
                self._report.has_write_budget = self._news = True

    def take_report(self) -> WorkerReport | None:
        """Return what is new for the scheduler, or None."""
        with self._lock:
            if not self._news:
                return None
            report, self._report = self._report, WorkerReport(self._report.generation)
            self._news = False
            return report

    def task_began(self, block: Block) -> None:
        """Note that a block's task has a slot."""
        self._work_began(block, is_store=block.job.is_store)

    def staging_began(self, work: object) -> None:
        """Note that a block of a two-phase load has a slot to be read into."""
        self._work_began(work, is_store=False)

    def staging_ended(self, work: object) -> None:
        """Note that a block of a two-phase load was read and verified, or was not."""
        self._work_ended(work, is_store=False)

    def staged(self, ticket: int, generation: int) -> None:
        """Note a block that waits in its slot."""
        with self._reporting(generation) as report:
            report.staged[ticket] = 1

    def declined(self, operation: str, reason: str, keys: Sequence[bytes], generation: int) -> None:
        """Note blocks passed over on purpose."""
        self.counts.add(metrics.DECLINED.name, len(keys), operation, reason)
        with self._reporting(generation) as report:
            report.dropped.update(keys)

    def write_budget(self, has_one: bool) -> None:
        """Note whether the pool limits what is written a day; told when it changes, and at each new generation."""
        with self._lock:
            if has_one is not self._has_write_budget:
                self._report.has_write_budget = self._has_write_budget = has_one
                self._news = True

    def stores_refused(self, keys: Sequence[bytes], generation: int, error: Exception) -> None:
        """Note blocks that cannot be stored for a reason that concerns them all."""
        self._store_failed(error, len(keys))
        with self._reporting(generation) as report:
            report.dropped.update(keys)

    def load_given_up(self, key: bytes, generation: int, reason: str) -> None:
        """Note a block that is recomputed because its load was not done in time; only the disk's delay is its fault."""
        self.counts.add(metrics.LOAD_FAILED.name, 1, reason)
        if reason == "timeout":
            with self._reporting(generation) as report:
                report.unreadable.add(key)

    def quarantined(self, key: bytes, generation: int, outcome: Quarantined, *, why: str) -> None:
        """Note a damaged file; one that cannot be moved aside would be found by every lookup."""
        if outcome is Quarantined.STUCK:
            with self._reporting(generation) as report:
                report.unreadable.add(key)
            self._log("damaged block, could not be moved aside: %s", why)
        elif outcome is Quarantined.MOVED:
            self.counts.add(metrics.QUARANTINED.name, 1)
            self._log("damaged block, quarantined: %s", why)

    def load_failed(self, key: bytes, generation: int, error: Exception) -> None:
        """Note a block to recompute, and that its key is a miss from now on."""
        reason = _load_reason(error)
        self.counts.add(metrics.LOAD_FAILED.name, 1, reason)
        with self._reporting(generation) as report:
            gone = reason in ("missing", "corrupt")
            (report.lost if gone else report.unreadable).add(key)
        if reason == "io":
            self._log("load failed, the block is recomputed: %s", error)

    def load_ended(self, block: Block, loaded_bytes: int) -> None:
        """Note the end of a load's task; 0 bytes if it failed or was given up."""
        self._work_ended(block, is_store=False)
        if loaded_bytes:
            self.counts.add(metrics.LOAD_BYTES.name, loaded_bytes)
            self.counts.add(metrics.LOAD_BLOCKS.name, 1)

    def store_ended(self, block: Block, generation: int, result: Any, size_bytes: int) -> None:
        """Note the end of a store's task; what became of the block is told last, so its reason never comes after it.

        Args:
            result: how it was published, why it was declined, an exception, or None if it was given up before.
        """
        seconds = self._work_ended(block, is_store=True)
        if result is Published.FIRST:
            self.counts.add(metrics.STORE_BYTES.name, size_bytes)
            self.counts.add(metrics.STORE_BLOCKS.name, 1)
            self.counts.observe(metrics.STORE_DURATION.name, seconds)
        elif isinstance(result, Declined):
            self._store_declined(result.reason, is_repeated=block.is_repeated)
        elif isinstance(result, Exception):
            self._store_failed(result)
        with self._reporting(generation) as report:
            if isinstance(result, Published):
                report.stored[block.key] = 1
            else:
                report.dropped.add(block.key)

    def check_overdue(self, limit_seconds: float) -> None:
        """Tell the scheduler while a task has been running for longer than a load may take: the disk hangs.

        Told in every step while it lasts, because of other ranks, and once when it is over.
        """
        with self._lock:
            oldest = next(iter(self._began.values()), None)
            is_overdue = oldest is not None and time.monotonic() - oldest > limit_seconds
            if is_overdue or self._was_overdue:
                self._report.is_stalled, self._news = is_overdue, True
            self._was_overdue = is_overdue

    def record_load(self, state: ReactorState) -> None:
        """Set the gauges of staging use and queues, and bring active times up to now."""
        self.counts.set(metrics.STAGING_USED.name, state.slots_used, self._rank)
        self.counts.set(metrics.QUEUE_DEPTH.name, state.tasks_waiting, self._rank)
        self.counts.set(metrics.IN_FLIGHT.name, state.operations_in_flight, self._rank)

    def job_ended(self, seconds: float) -> None:
        """Note the duration of a request's load."""
        self.counts.observe(metrics.LOAD_DURATION.name, seconds)

    def _work_began(self, work: object, *, is_store: bool) -> None:
        with self._lock:
            self._began[work] = time.monotonic()
            self._active(is_store, entering=True)

    def _work_ended(self, work: object, *, is_store: bool) -> float:
        """Return the seconds since it began; 0 if it never did, or has ended before."""
        with self._lock:
            began = self._began.pop(work, None)
            if began is None:
                return 0.0
            self._active(is_store, entering=False)
            return time.monotonic() - began

    def _active(self, is_store: bool, *, entering: bool) -> None:
        clock, metric = (self._storing, metrics.STORE_ACTIVE) if is_store else (self._loading, metrics.LOAD_ACTIVE)
        if entering:
            clock.enter()
        else:
            clock.leave()
            self.counts.add(metric.name, clock.take())

    @contextlib.contextmanager
    def _reporting(self, generation: int) -> Iterator[WorkerReport]:
        """Yield the report to add news to; what concerns an older generation's blocks goes nowhere."""
        with self._lock:
            if generation == self._report.generation:
                self._news = True
                yield self._report
            else:
                yield WorkerReport(generation)

    def _store_declined(self, reason: str, *, is_repeated: bool) -> None:
        self.counts.add(metrics.DECLINED.name, 1, "store", reason)
        with self._lock:
            self._news = True
            if reason == UNAVAILABLE:
                self._report.full_reason = UNAVAILABLE
            elif is_repeated:
                self._report.is_budget_spent = True
            else:
                self._report.is_over_budget = True

    def _store_failed(self, error: Exception, count: int = 1) -> None:
        reason = _store_reason(error)
        self.counts.add(metrics.STORE_FAILED.name, count, reason)
        if reason in ("capacity", "read_only"):
            with self._lock:
                self._report.full_reason = self._report.full_reason or POOL_FULL
                self._news = True
        self._log("store dropped, the pool stays as it is: %s", error)

    def _log(self, text: str, *values: Any) -> None:
        """Log one kind of trouble at most once a minute; every case is counted."""
        now = time.monotonic()
        with self._lock:
            due = now - self._logged.get(text, -LOG_INTERVAL_SECONDS) >= LOG_INTERVAL_SECONDS
            if due:
                self._logged[text] = now
        if due:
            logger.warning(text, *values)


def _load_reason(error: Exception) -> str:
    if isinstance(error, BlockMissingError):
        return "missing"
    if isinstance(error, CorruptBlockError):
        return "corrupt"
    return "io"


def _store_reason(error: Exception) -> str:
    if isinstance(error, CapacityError):
        return "capacity"
    if isinstance(error, ReadOnlyError):
        return "read_only"
    return "io" if isinstance(error, PyKVCacheError) else "stopped"
