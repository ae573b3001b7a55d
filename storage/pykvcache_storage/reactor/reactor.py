"""The reactor: one thread that drives tasks over one ring and sleeps when there is nothing to do.

Facts: a submission costs tens of microseconds of Python, a block's read a millisecond; a task blocked on a slow disk
must not hold up others; slots are few and large. Therefore every task owns exactly one staging slot from its start to
its end, tasks that have no slot yet wait in one queue per priority, and at most `depth` reads and writes are in flight.

Invariants: tasks, slots and queues are touched by the reactor thread only; other threads enqueue and wake. A slot in
flight is never reused before its operation completed. An exception in a task ends that task; one in the loop ends the
reactor: every task fails with `TransientError`, later submissions too, and the engine recomputes.
"""

import collections
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from errno import EAGAIN, EINTR
from os import strerror
from typing import Any

from pykvcache_contract.errors import TransientError
from pykvcache_storage.memory import Slot
from pykvcache_storage.reactor.operations import Await, Close, Operation, Read, Ring, RingOperation, Task, Write

logger = logging.getLogger(__name__)

MAX_RETRIES = 8
"""How often one operation, except `Close`, is repeated after EINTR or EAGAIN before the task sees the error."""


class Priority(IntEnum):
    """Order in which waiting tasks get slots: a load that a request waits for goes before a store."""

    DEMAND = 0
    STORE = 1


@dataclass(slots=True)
class _Pending:
    factory: Callable[[Slot], Task[Any] | None]
    on_done: Callable[[Any], None]


@dataclass(slots=True)
class _Running:
    task: Task[Any]
    slot: Slot
    priority: Priority
    on_done: Callable[[Any], None]
    operation: Operation | None = None
    retries: int = 0


@dataclass(slots=True)
class ReactorState:
    """A snapshot for metrics; approximate while the reactor runs."""

    slots_used: int = 0
    tasks_waiting: int = 0
    operations_in_flight: int = 0


@dataclass(slots=True)
class _Inbox:
    """What other threads hand over. `lock` guards all fields."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pending: list[tuple[Priority, _Pending]] = field(default_factory=list)
    resumed: list[tuple[int, Await, Any]] = field(default_factory=list)
    barriers: list[threading.Event] = field(default_factory=list)
    stopping: bool = False
    dead: bool = False


class Reactor:
    """Runs tasks on its own thread.

    Args:
        ring: owned and closed by the reactor.
        slots: every staging slot; owned by the reactor from here on.
        depth: most reads and writes in flight at once.
        store_reserve: how many free slots a store must leave to loads, so that a disk that writes slowly cannot
            take all staging memory from requests that wait; at least one less than the number of slots.
    """

    def __init__(self, ring: Ring, slots: list[Slot], *, depth: int, store_reserve: int) -> None:
        if depth < 1 or not slots or not 0 <= store_reserve < len(slots):
            raise ValueError("depth ≥ 1, at least one slot, 0 ≤ store_reserve < number of slots")
        self.ring = ring
        self._slot_count = len(slots)
        self._free = list(reversed(slots))
        self._depth = depth
        self._store_reserve = store_reserve
        self._waiting: dict[Priority, collections.deque[_Pending]] = {p: collections.deque() for p in Priority}
        self._ready: dict[Priority, collections.deque[int]] = {p: collections.deque() for p in Priority}
        self._running: dict[int, _Running] = {}
        self._next_token = 0
        self._data_in_flight = 0
        self._in_flight = 0
        self._inbox = _Inbox()
        self._thread = threading.Thread(target=self._main, name="pykvcache-reactor", daemon=True)
        self._thread.start()

    # ---- any thread ----

    def submit(
        self,
        factory: Callable[[Slot], Task[Any] | None],
        *,
        priority: Priority,
        on_done: Callable[[Any], None],
    ) -> None:
        """Queue a task; when a slot is free, `factory` makes it.

        Args:
            factory: called on the reactor thread; returns None when the work is no longer wanted.
            on_done: called on the reactor thread with the task's result, its exception, or None if not wanted;
                the slot is free again afterwards. Must not block or raise.
        """
        with self._inbox.lock:
            if not self._inbox.stopping:
                self._inbox.pending.append((priority, _Pending(factory, on_done)))
                wake, refused = len(self._inbox.pending) == 1, False
            else:
                wake, refused = False, True
        if refused:
            on_done(TransientError("the reactor has stopped"))
        elif wake:
            self.ring.wake()

    def barrier(self) -> threading.Event:
        """Return an event that fires once every task submitted before either has started or finds no free slot."""
        event = threading.Event()
        with self._inbox.lock:
            dead = self._inbox.dead
            if not dead:
                self._inbox.barriers.append(event)
        if dead:
            event.set()
        else:
            self.ring.wake()
        return event

    def state(self) -> ReactorState:
        """Return a snapshot of the load, for metrics."""
        return ReactorState(
            slots_used=self._slot_count - len(self._free),
            tasks_waiting=sum(len(queue) for queue in self._waiting.values()),
            operations_in_flight=self._in_flight,
        )

    def is_alive(self) -> bool:
        """Return False once the reactor has stopped or failed."""
        return not self._inbox.dead and self._thread.is_alive()

    def stop(self, timeout_seconds: float) -> bool:
        """Drop waiting tasks, let running ones finish, end the thread.

        Returns:
            False if operations were still in flight at the timeout (a hung disk): the ring and the slots' memory must
            then stay allocated until the process ends, because the kernel may still write to them.
        """
        with self._inbox.lock:
            self._inbox.stopping = True
            dead = self._inbox.dead
        if not dead:
            self.ring.wake()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and self._in_flight == 0

    # ---- reactor thread ----

    def _main(self) -> None:
        try:
            self._loop()
        except Exception:
            logger.exception("reactor failed; the cache is off in this process and every load becomes a miss")
        finally:
            self._abandon()

    def _loop(self) -> None:
        while True:
            stopping, barriers = self._take_inbox()
            if stopping:
                self._drop_waiting()
            self._start_tasks()
            for event in barriers:
                event.set()
            self._submit_ready()
            if stopping and not self._running:
                return
            for token, result in self.ring.wait(None):
                self._complete(token, result)

    def _take_inbox(self) -> tuple[bool, list[threading.Event]]:
        with self._inbox.lock:
            pending, self._inbox.pending = self._inbox.pending, []
            resumed, self._inbox.resumed = self._inbox.resumed, []
            barriers, self._inbox.barriers = self._inbox.barriers, []
            stopping = self._inbox.stopping
        for priority, item in pending:
            self._waiting[priority].append(item)
        for token, operation, value in resumed:
            running = self._running.get(token)
            # A second resume, or one that comes after the task has ended, concerns nobody.
            if running is not None and running.operation is operation:
                self._advance(token, value)
        return stopping, barriers

    def _start_tasks(self) -> None:
        for priority in Priority:
            reserve = self._store_reserve if priority is Priority.STORE else 0
            queue = self._waiting[priority]
            while queue and len(self._free) > reserve:
                self._start(priority, queue.popleft())

    def _start(self, priority: Priority, pending: _Pending) -> None:
        slot = self._free.pop()
        try:
            task = pending.factory(slot)
        except Exception as error:
            self._free.append(slot)
            pending.on_done(error)
            return
        if task is None:
            self._free.append(slot)
            pending.on_done(None)
            return
        token, self._next_token = self._next_token, self._next_token + 1
        self._running[token] = _Running(task, slot, priority, pending.on_done)
        self._advance(token, None)

    def _advance(self, token: int, value: Any) -> None:
        """Give a task the result of its operation (an OSError is raised inside it) and take its next one."""
        running = self._running[token]
        try:
            if isinstance(value, OSError):
                operation = running.task.throw(value)
            else:
                operation = running.task.send(value)
        except StopIteration as stop:
            self._finish(token, stop.value)
        except Exception as error:
            self._finish(token, error)
        else:
            running.operation, running.retries = operation, 0
            try:
                self._begin(token, running, operation)
            except Exception as error:
                # No operation, or a `start` that raises: one task's mistake must not end the reactor.
                _unwind(running.task, error)
                self._finish(token, error)

    def _begin(self, token: int, running: _Running, operation: Operation) -> None:
        if isinstance(operation, Await):
            operation.start(functools.partial(self._resume, token, operation))
        elif isinstance(operation, (Read, Write)):
            self._ready[running.priority].append(token)
        elif isinstance(operation, RingOperation):
            self.ring.submit(operation, token)
            self._in_flight += 1
        else:
            raise TypeError(f"a task yielded {operation!r}, which is no operation")

    def _submit_ready(self) -> None:
        for priority in Priority:
            queue = self._ready[priority]
            while queue and self._data_in_flight < self._depth:
                token = queue.popleft()
                operation = self._running[token].operation
                assert isinstance(operation, Read | Write)
                self._data_in_flight += 1
                self._in_flight += 1
                self.ring.submit(operation, token)

    def _resume(self, token: int, operation: Await, value: Any) -> None:
        with self._inbox.lock:
            self._inbox.resumed.append((token, operation, value))
            wake = len(self._inbox.resumed) == 1 and not self._inbox.dead
        if wake:
            self.ring.wake()

    def _complete(self, token: int, result: int) -> None:
        running = self._running[token]
        operation = running.operation
        assert operation is not None
        assert not isinstance(operation, Await)
        self._in_flight -= 1
        if isinstance(operation, Read | Write):
            self._data_in_flight -= 1
        # After an interrupted close the descriptor is gone on Linux: a second one could hit somebody else's.
        repeatable = -result in (EINTR, EAGAIN) and not isinstance(operation, Close)
        if repeatable and running.retries < MAX_RETRIES:
            running.retries += 1
            self._begin(token, running, operation)
        elif result < 0:
            self._advance(token, OSError(-result, strerror(-result), getattr(operation, "path", None)))
        else:
            self._advance(token, result)

    def _finish(self, token: int, result: Any) -> None:
        running = self._running.pop(token)
        self._free.append(running.slot)
        running.on_done(result)

    def _drop_waiting(self) -> None:
        for queue in self._waiting.values():
            while queue:
                queue.popleft().on_done(TransientError("the process is shutting down"))

    def _abandon(self) -> None:
        """End: nobody waits for ever, and the ring is closed only when the kernel owns no buffer any more."""
        with self._inbox.lock:
            self._inbox.stopping = self._inbox.dead = True
            pending, self._inbox.pending = self._inbox.pending, []
            barriers, self._inbox.barriers = self._inbox.barriers, []
        for event in barriers:
            event.set()
        for _, item in pending:
            item.on_done(TransientError("the reactor has stopped"))
        self._drop_waiting()
        for running in self._running.values():
            failure = TransientError("the reactor has failed")
            _unwind(running.task, failure)
            running.on_done(failure)
        self._running.clear()
        if self._in_flight == 0:
            self.ring.close()


def _unwind(task: Task[Any], error: Exception) -> None:
    """Let a task clean up after itself, as far as it can when every further operation fails as well."""
    try:
        for _ in range(MAX_RETRIES):
            task.throw(error)
    except Exception:
        return
