"""The answer to GET /status: one JSON object, sizes in bytes, times in Unix seconds. Pure; no side effects."""

from typing import Any

from pykvcache_sidecar.book import FingerprintRow, Snapshot
from pykvcache_sidecar.settings import CareSettings

FINGERPRINT_ROWS_MAX = 256
"""Most fingerprints listed, those with most bytes; the totals hold all of them."""


def status_document(now: Snapshot, settings: CareSettings) -> dict[str, Any]:
    """Return what GET /status answers."""
    levels = now.levels
    return {
        "pool": now.pool,
        "uid": now.uid,
        "state": now.state,
        "reason": "; ".join(filter(None, (now.reason, now.last_error))),
        "active": now.is_active,
        "capacity_bytes": settings.capacity_bytes,
        "allowed_bytes": levels.allowed_bytes,
        "used_bytes": levels.used_bytes,
        "free_bytes": levels.free_bytes,
        "min_free_bytes": settings.min_free_bytes,
        "blocks": sum(row.blocks for row in now.fingerprints),
        "size_bytes": sum(row.size_bytes for row in now.fingerprints),
        "fingerprints": [_row(row) for row in by_size(now.fingerprints)[:FINGERPRINT_ROWS_MAX]],
        "scan": {
            "ended_seconds": now.scan.ended_seconds,
            "duration_seconds": now.scan.duration_seconds,
            "files": now.scan.files,
        },
        "evicted": {
            "blocks": sum(now.evicted_blocks.values()),
            "bytes": sum(now.evicted_bytes.values()),
            "last_age_seconds": now.last_evicted_age_seconds,
        },
        "scrub": {"blocks": now.scrubbed_blocks, "bytes": now.scrubbed_bytes, "damaged": now.damaged_blocks},
        "write_budget": {"bytes_per_day": levels.write_budget_bytes, "written_bytes": levels.written_bytes},
    }


def by_size(rows: tuple[FingerprintRow, ...]) -> list[FingerprintRow]:
    """Return the rows, those with most bytes first."""
    return sorted(rows, key=lambda row: (-row.size_bytes, row.directory))


def _row(row: FingerprintRow) -> dict[str, Any]:
    return {
        "directory": row.directory,
        "model": row.model,
        "blocks": row.blocks,
        "size_bytes": row.size_bytes,
        "newest_seconds": row.newest_seconds,
        "oldest_seconds": row.oldest_seconds,
    }
