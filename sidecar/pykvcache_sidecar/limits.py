"""How much a pool may take now, and how much of it must go: arithmetic on one look at the pool, no side effects.

Facts: the disk may be filled by others; a disk may be smaller than the configured capacity; a pool exactly at its limit
stores nothing. What they mean: what counts is the smaller of the capacity and what the filesystem could give to the
pool, which is what the pool has plus what is free minus what must stay free. That number does not change when we evict.
Therefore the watermarks apply to it; writers are stopped at the limit itself, and eviction, which begins below it,
keeps room for them. A quota shows in none of these numbers, only in a refused store: the fill level at that moment is
then the limit, until the pool is down at its low watermark. But a store is refused for other reasons too (a quota that
others use up, no more inodes), and more evictions then only empty the pool. What tells them apart is the next refusal:
if it comes before the room made could be used, that room was none.

Facts: a pool with room for less than a block stores nothing; copy-on-write filesystems show removed bytes as free only
after their next commit. What they mean: eviction must begin before the last block's room is gone; and bytes that were
removed a moment ago count as free, or one shortage would empty the pool round by round.
"""

from dataclasses import dataclass

CAPACITY = "capacity"
MIN_FREE = "min_free"
REFUSED = "refused"
HELPED_LEVEL_RATIO = 0.05
"""How much above the level evicted down to a refusal must come for the room to have helped, relative to that level:
stores in flight at a refusal count as used, and they are far less than this of a pool worth having."""
HELPED_ROOM_RATIO = 0.5
"""The same relative to the room made, which is smaller where the watermarks lie close to the limit."""
SMALLEST_LIMIT_BYTES = 1
"""Stops all stores: no block is that small, and zero in the ledger means no limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """One look at a pool.

    Args:
        used_bytes: the ledger's fill level, None if it is unknown.
        free_bytes: what the filesystem has for users without privileges.
        is_evicting: the last decision was to evict; then it goes on down to the low watermark.
        refused_bytes: the fill level at which the filesystem refused a store, 0 if it did not.
        block_bytes: size of the largest block known.
        pending_bytes: removed, and not seen as free yet.
    """

    used_bytes: int | None
    free_bytes: int
    capacity_bytes: int
    min_free_bytes: int
    high: float
    low: float
    is_evicting: bool
    refused_bytes: int = 0
    block_bytes: int = 0
    pending_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about it.

    Args:
        allowed_bytes: the limit for all writers from now on; set before anything is evicted.
        evict_bytes: how much must go; 0 for nothing.
        reason: `CAPACITY`, `MIN_FREE` if the filesystem is short of room, `REFUSED` if it refuses what it seems to
            have; empty if nothing must go.
    """

    allowed_bytes: int
    evict_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoomMade:
    """What was done about a refusal.

    Args:
        refused_bytes: the fill level at which a store was refused.
        left_bytes: the fill level evicted down to.
    """

    refused_bytes: int
    left_bytes: int


def has_helped(made: RoomMade, refused_bytes: int) -> bool:
    """Return whether stores used the room that was made before the next one was refused.

    >>> [has_helped(RoomMade(1000, left_bytes=800), level) for level in (800, 840, 841, 1000)]
    [False, False, True, True]
    """
    room = made.refused_bytes - made.left_bytes
    slack = min(HELPED_LEVEL_RATIO * made.left_bytes, HELPED_ROOM_RATIO * room)
    return refused_bytes > made.left_bytes + slack


def decide(room: Room) -> Plan:
    """Return what the pool may take, how much must go and why.

    >>> decide(Room(95, 900, capacity_bytes=100, min_free_bytes=0, high=0.9, low=0.8, is_evicting=False))
    Plan(allowed_bytes=100, evict_bytes=15, reason='capacity')
    """
    if room.used_bytes is None:
        return Plan(room.capacity_bytes)
    used = room.used_bytes
    reachable = used + room.free_bytes + room.pending_bytes - room.min_free_bytes
    allowed = max(SMALLEST_LIMIT_BYTES, min(room.capacity_bytes, reachable, room.refused_bytes or reachable))
    if used <= _mark(room, allowed):
        return Plan(allowed)
    low_bytes = min(int(room.low * allowed), max(0, allowed - room.block_bytes))
    return Plan(allowed, used - low_bytes, _reason(room, used, reachable=reachable))


def _mark(room: Room, allowed_bytes: int) -> int:
    """Return the fill level above which something must go: the high watermark, or the low one on the way down."""
    share = room.low if room.is_evicting else room.high
    return min(int(share * allowed_bytes), max(0, allowed_bytes - room.block_bytes))


def _reason(room: Room, used: int, *, reachable: int) -> str:
    if used > _mark(room, room.capacity_bytes):
        return CAPACITY
    return MIN_FREE if used > _mark(room, reachable) else REFUSED
