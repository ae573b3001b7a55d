"""How much may be in flight, and when the disk cannot take more. Owned by the scheduler's thread."""

import time
from collections.abc import Callable

FULL_SECONDS = 1.0
"""How long stores are declined after one was refused for want of room; then the next is tried."""
OVER_BUDGET_SECONDS = 5.0
"""The same after one exceeded the write budget: for blocks wanted once if that was one, for all if it was wanted twice.
Nothing of the budget is lost: it accrues."""


class Admission:
    """Limits loads by bytes and remembers bad news: a full pool for a while, a stalled disk until it recovers.

    vLLM starts loads for its whole queue at once; without a limit they would take all GPU blocks from running requests.

    Args:
        load_bytes_in_flight: most bytes of loads at once; a single larger load may still start alone.
        clock: monotonic seconds; a parameter for tests.
    """

    def __init__(self, load_bytes_in_flight: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = load_bytes_in_flight
        self._clock = clock
        self._in_flight = 0
        self._full_until = 0.0
        self._full_reason = ""
        self._over_budget_until = 0.0
        self._budget_spent_until = 0.0
        self._is_stalled = False

    def may_start(self, size_bytes: int) -> bool:
        """Return whether a load of this size may start now."""
        return self._in_flight == 0 or self._in_flight + size_bytes <= self._limit

    def started(self, size_bytes: int) -> None:
        """Count a load that vLLM starts."""
        self._in_flight += size_bytes

    def finished(self, size_bytes: int) -> None:
        """Count a load that is over."""
        self._in_flight = max(0, self._in_flight - size_bytes)

    def note(
        self,
        *,
        full_reason: str = "",
        is_stalled: bool | None = None,
        is_over_budget: bool = False,
        is_budget_spent: bool = False,
    ) -> None:
        """Take in a worker's report; without a word about the disk, what is known of it stays."""
        if full_reason:
            self._full_until = self._clock() + FULL_SECONDS
            self._full_reason = full_reason
        if is_over_budget:
            self._over_budget_until = self._clock() + OVER_BUDGET_SECONDS
        if is_budget_spent:
            self._budget_spent_until = self._clock() + OVER_BUDGET_SECONDS
        if is_stalled is not None:
            self._is_stalled = is_stalled

    def full_reason(self) -> str:
        """Return why stores would only be refused now, empty if they would not."""
        return self._full_reason if self._clock() < self._full_until else ""

    def is_budget_spent(self) -> bool:
        """Return whether stores of any block would only be declined now."""
        return self._clock() < self._budget_spent_until

    def is_over_budget(self) -> bool:
        """Return whether stores of blocks wanted once would only be declined now."""
        return self._clock() < self._over_budget_until

    def is_stalled(self) -> bool:
        """Return whether loads would only queue behind overdue ones now."""
        return self._is_stalled

    def reset(self) -> None:
        """Forget loads in flight: vLLM does not report the end of those it dropped in a reset.

        And a stalled disk: its recovery may be in a report that is void now. Workers repeat that it is stalled.
        """
        self._in_flight = 0
        self._is_stalled = False
