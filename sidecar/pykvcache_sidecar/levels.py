"""What the usage ledger and the filesystem say of a pool, for people and for decisions. Reads only."""

import os
from collections.abc import Callable

from pykvcache_sidecar.book import Levels
from pykvcache_storage.usage import Usage, UsageLedger

_DAY_SECONDS = 86_400


def settled_count(usage: Usage | None, *, mark: int, counted_bytes: int) -> int:
    """Return what to give `finish_recount` as counted, so that a fill level that may be right stays as it is.

    What was reserved since the mark may or may not have been counted too. So the truth lies between the count, and the
    count plus that; a fill level in between is better than either end, and else the nearer end is.

    >>> usage = Usage(used_bytes=120, added_bytes=1050)
    >>> [settled_count(usage, mark=1000, counted_bytes=counted) for counted in (60, 100, 130)]
    [60, 70, 80]
    """
    if usage is None or usage.added_bytes < mark:
        return counted_bytes
    added = usage.added_bytes - mark
    return min(max(usage.used_bytes, counted_bytes), counted_bytes + added) - added


def free_bytes(directory: str) -> int:
    """Return what the filesystem has for users without privileges."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def read_levels(
    directory: str, ledger: UsageLedger, clock: Callable[[], float], *, allowed_bytes: int | None = None
) -> Levels:
    """Return what the ledger and the filesystem say.

    Args:
        allowed_bytes: None for what the ledger allows, which is unknown where it holds no limit.
    """
    usage = ledger.usage()
    if usage is None:
        return Levels(allowed_bytes=allowed_bytes, free_bytes=free_bytes(directory))
    is_today = usage.written_day >= int(clock() // _DAY_SECONDS)
    return Levels(
        used_bytes=usage.used_bytes,
        allowed_bytes=(usage.limit_bytes or None) if allowed_bytes is None else allowed_bytes,
        free_bytes=free_bytes(directory),
        write_budget_bytes=usage.write_budget_bytes,
        written_bytes=usage.written_bytes if is_today else 0,
    )
