"""A clock for deciding that something is old enough to be removed."""

from collections.abc import Callable


class CautiousClock:
    """Unix time that a jump forward does not move: the earlier of the wall clock and the time since the start.

    Facts: clocks are set, by hours or by years, and set back. What they mean: a clock that jumps ahead makes everything
    look unused for long. Therefore both clocks must agree that it is. A clock that was behind at the start, or a host
    that slept, only delays a removal. A clock that jumps backwards makes ages small or negative: nothing is removed.

    Args:
        clock: Unix time, which may jump.
        monotonic: seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._offset = clock() - monotonic()

    def __call__(self) -> float:
        """Return Unix time."""
        return min(self._clock(), self._offset + self._monotonic())
