"""What `pykvcache inspect` shows of a pool, once or again and again: rows, the table for people, the JSON for programs.

Reads each fingerprint's config.json and nothing else; the walk over the blocks is the caller's.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from pykvcache_cli.console import format_age, printable
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import FORMAT_VERSION
from pykvcache_contract.units import format_size
from pykvcache_storage import fingerprints
from pykvcache_storage.inventory import FingerprintSummary, Tally
from pykvcache_storage.pool import Pool
from pykvcache_storage.usage import Usage

DAY_SECONDS = 86_400
_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One fingerprint: what its folder holds and what its config.json says.

    Args:
        fingerprint: whole; None if config.json does not tell it, and `problem` then says why.
    """

    summary: FingerprintSummary
    fingerprint: Fingerprint | None
    model: str
    problem: str

    def is_wanted(self, digits: str) -> bool:
        """Return whether the fingerprint begins with these digits; every one does with none."""
        return (self.fingerprint or self.summary.directory).startswith(digits.lower())


def describe(pool: Pool, summary: FingerprintSummary) -> Row:
    """Return a row for what a walk found of one fingerprint."""
    found = fingerprints.describe(pool.directory, summary.directory)
    return Row(summary, found.fingerprint, found.model, found.problem)


def count_blocks(rows: list[Row]) -> int:
    """Return the number of blocks in all rows."""
    return sum(row.summary.blocks.count for row in rows)


def sum_bytes(rows: list[Row]) -> int:
    """Return the bytes of the blocks in all rows."""
    return sum(row.summary.blocks.size_bytes for row in rows)


# ---- for people ----


def make_table(pool: Pool, rows: list[Row], *, now: float | None = None) -> Table:
    """Return the table; `now` (Unix time) is what ages count from."""
    table = Table(title=escape(printable(f"Pool {pool.directory}")), title_justify="left")
    for name in ("fingerprint", "model"):
        table.add_column(name, overflow="fold")
    for name in ("blocks", "size", "oldest", "newest"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ranks", "temporary", "quarantined"):
        table.add_column(name)
    now = time.time() if now is None else now
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in _cells(row, now)))
    return table


def total_text(rows: list[Row], usage: Usage | None) -> str:
    """Return how much there is, and how full the pool is by its ledger."""
    return f"Total: {count_blocks(rows)} blocks, {format_size(sum_bytes(rows))}; {used_text(usage)}."


def used_text(usage: Usage | None) -> str:
    """Return the ledger's number, against the limit that the sidecar sets if there is one."""
    if usage is None:
        return "no fill level recorded yet"
    counted = f"{format_size(usage.used_bytes)} counted against the capacity"
    if not usage.limit_bytes:
        return counted
    return f"{counted}, {format_size(usage.limit_bytes)} allowed ({usage.used_bytes / usage.limit_bytes:.0%})"


def written_text(usage: Usage | None, now: float) -> str:
    """Return what was written today (UTC) against the write budget; empty if the ledger does not tell."""
    if usage is None:
        return ""
    written = f"written today {format_size(written_today(usage, now))}"
    return f"{written} of {format_size(usage.write_budget_bytes)}" if usage.write_budget_bytes else written


def written_today(usage: Usage, now: float) -> int:
    """Return the bytes reserved today; a record of an earlier day says nothing about today.

    >>> written_today(Usage(written_day=1, written_bytes=7), 86_400.0)
    7
    >>> written_today(Usage(written_day=1, written_bytes=7), 2 * 86_400.0)
    0
    """
    return usage.written_bytes if usage.written_day >= int(now // DAY_SECONDS) else 0


def _cells(row: Row, now: float) -> list[str]:
    summary = row.summary
    return [
        summary.directory,
        row.model,
        str(summary.blocks.count),
        format_size(summary.blocks.size_bytes),
        *(
            format_age(None if seconds is None else now - seconds)
            for seconds in (summary.blocks.oldest_seconds, summary.blocks.newest_seconds)
        ),
        _format_ranks(summary.ranks),
        _format_files(summary.temporaries),
        _format_files(summary.quarantined),
    ]


def _format_ranks(ranks: dict[int, Tally]) -> str:
    shown = [f"r{rank}: {ranks[rank].count}" for rank in sorted(ranks)[:_RANKS_SHOWN]]
    return ", ".join(shown) + (f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else "")


def _format_files(tally: Tally) -> str:
    return f"{tally.count} ({format_size(tally.size_bytes)})" if tally.count else "0"


# ---- for programs ----


def as_document(pool: Pool, rows: list[Row], usage: Usage | None, *, now: float) -> dict[str, Any]:
    """Return what is known of a pool, as JSON shows it. Limits are null where none is set or known."""
    return {
        "pool": printable(pool.directory),
        "uid": pool.uid,
        "created": pool.created,
        "format_version": FORMAT_VERSION,
        "writable": pool.writable,
        "used_bytes": usage and usage.used_bytes,
        "limit_bytes": (usage and usage.limit_bytes) or None,
        "written_bytes": usage and written_today(usage, now),
        "write_budget_bytes": (usage and usage.write_budget_bytes) or None,
        "blocks": count_blocks(rows),
        "size_bytes": sum_bytes(rows),
        "fingerprints": [_row_document(row) for row in rows],
    }


def _row_document(row: Row) -> dict[str, Any]:
    document = asdict(row.summary)
    document["ranks"] = {str(rank): asdict(row.summary.ranks[rank]) for rank in sorted(row.summary.ranks)}
    return {**document, "fingerprint": row.fingerprint, "model": row.model, "problem": row.problem or None}
