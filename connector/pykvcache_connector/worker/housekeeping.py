"""What a worker must do on the disk beside reads and writes: keep its place in the pool, and the pool's usage.

All of it may block, so it runs on one thread of its own; the reactor's tasks wait for it with `Await`. Counting a pool
has a thread for itself.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pykvcache_connector.messages import UNAVAILABLE
from pykvcache_connector.worker.foothold import Foothold
from pykvcache_connector.worker.outcomes import Declined
from pykvcache_contract.errors import CapacityError, PyKVCacheError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import temporary_path
from pykvcache_contract.units import format_size
from pykvcache_storage.inventory import count_bytes_in_steps, pause_after
from pykvcache_storage.pool import Pool
from pykvcache_storage.reactor.operations import Await
from pykvcache_storage.usage import Reserved, UsageLedger

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
"""While blocks are stored: how often the pool is asked whether it is still there, and which limits it has."""
RECOUNT_SECONDS = 3600.0
"""A start-up counts the pool unless it was counted this recently: what killed processes leaked is found again."""
RECOUNT_DELAY_SECONDS = 10.0
"""The first requests after a start go first, if the fill level is known well enough to store meanwhile."""
PAUSE_RATIO = 9.0
"""Pause after each step of counting, in durations of the step: the interpreter is shared with vLLM's own threads, so
counting takes at most a tenth of one core, and less where the machine is busy. First tokens on two cores come 1.1
times as late meanwhile. What is stored while the count runs counts twice: about 1 % of a pool at 1 GB/s."""


class Housekeeping:
    """The worker's blocking errands.

    Args:
        pool: opened by this process.
        capacity_bytes: most bytes that the pool's block files may take; the sidecar may allow less. 0: what it allows.
        on_write_budget: called with whether the pool limits what is written a day, every few seconds of storing.
        may_create: whether a blank disk in the pool's place may be made a pool again.
        clock: monotonic seconds; a parameter for tests.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        capacity_bytes: int,
        on_write_budget: Callable[[bool], None],
        may_create: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._on_write_budget = on_write_budget
        self._clock = clock
        self._ledger = UsageLedger(pool.directory)
        self._foothold = Foothold(pool, may_create=may_create)
        self._looked = clock()
        self._warned = False
        self._number = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pykvcache-housekeeping")
        self._closed = threading.Event()
        self._counting = self._start_recount()

    def prepare(self, fingerprint: Fingerprint, description: dict[str, Any]) -> None:
        """Start creating the fingerprint's folders and removing what dead writers left; returns at once."""
        self._thread.submit(self._prepare, fingerprint, description)

    def reserve(self, fingerprint: Fingerprint, size_bytes: int, *, is_repeated: bool) -> Await:
        """Return an operation whose result is the path of a temporary file, why the store is declined, or an error.

        Args:
            is_repeated: the block was wanted by two requests at least.
        """
        return self._errand(lambda: self._reserve(fingerprint, size_bytes, is_repeated))

    def release(self, size_bytes: int) -> None:
        """Give back a reservation that became no file; returns at once. After `close` the next recount does it."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._ledger.release, size_bytes)

    def refuse(self, size_bytes: int) -> None:
        """Give back a reservation for which the filesystem had no room, so that the sidecar makes some."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._ledger.refuse, size_bytes)

    def close(self) -> None:
        """Drop the locks, at the end: nothing of this writer must be swept as dead while it lives."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.submit(self._foothold.leave)
        self._thread.shutdown(wait=False)

    def _errand(self, work: Callable[[], Any]) -> Await:
        def start(resume: Callable[[Any], None]) -> None:
            try:
                self._thread.submit(self._run, work, resume)
            except RuntimeError as error:  # closed: the process is ending
                resume(PyKVCacheError(str(error)))

        return Await(start)

    def _run(self, work: Callable[[], Any], resume: Callable[[Any], None]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error if isinstance(error, PyKVCacheError) else PyKVCacheError(str(error))
        resume(result)

    def _reserve(self, fingerprint: Fingerprint, size_bytes: int, is_repeated: bool) -> str | Declined:
        if self._clock() - self._looked >= LOOK_SECONDS:
            self._foothold.look()
            self._look_at_usage()
        if not self._foothold.is_there:
            return Declined(UNAVAILABLE)
        writer = self._foothold.writer(fingerprint)
        reserved = self._ledger.reserve(size_bytes, capacity_bytes=self._capacity_bytes, is_repeated=is_repeated)
        if reserved is Reserved.WRITE_BUDGET:
            return Declined("write_budget")
        if reserved is Reserved.FULL:
            raise CapacityError("the pool has reached its capacity")
        if reserved is Reserved.UNKNOWN:
            raise CapacityError("it is not known yet how full the pool is; it is being counted")
        self._number += 1
        return os.path.join(self._pool.directory, temporary_path(fingerprint, writer, self._number))

    def _prepare(self, fingerprint: Fingerprint, description: dict[str, Any]) -> None:
        self._foothold.prepare(fingerprint, description)
        self._look_at_usage()

    def _look_at_usage(self) -> None:
        """Tell whether there is a write budget, and have a pool counted whose usage was lost since the start."""
        self._looked = self._clock()
        usage = self._ledger.usage()
        self._on_write_budget(usage is not None and usage.write_budget_bytes > 0)
        if usage is not None and 0 < self._capacity_bytes < usage.limit_bytes and not self._warned:
            self._warned = True
            logger.warning(
                "the option capacity is %s, and the pool's sidecar allows %s: nothing may be evicted before this vLLM "
                "finds the pool full. Leave capacity out, or give both the same",
                format_size(self._capacity_bytes),
                format_size(usage.limit_bytes),
            )
        if usage is None and self._foothold.is_there and not self._counting.is_alive():
            self._counting = self._start_recount()

    def _start_recount(self) -> threading.Thread:
        thread = threading.Thread(target=self._recount, name="pykvcache-recount", daemon=True)
        thread.start()
        return thread

    def _recount(self) -> None:
        """Count the pool once, slowly enough that vLLM's threads do not notice, if nobody has lately."""
        usage = self._ledger.usage()
        if not self._pool.writable or (usage and time.time() - usage.recount_seconds < RECOUNT_SECONDS):
            return
        if usage is not None and self._closed.wait(RECOUNT_DELAY_SECONDS):
            return
        try:
            self._ledger.recount(self._count_slowly)
        except Exception:
            if not self._closed.is_set():
                logger.exception("the pool's usage could not be counted; stores are declined until it is")

    def _count_slowly(self) -> int:
        steps = count_bytes_in_steps(self._pool.directory)
        while True:
            started = time.monotonic()
            try:
                next(steps)
            except StopIteration as stop:
                if not self._foothold.is_same_place():
                    raise PyKVCacheError("the pool went away while it was counted") from None
                return int(stop.value)
            if self._closed.wait(pause_after(time.monotonic() - started, ratio=PAUSE_RATIO)):
                raise PyKVCacheError("the process ended before the pool was counted")
