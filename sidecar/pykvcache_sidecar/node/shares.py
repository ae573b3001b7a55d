"""How the directories of one pool share the node's capacity, and who gives way when its disk runs short. Pure.

Facts: every namespace has a directory of its own with a limit of its own, and writers stop at it. Tenants differ: some
fill whatever they get, some leave most of it unused. A limit below what lies in a directory stops its writers until
the evictor has followed. What they mean: equal parts waste room, and a limit that falls at once stops a tenant. So

- room is shared max-min-fairly: who needs less than an equal part lends the rest to those who need more;
- who needs room is told from use: a directory asks for half as much again as it holds, so a full one asks for more
  than its limit, an idle one for less, and lending alone never makes anybody evict;
- a limit falls at most to what lies in the directory. That starts the evictor, and the next round goes on from there;
- a limit rises only into room that nobody holds. So neither the limits nor what lies in the directories is ever more
  than the capacity, except after somebody has lowered the capacity: then every limit falls at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GROWTH = 1.5
"""What a directory asks for, relative to what it holds. Between 1/0.8, where a full one would not grow any more, and
2, where an idle one would keep twice what it needs."""
SMALLEST_PART = 1 / 64
"""What an empty directory asks for, as a share of the capacity, so that its first blocks find room."""
STEADY_PART = 1 / 10
"""Limits that would all change by less than this share of themselves stay: each change is written to the disk, and what
lies in a directory goes up and down between its watermarks all the time."""
SMALLEST_LIMIT_BYTES = 1
"""Stops all stores; zero in the ledger would mean no limit."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One directory now.

    Args:
        used_bytes: what lies in it; None if that is unknown: then it counts as full.
        limit_bytes: its limit until now; None for a directory that has none yet.
    """

    used_bytes: int | None
    limit_bytes: int | None = None


def share(capacity_bytes: int, holdings: Mapping[str, Holding]) -> dict[str, int]:
    """Return each directory's limit from now on; their sum is at most the capacity, or one byte each.

    >>> share(1000, {"a": Holding(0)})
    {'a': 1000}
    >>> share(1000, {"busy": Holding(450, 500), "idle": Holding(100, 500)})
    {'busy': 762, 'idle': 237}
    """
    if not holdings:
        return {}
    equal = capacity_bytes // len(holdings)
    used = {name: _used(holding, equal) for name, holding in holdings.items()}
    goals = _goals(capacity_bytes, used)
    limits = {name: _lowered(holding, used[name], goals[name]) for name, holding in holdings.items()}
    if sum(limits.values()) > capacity_bytes:
        limits = goals
    else:
        _raise_limits(capacity_bytes, limits, used=used, goals=goals)
    steady = {name: holding.limit_bytes for name, holding in holdings.items() if holding.limit_bytes is not None}
    if _is_steady(capacity_bytes, steady, limits):
        limits = steady
    return {name: max(SMALLEST_LIMIT_BYTES, limit) for name, limit in limits.items()}


def keep_free(
    min_free_bytes: int, *, free_bytes: int, used: Mapping[str, int], others_bytes: int = 0
) -> dict[str, int]:
    """Return what each directory shall believe that the filesystem must keep free.

    All of them see the same filesystem. If each made room for the whole shortage, so many times too much would go;
    so each sees its part of it, by what it holds.

    Args:
        others_bytes: what other pools hold on this filesystem; they make room, too.

    >>> keep_free(100, free_bytes=60, used={"a": 300, "b": 100})
    {'a': 90, 'b': 70}
    >>> keep_free(100, free_bytes=101, used={"a": 300, "b": 100})
    {'a': 100, 'b': 100}
    >>> keep_free(100, free_bytes=60, used={"a": 300}, others_bytes=100)
    {'a': 90}
    """
    short = min_free_bytes - free_bytes
    total = sum(used.values()) + others_bytes
    if short <= 0 or not total:
        return dict.fromkeys(used, min_free_bytes)
    return {name: free_bytes + -(-short * held // total) for name, held in used.items()}


def divide(total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Return parts of a budget in proportion to the limits; zero stays zero, which means no limit.

    >>> divide(100, {"a": 300, "b": 100}), divide(0, {"a": 1})
    ({'a': 75, 'b': 25}, {'a': 0})
    """
    whole = sum(limits.values())
    return {name: max(1, total * limit // whole) if total else 0 for name, limit in limits.items()}


def _used(holding: Holding, equal: int) -> int:
    if holding.used_bytes is not None:
        return holding.used_bytes
    return equal if holding.limit_bytes is None else holding.limit_bytes


def _goals(capacity_bytes: int, used: Mapping[str, int]) -> dict[str, int]:
    """Return max-min-fair parts of the capacity; what nobody asks for is divided equally."""
    smallest = int(capacity_bytes * SMALLEST_PART)
    wishes = {name: int(size * GROWTH) + smallest for name, size in used.items()}
    parts: dict[str, int] = {}
    left = capacity_bytes
    for number, name in enumerate(sorted(wishes, key=lambda name: (wishes[name], name))):
        parts[name] = min(wishes[name], left // (len(wishes) - number))
        left -= parts[name]
    return {name: part + left // len(parts) for name, part in parts.items()}


def _lowered(holding: Holding, used: int, goal: int) -> int:
    if holding.limit_bytes is None:
        return min(goal, used)
    return min(holding.limit_bytes, max(goal, used))


def _raise_limits(
    capacity_bytes: int, limits: dict[str, int], *, used: Mapping[str, int], goals: Mapping[str, int]
) -> None:
    """Raise limits towards their goals, as far as there is room that nobody holds."""
    room = capacity_bytes - sum(max(limit, used[name]) for name, limit in limits.items())
    wanted = {name: max(0, goals[name] - limit) for name, limit in limits.items()}
    total = sum(wanted.values())
    if room <= 0 or not total:
        return
    for name, size in wanted.items():
        limits[name] += size if total <= room else size * room // total


def _is_steady(capacity_bytes: int, before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    if before.keys() != after.keys() or not sum(after.values()) <= sum(before.values()) <= capacity_bytes:
        return False
    return all(abs(after[name] - before[name]) <= before[name] * STEADY_PART for name in after)
