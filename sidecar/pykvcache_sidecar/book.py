"""What the sidecar knows about its pool, for whoever asks over HTTP: one place, written by the threads that work.

The threads that care and scrub write, HTTP threads take snapshots. Counters last as long as the process; what a scan
found lasts until the next one and follows evictions meanwhile. One lock guards everything and is held for microseconds.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pykvcache_contract.metrics import EVICTION_REASONS
from pykvcache_sidecar.settings import CareSettings

ROUND = "round"
SCAN = "scan"
REMOVAL = "removal"
"""Where something can go wrong: a round that failed, a scan that missed a part, files that cannot be removed."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What the ledger and the filesystem say.

    Args:
        used_bytes: None if unknown: then a scan is due.
        allowed_bytes, free_bytes, write_budget_bytes, written_bytes: None if unknown, as all are while the pool is not
            there.
    """

    used_bytes: int | None = None
    allowed_bytes: int | None = None
    free_bytes: int | None = None
    write_budget_bytes: int | None = None
    written_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FingerprintRow:
    """The blocks of one fingerprint, as the last scan found them, less what was evicted since."""

    directory: str
    model: str
    blocks: int
    size_bytes: int
    newest_seconds: float | None
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class ScanRow:
    """The last scan; all zero before the first."""

    ended_seconds: float = 0.0
    duration_seconds: float = 0.0
    files: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment.

    Args:
        state: one of the contract's `POOL_STATES`.
        reason: why it does not work, or a remark; for people.
        evicted_blocks, evicted_bytes: by reason.
        tick_age_seconds: since the caring thread came round last.
        problems: sentences by `ROUND`, `SCAN` and `REMOVAL`; those that last.
    """

    pool: str
    uid: str = ""
    state: str = "starting"
    reason: str = ""
    levels: Levels = field(default_factory=Levels)
    fingerprints: tuple[FingerprintRow, ...] = ()
    scan: ScanRow = field(default_factory=ScanRow)
    evicted_blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTION_REASONS, 0))
    evicted_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVICTION_REASONS, 0))
    last_evicted_age_seconds: float = 0.0
    swept_files: int = 0
    dropped_fingerprints: int = 0
    scrubbed_blocks: int = 0
    scrubbed_bytes: int = 0
    damaged_blocks: int = 0
    failed_removals: int = 0
    tick_age_seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def last_error(self) -> str:
        """Return what goes wrong, in sentences; empty if nothing does."""
        return "; ".join(self.problems.values())

    @property
    def is_active(self) -> bool:
        """Return whether this sidecar is the one that works."""
        return self.state == "working"

    @property
    def is_ready(self) -> bool:
        """Return whether the pool is there and cared for, by this sidecar or another."""
        return self.state in {"working", "standby"}


class Book:
    """The current snapshot and the ways it changes.

    Args:
        settings: for what is configured.
        monotonic: for the age of the last tick.
    """

    def __init__(self, settings: CareSettings, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._now = Snapshot(settings.pool_directory)
        self._ticked = monotonic()

    def snapshot(self) -> Snapshot:
        """Return everything at this moment; what it holds never changes."""
        with self._lock:
            return replace(self._now, tick_age_seconds=self._monotonic() - self._ticked)

    def tick(self) -> None:
        """Note that the caring thread came round."""
        with self._lock:
            self._ticked = self._monotonic()
        self.note_problem(ROUND, "")

    def note_error(self, error: str) -> None:
        """Note why a round failed; it counts as no tick."""
        self.note_problem(ROUND, error)

    def note_problem(self, topic: str, sentence: str) -> bool:
        """Note what goes wrong in `ROUND`, `SCAN` or `REMOVAL`, empty for nothing; return whether that begins now."""
        with self._lock:
            others = {name: text for name, text in self._now.problems.items() if name != topic}
            is_new = bool(sentence) and topic not in self._now.problems
            self._now = replace(self._now, problems={**others, topic: sentence} if sentence else others)
            return is_new

    def set_state(self, state: str, reason: str, *, uid: str) -> None:
        """Note what the pool is like."""
        with self._lock:
            self._now = replace(self._now, state=state, reason=reason, uid=uid)

    def set_levels(self, levels: Levels) -> None:
        """Note what the ledger and the filesystem say."""
        with self._lock:
            self._now = replace(self._now, levels=levels)

    def set_scan(self, scan: ScanRow, rows: Iterable[FingerprintRow]) -> None:
        """Note what a scan found."""
        with self._lock:
            self._now = replace(self._now, scan=scan, fingerprints=tuple(rows))

    def forget_scan(self) -> None:
        """Forget what a scan found and what was wrong with it: the pool may be another one now."""
        self.set_scan(ScanRow(), ())
        self.note_problem(SCAN, "")
        self.note_problem(REMOVAL, "")

    def count_evictions(self, reason: str, sizes_bytes: dict[str, list[int]], *, age_seconds: float | None) -> None:
        """Count files removed for one reason.

        Args:
            sizes_bytes: of the files, by fingerprint's folder.
            age_seconds: since the last use of the last one; None if it says nothing about the pool's size.
        """
        with self._lock:
            now = self._now
            count = sum(len(sizes) for sizes in sizes_bytes.values())
            total = sum(sum(sizes) for sizes in sizes_bytes.values())
            self._now = replace(
                now,
                evicted_blocks={**now.evicted_blocks, reason: now.evicted_blocks[reason] + count},
                evicted_bytes={**now.evicted_bytes, reason: now.evicted_bytes[reason] + total},
                last_evicted_age_seconds=now.last_evicted_age_seconds if age_seconds is None else age_seconds,
            )

    def take_off(self, sizes_bytes: dict[str, list[int]]) -> None:
        """Take blocks that are gone off what the last scan found; `sizes_bytes` is by fingerprint's folder."""
        with self._lock:
            rows = tuple(_less(row, sizes_bytes.get(row.directory, [])) for row in self._now.fingerprints)
            self._now = replace(self._now, fingerprints=rows)

    def count_failed_removals(self, files: int) -> None:
        """Count files that should have left and could not be removed."""
        with self._lock:
            self._now = replace(self._now, failed_removals=self._now.failed_removals + files)

    def count_sweep(self, files: int) -> None:
        """Count temporary files of dead writers that were removed."""
        with self._lock:
            self._now = replace(self._now, swept_files=self._now.swept_files + files)

    def count_dropped(self, directory: str) -> None:
        """Count a fingerprint that is gone."""
        with self._lock:
            now = self._now
            rows = tuple(row for row in now.fingerprints if row.directory != directory)
            self._now = replace(now, fingerprints=rows, dropped_fingerprints=now.dropped_fingerprints + 1)

    def count_scrubbed(self, size_bytes: int, *, damaged: bool) -> None:
        """Count a block that was read and verified."""
        with self._lock:
            now = self._now
            self._now = replace(
                now,
                scrubbed_blocks=now.scrubbed_blocks + 1,
                scrubbed_bytes=now.scrubbed_bytes + size_bytes,
                damaged_blocks=now.damaged_blocks + damaged,
            )


def _less(row: FingerprintRow, sizes: list[int]) -> FingerprintRow:
    blocks = max(0, row.blocks - len(sizes))
    if not blocks:
        return replace(row, blocks=0, size_bytes=0, newest_seconds=None, oldest_seconds=None)
    return replace(row, blocks=blocks, size_bytes=max(0, row.size_bytes - sum(sizes)))
