"""Bytes that were removed and that the filesystem does not show as free yet. Belongs to the caring thread.

Facts: copy-on-write filesystems free what was removed with their next commit, up to half a minute later; others at
once, while somebody else may take it at once. What they mean: what was removed counts as free for that long, less what
became free meanwhile. Where it was free at once and taken again, room is made half a minute late.
"""

from collections.abc import Callable

LAG_SECONDS = 30.0
"""The commit interval of btrfs; ZFS takes 5 s."""


class Pending:
    """Remembers one episode of removals.

    Args:
        monotonic: seconds that never jump.
    """

    def __init__(self, *, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._removed_bytes = 0
        self._free_before = 0
        self._end = monotonic()

    def note(self, removed_bytes: int, *, free_before: int) -> None:
        """Note a removal, and what was free before it."""
        if not removed_bytes:
            return
        if self._monotonic() >= self._end:
            self._removed_bytes, self._free_before = 0, free_before
        self._removed_bytes += removed_bytes
        self._end = self._monotonic() + LAG_SECONDS

    def bytes_at(self, free_bytes: int) -> int:
        """Return how much is still to become free, given what is free now."""
        if self._monotonic() >= self._end:
            return 0
        return max(0, self._removed_bytes - max(0, free_bytes - self._free_before))
