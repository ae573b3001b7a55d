"""The ring where io_uring is forbidden: a fixed set of threads, one blocking system call each at a time.

At most `threads` operations run at once; the others wait in the queue. `wait` sleeps on a queue, without polling.
"""

import queue
import threading
from collections.abc import Callable

from pykvcache_storage.reactor.operations import RingOperation
from pykvcache_storage.reactor.system_calls import perform

MAX_COMPLETIONS = 256
"""Most completions that one `wait` returns; the rest come with the next."""

_Job = tuple[RingOperation, int]


class Workers:
    """Threads that perform operations.

    Args:
        count: how many operations run at once.
        on_done: called on one of the threads with token and result; must not block.
    """

    def __init__(self, count: int, on_done: Callable[[int, int], None]) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._on_done = on_done
        self._threads = [
            threading.Thread(target=self._main, name=f"pykvcache-io-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, operation: RingOperation, token: int) -> None:
        """Queue one operation."""
        self._jobs.put((operation, token))

    def close(self) -> None:
        """End the threads. Nothing is queued or running, so they end at once."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            operation, token = job
            self._on_done(token, perform(operation))
            # A job kept in a local variable while the thread sleeps would keep its path alive.
            del job, operation


class ThreadRing:
    """Implements `Ring` with `threads` threads, started at once."""

    name = "threads"

    def __init__(self, threads: int = 16) -> None:
        if threads < 1:
            raise ValueError("a thread ring needs at least one thread")
        self._done: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._workers = Workers(threads, lambda token, result: self._done.put((token, result)))
        self._woken = False

    def submit(self, operation: RingOperation, token: int) -> None:
        """Start one operation as soon as a thread is free."""
        self._workers.put(operation, token)

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        """Sleep until something completed; see `Ring.wait`."""
        completions: list[tuple[int, int]] = []
        try:
            item = self._done.get(timeout=timeout_seconds)
            while True:
                if item is None:
                    self._woken = False
                else:
                    completions.append(item)
                    if len(completions) == MAX_COMPLETIONS:
                        break
                item = self._done.get_nowait()
        except queue.Empty:
            pass
        return completions

    def wake(self) -> None:
        """Make `wait` return; wakes that nobody has seen yet count as one."""
        if not self._woken:
            self._woken = True
            self._done.put(None)

    def close(self) -> None:
        """End the threads."""
        self._workers.close()
