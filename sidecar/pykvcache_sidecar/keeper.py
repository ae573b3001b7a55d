"""The work on a pool, from the moment this sidecar may do it to the moment it may not: one object for each such time.

A round sets the limits in the usage ledger, then evicts what the plan says, then sweeps; scans and scrubs run on
threads beside it. A scan runs at the start, then every hour, sooner if blocks were stored since, and when the batch of
candidates ran out while room is needed. Its count goes into the ledger only where the ledger cannot be right: a recount
errs upwards by what was stored during a minute or two, and evictions would throw that much away each time.

Belongs to the caring thread. Raises `PyKVCacheError` where the pool refuses; the next round looks again.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable

from pykvcache_contract.errors import CapacityError
from pykvcache_contract.units import format_size
from pykvcache_sidecar.book import REMOVAL, SCAN, Book, FingerprintRow, ScanRow
from pykvcache_sidecar.clocks import CautiousClock
from pykvcache_sidecar.costs import read_costs
from pykvcache_sidecar.evictor import Evictor, Shift
from pykvcache_sidecar.levels import free_bytes, read_levels, settled_count
from pykvcache_sidecar.limits import REFUSED, Plan, Room, decide
from pykvcache_sidecar.pending import Pending
from pykvcache_sidecar.policy import make_policy
from pykvcache_sidecar.refusals import Refusals
from pykvcache_sidecar.scan import Batch, Scan, Scanner, ScanResult
from pykvcache_sidecar.scrubber import Scrubber
from pykvcache_sidecar.settings import CareSettings
from pykvcache_sidecar.watch import access_remedy
from pykvcache_storage.fingerprints import describe, touched_seconds
from pykvcache_storage.inventory import FingerprintSummary, fingerprint_directories
from pykvcache_storage.pool import Pool
from pykvcache_storage.recovery import sweep
from pykvcache_storage.removal import Remover
from pykvcache_storage.usage import Usage, UsageLedger

logger = logging.getLogger(__name__)

SCAN_SECONDS_MAX = 3600.0
SCAN_SECONDS_MIN = 60.0
SCAN_RATIO = 20.0
"""A scan of a pool in which blocks were stored since is repeated after so many times its duration, within the bounds:
people see what is stored by then, and a core is busy with it for a hundredth of its time."""
RESCAN_SECONDS_MIN = 10.0
RESCAN_RATIO = 10.0
"""A scan that led to no removal is not repeated before ten times its duration: room is needed, and there is none."""
SWEEP_SECONDS = 60.0
MODEL_LETTERS_MAX = 200
"""Of a model's name in metrics."""


class Keeper:
    """Works on one pool until it is closed.

    Args:
        stopped: set when the process is asked to end; every loop looks at it.
        clock: Unix time, which may jump.
        monotonic: seconds that never jump.
    """

    def __init__(
        self,
        *,
        settings: CareSettings,
        pool: Pool,
        book: Book,
        stopped: threading.Event,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.uid = pool.uid
        self._settings = settings
        self._directory = pool.directory
        self._book = book
        self._stopped = stopped
        self._clock = clock
        self._monotonic = monotonic
        self._ages = CautiousClock(clock, monotonic)
        self._ledger = UsageLedger(pool.directory, clock=clock)
        self._refusals = Refusals(self._ledger, monotonic=monotonic)
        self._pending = Pending(monotonic=monotonic)
        remover = Remover(pool.directory, self._ledger)
        self._scanner = Scanner(self._begin_scan, monotonic=monotonic)
        self._evictor = Evictor(
            pool_directory=pool.directory,
            remover=remover,
            book=book,
            clock=self._ages,
            has_passed=self._scanner.has_passed,
        )
        self._scrubber = Scrubber(
            pool_directory=pool.directory,
            remover=remover,
            book=book,
            bytes_per_second=settings.scrub_bytes_per_second,
            monotonic=monotonic,
        )
        self._evicting_for = ""
        self._evicted_since_scan = 0
        self._is_batch_fresh = False
        self._scan_due = self._sweep_due = monotonic()
        self._rescan_due = self._refresh_due = self._scan_due
        self._added_at_scan = 0
        self._counted_bytes: int | None = None
        self._block_bytes = 0
        self._scrubber.start()

    def follow(self, settings: CareSettings) -> bool:
        """Work with these settings from now on; return False if that takes another keeper."""
        rate, former = settings.scrub_bytes_per_second, self._settings.scrub_bytes_per_second
        if bool(rate) != bool(former):
            return False
        if rate != former:
            self._scrubber.pace(rate)
        self._settings = settings
        return True

    def work(self) -> bool:
        """Do one round; return whether there is more to do at once.

        Raises:
            PyKVCacheError: the pool refuses.
        """
        shift = Shift(self._stopped, monotonic=self._monotonic)
        self._take_scan()
        usage = self._ledger.usage()
        plan = self._decide(usage)
        self._limit(plan)
        evicted = self._evict(plan, shift)
        self._evictor.take_down_unused(self._settings.unused_seconds, shift)
        self._tell_attempts()
        self._sweep()
        if usage is not None and usage.added_bytes != self._added_at_scan:
            self._scan_due = min(self._scan_due, self._refresh_due)
        is_needed = usage is None or (plan.evict_bytes > evicted and not self._evictor.has_candidates)
        if self._scan_if_due(is_needed=is_needed):
            self._added_at_scan = 0 if usage is None else usage.added_bytes
        self._book.set_levels(read_levels(self._directory, self._ledger, self._clock, allowed_bytes=plan.allowed_bytes))
        return (plan.evict_bytes > evicted and self._evictor.has_candidates) or self._evictor.has_unused

    def close(self, timeout_seconds: float = 0.0) -> None:
        """End scan and scrub at their next step, and wait for each at most so long."""
        self._scanner.stop(timeout_seconds)
        self._scrubber.stop(timeout_seconds)
        self._evictor.close()

    # ---- limits and eviction ----

    def _decide(self, usage: Usage | None) -> Plan:
        free = free_bytes(self._directory)
        room = Room(
            # A full disk may have no room for a new record either: then what the last scan counted must do.
            used_bytes=self._counted_bytes if usage is None else usage.used_bytes,
            free_bytes=free,
            capacity_bytes=self._settings.capacity_bytes,
            min_free_bytes=self._settings.min_free_bytes,
            high=self._settings.high,
            low=self._settings.low,
            is_evicting=bool(self._evicting_for),
            refused_bytes=0 if usage is None else self._refusals.heed(usage.refused_bytes),
            block_bytes=self._block_bytes,
            pending_bytes=self._pending.bytes_at(free),
        )
        plan = decide(room)
        if room.refused_bytes and not plan.evict_bytes:
            has_evicted = self._evicting_for == REFUSED
            self._refusals.settle(
                refused_bytes=room.refused_bytes, used_bytes=room.used_bytes or 0, has_evicted=has_evicted
            )
        if plan.evict_bytes and not self._evicting_for:
            logger.info("evicting %s, reason: %s", format_size(plan.evict_bytes), plan.reason)
        self._evicting_for = plan.reason
        return plan

    def _limit(self, plan: Plan) -> None:
        """Tell the writers what the pool may take."""
        budget = self._settings.write_budget_bytes
        try:
            self._ledger.set_limits(capacity_bytes=plan.allowed_bytes, write_budget_bytes=budget)
        except CapacityError as error:
            # Copy-on-write filesystems need room to change a byte; making room comes first then.
            logger.debug("the limits could not be set on a full disk: %s", error)

    def _evict(self, plan: Plan, shift: Shift) -> int:
        free = free_bytes(self._directory)
        quarantine_seconds = self._settings.quarantine_seconds
        evicted = self._evictor.remove_quarantined(quarantine_seconds, goal_bytes=plan.evict_bytes, shift=shift)
        if plan.evict_bytes > evicted:
            evicted += self._evictor.evict(plan.evict_bytes - evicted, plan.reason, shift)
        self._evicted_since_scan += evicted
        self._pending.note(evicted, free_before=free)
        if self._counted_bytes is not None:
            self._counted_bytes = max(0, self._counted_bytes - evicted)
        return evicted

    def _tell_attempts(self) -> None:
        """Say so where nothing of what should leave can be removed, until something was, or nothing should."""
        attempts = self._evictor.take_attempts()
        self._book.count_failed_removals(attempts.failed)
        if attempts.failed and not attempts.removed:
            self._is_batch_fresh = False
            self._scan_due = min(self._scan_due, self._refresh_due)
            self._complain(
                REMOVAL,
                f"files that should leave cannot be removed, the last of them {attempts.failed_path}: they are "
                f"somebody else's, or the disk refuses (see dmesg). {access_remedy(self._directory)}",
            )
        elif attempts.removed or self._is_batch_fresh:
            self._book.note_problem(REMOVAL, "")

    def _complain(self, topic: str, sentence: str) -> None:
        if self._book.note_problem(topic, sentence):
            logger.warning("%s", sentence)

    # ---- scans ----

    def _begin_scan(self) -> Scan:
        mark = self._ledger.begin_recount()
        costs = read_costs(self._directory) if self._settings.policy == "cost" else {}
        policy = make_policy(self._settings.policy, costs, now_ns=int(self._clock() * 1e9))
        return Scan(self._directory, Batch(policy, self._settings.candidates_max), mark)

    def _scan_if_due(self, *, is_needed: bool) -> bool:
        self._scanner.set_hurry(is_needed)
        if self._scanner.is_running:
            return False
        now = self._monotonic()
        is_due = now >= self._scan_due or (is_needed and (self._evicted_since_scan or now >= self._rescan_due))
        if is_due:
            self._evicted_since_scan = 0
            self._scanner.start(hurry=is_needed)
        return bool(is_due)

    def _take_scan(self) -> None:
        has_ended, result = self._scanner.take()
        if not has_ended:
            return
        behind, self._evictor.removed_behind_scan = self._evictor.removed_behind_scan, defaultdict(list)
        now = self._monotonic()
        duration = 0.0 if result is None else result.duration_seconds
        self._rescan_due = now + max(RESCAN_SECONDS_MIN, RESCAN_RATIO * duration)
        self._scan_due = now + SCAN_SECONDS_MAX if result is not None else self._rescan_due
        self._refresh_due = now + max(SCAN_SECONDS_MIN, SCAN_RATIO * duration)
        if result is not None and result.unread:
            self._scan_due = self._refresh_due
        self._tell_unread({} if result is None else result.unread)
        if result is not None:
            self._use_scan(result, behind)

    def _tell_unread(self, unread: dict[str, str]) -> None:
        if self._scanner.error:
            self._complain(SCAN, f"the pool could not be scanned, so nothing new is evicted: {self._scanner.error}")
        elif unread:
            folder, error = next(iter(unread.items()))
            others = f" and of {len(unread) - 1} more" if len(unread) > 1 else ""
            self._complain(
                SCAN,
                f"a part of {folder}{others} cannot be read, so what lies there is not counted and stays: {error}. "
                f"{access_remedy(self._directory)} If it is the disk (see dmesg), remove the folder.",
            )
        else:
            self._book.note_problem(SCAN, "")

    def _use_scan(self, result: ScanResult, behind: dict[str, list[int]]) -> None:
        self._block_bytes = max((file.size_bytes for file in result.candidates), default=0)
        if not result.unread:
            self._count(result, behind)
        rows = [_row(self._directory, summary) for summary in result.summaries]
        self._book.set_scan(ScanRow(self._clock(), result.duration_seconds, result.files), rows)
        self._book.take_off(behind)
        whole = [summary for summary in result.summaries if summary.directory not in result.unread]
        unused = [summary.directory for summary in whole if self._is_unused(summary)]
        self._evictor.load(candidates=result.candidates, quarantined=result.quarantined, unused=unused)
        self._is_batch_fresh = True

    def _count(self, result: ScanResult, behind: dict[str, list[int]]) -> None:
        counted = self._counted_bytes = result.counted_bytes - sum(sum(sizes) for sizes in behind.values())
        settled = settled_count(self._ledger.usage(), mark=result.mark, counted_bytes=counted)
        try:
            self._ledger.finish_recount(result.mark, counted_bytes=settled)
        except CapacityError as error:
            logger.debug("the count could not be written on a full disk: %s", error)

    def _is_unused(self, summary: FingerprintSummary) -> bool:
        if not self._settings.unused_seconds:
            return False
        limit = self._ages() - self._settings.unused_seconds
        newest = summary.blocks.newest_seconds or 0.0
        return newest <= limit and touched_seconds(self._directory, summary.directory) <= limit

    # ---- sweeps ----

    def _sweep(self) -> None:
        if self._monotonic() < self._sweep_due:
            return
        self._sweep_due = self._monotonic() + SWEEP_SECONDS
        for name in fingerprint_directories(self._directory):
            if self._stopped.is_set():
                return
            try:
                report = sweep(self._directory, name, clock=self._ages)
            except OSError as error:
                logger.warning("temporary files of dead writers could not be removed: %s", error)
                continue
            if report.removed:
                self._book.count_sweep(report.removed)
                # What they had reserved is still counted; only a recount knows how much that was.
                self._scan_due = min(self._scan_due, self._rescan_due)
                logger.info("removed temporary files of dead writers: %d", report.removed)


def _row(pool_directory: str, summary: FingerprintSummary) -> FingerprintRow:
    blocks = summary.blocks
    model = describe(pool_directory, summary.directory).model[:MODEL_LETTERS_MAX]
    return FingerprintRow(
        directory=summary.directory,
        # Whoever may write to the pool chose it: one surrogate would keep all metrics from being encoded.
        model=model.encode(errors="replace").decode(),
        blocks=blocks.count,
        size_bytes=blocks.size_bytes,
        newest_seconds=blocks.newest_seconds,
        oldest_seconds=blocks.oldest_seconds,
    )
