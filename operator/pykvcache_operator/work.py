"""What is to be reconciled, and when: names wait here, workers take them one at a time.

Outside events only call `add`. A name added many times while it waits is done once (so a burst costs one round), a name
that is being done is never done a second time beside it, and one that failed comes back after growing pauses. At most
one timer and one place in the queue per name, so memory is bounded by the pools there are. Event loop's thread only.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from pykvcache_contract.errors import TransientError

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.1
"""How long a name waits for more of the same news."""
BACKOFF_SECONDS_MIN = 1.0
BACKOFF_SECONDS_MAX = 300.0
Handle = Callable[[str], Awaitable["float | None"]]
"""Does one name; returns after how many seconds it wants to be done again, None for not by itself."""


class Work:
    """Names due for reconciling.

    Args:
        handle: must raise nothing that is not a failure of this one name.
        workers: how many names are done at once.
    """

    def __init__(self, handle: Handle, *, workers: int) -> None:
        self._handle, self._workers = handle, workers
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._running: set[str] = set()
        self._again: set[str] = set()
        self._failures: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Names that are due and not yet done."""
        return len(self._queued) + len(self._running)

    def add(self, name: str, after_seconds: float = DEBOUNCE_SECONDS) -> None:
        """See that a name is done, at the latest after so many seconds and the work before it."""
        loop = asyncio.get_running_loop()
        when = loop.time() + after_seconds
        timer = self._due.get(name)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._due[name] = loop.call_at(when, self._fall_due, name)

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.gather(*(self._worker() for _ in range(self._workers)))

    def _fall_due(self, name: str) -> None:
        self._due.pop(name, None)
        if name in self._running:
            self._again.add(name)
        elif name not in self._queued:
            self._queued.add(name)
            self._ready.put_nowait(name)

    async def _worker(self) -> None:
        while True:
            name = await self._ready.get()
            self._queued.discard(name)
            self._running.add(name)
            try:
                again_seconds = await self._handle(name)
                self._failures.pop(name, None)
            except TransientError as error:
                again_seconds = self._back_off(name)
                logger.warning("could not reconcile pool %s, again in %.0f s: %s", name, again_seconds, error)
            except Exception:  # the top of the loop: one pool's failure is not the others'
                again_seconds = self._back_off(name)
                logger.exception("could not reconcile pool %s, again in %.0f s", name, again_seconds)
            self._running.discard(name)
            if name in self._again:
                self._again.discard(name)
                self.add(name)
            if again_seconds is not None:
                self.add(name, again_seconds)
            # A round without news waits for nothing: thousands in a row would keep the Lease and the probes waiting.
            await asyncio.sleep(0)

    def _back_off(self, name: str) -> float:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        pause = min(BACKOFF_SECONDS_MIN * 2.0 ** min(failures - 1, 20), BACKOFF_SECONDS_MAX)
        return pause * random.uniform(0.75, 1.25)
