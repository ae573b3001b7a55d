"""How work in the background leaves room for others: pauses by the time that steps took, and bytes by a rate."""

from collections.abc import Callable

from pykvcache_storage import inventory

_PAUSE_RATIO = 4.0
"""Pause after each step in durations of the step: at most a fifth of one core, and less where the disk is slow."""


def pause_after(step_seconds: float) -> float:
    """Return how long to pause after a step."""
    return inventory.pause_after(step_seconds, ratio=_PAUSE_RATIO)


class TokenBucket:
    """Bytes that may be read: they accrue at a rate, up to one second's worth, and may be owed.

    Args:
        bytes_per_second: above zero.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_second: int, *, clock: Callable[[], float]) -> None:
        self._rate = float(bytes_per_second)
        self._clock = clock
        self._tokens = 0.0
        self._last = clock()

    def take(self, size_bytes: int) -> float:
        """Take bytes that were or will be read; return how many seconds to wait until they are paid for."""
        now = self._clock()
        accrued = max(0.0, now - self._last) * self._rate
        self._last = now
        self._tokens = min(self._tokens + accrued, self._rate) - size_bytes
        return max(0.0, -self._tokens / self._rate)
