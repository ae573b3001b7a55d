"""The reactor over a simulated disk, where faults are needed, and over real rings."""

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_storage.memory import Slot, StagingMemory
from pykvcache_storage.reactor.operations import Await, Close, MakeDirectory, Open, Read, Sync, Write
from pykvcache_storage.reactor.reactor import MAX_RETRIES, Priority, Reactor
from pykvcache_storage.testing.disk import SimulatedDisk

PAGE = 4096
SECONDS = 60


@dataclass
class Results:
    """Collects what tasks deliver on the reactor thread; other threads wait for a number of them."""

    values: list[object] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, value: object) -> None:
        with self.changed:
            self.values.append(value)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[object]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.values) >= count, SECONDS), self.values
            return list(self.values)


class Gate:
    """Parks tasks until it is opened; tells how many have come."""

    def __init__(self) -> None:
        self.resumes: list[object] = []
        self.arrived = threading.Semaphore(0)

    def wait(self) -> Await:
        return Await(self._start)

    def _start(self, resume: object) -> None:
        self.resumes.append(resume)
        self.arrived.release()

    def expect(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=SECONDS)

    def open(self, value: object = None) -> None:
        resumes, self.resumes = self.resumes, []
        for resume in resumes:
            resume(value)


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def simulated() -> SimulatedDisk:
    return SimulatedDisk(seed=5)


@pytest.fixture
def start(slots) -> Iterator[object]:
    """Return a function that starts a reactor over a ring; every reactor must stop cleanly at the end."""
    started: list[Reactor] = []

    def start_reactor(ring, *, depth=4, store_reserve=1, count=4) -> Reactor:
        reactor = Reactor(ring, slots[:count], depth=depth, store_reserve=store_reserve)
        started.append(reactor)
        return reactor

    yield start_reactor
    for reactor in started:
        reactor.stop(SECONDS)


def copy_task(slot: Slot, folder: str, index: int, flags: int):
    """Write a file, read it back, return its first byte."""
    path = f"{folder}/{index}"
    descriptor = yield Open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        slot.data[:PAGE] = bytes([index]) * PAGE
        yield Write(descriptor, slot.address, PAGE, 0)
        slot.data[:PAGE] = bytes(PAGE)
        yield Read(descriptor, slot.address, PAGE, 0)
        return slot.data[0]
    finally:
        yield Close(descriptor)


def read_task(slot: Slot, folder: str):
    descriptor = yield Open(f"{folder}/file", os.O_RDWR | os.O_CREAT)
    try:
        return (yield Read(descriptor, slot.address, PAGE, 0))
    finally:
        yield Close(descriptor)


def parked(gate: Gate):
    return (yield gate.wait())


def demand(reactor: Reactor, factory: object, results: Results) -> None:
    reactor.submit(factory, priority=Priority.DEMAND, on_done=results)


def store(reactor: Reactor, factory: object, results: Results) -> None:
    reactor.submit(factory, priority=Priority.STORE, on_done=results)


# ---- tasks ----


def test_many_tasks_over_few_slots_all_deliver_their_result(disk, start, results):
    reactor = start(disk.ring)
    for index in range(200):
        demand(reactor, lambda slot, index=index: copy_task(slot, disk.folder, index, disk.flags), results)
    assert sorted(results.wait_for(200)) == list(range(200))
    assert reactor.stop(SECONDS)


def test_an_error_is_raised_inside_the_task_which_may_handle_it(simulated, start, results):
    def task(slot):
        try:
            yield Open("/disk/missing", os.O_RDONLY)
        except FileNotFoundError as error:
            return error.errno, error.filename

    demand(start(simulated), task, results)
    assert results.wait_for(1) == [(errno.ENOENT, "/disk/missing")]


def test_an_error_that_the_task_does_not_handle_is_its_result(simulated, start, results):
    simulated.fail(Sync, error=errno.EIO)

    def task(slot):
        yield Sync((yield Open("/disk/a", os.O_CREAT | os.O_RDWR)))

    demand(start(simulated), task, results)
    assert results.wait_for(1)[0].errno == errno.EIO


def test_a_factory_that_returns_none_takes_no_slot_and_delivers_none(simulated, start, results):
    reactor = start(simulated)
    demand(reactor, lambda slot: None, results)
    assert results.wait_for(1) == [None]
    assert reactor.state().slots_used == 0


def test_a_factory_that_raises_delivers_its_exception(simulated, start, results):
    def factory(slot):
        raise ValueError("no")

    reactor = start(simulated)
    demand(reactor, factory, results)
    assert isinstance(results.wait_for(1)[0], ValueError)
    assert reactor.is_alive()


def test_a_value_that_is_no_operation_ends_its_task_only(simulated, start, results):
    def task(slot):
        yield MakeDirectory("/disk/before")
        yield "nonsense"

    def bad_start(resume):
        raise RuntimeError("cannot start")

    def bad_await(slot):
        yield Await(bad_start)

    reactor = start(simulated)
    demand(reactor, bad_await, results)
    assert isinstance(results.wait_for(1)[0], RuntimeError)
    demand(reactor, task, results)
    assert isinstance(results.wait_for(2)[1], TypeError)
    demand(reactor, lambda slot: read_task(slot, "/disk"), results)
    assert results.wait_for(3)[2] == 0


# ---- order ----


def test_demand_gets_slots_before_stores_that_came_earlier(simulated, start, results):
    reactor, gate, order = start(simulated, count=2, store_reserve=0), Gate(), Results()
    for _ in range(2):
        demand(reactor, lambda slot: parked(gate), results)
    gate.expect(2)

    def noting(name):
        def task(slot):
            order(name)
            return (yield MakeDirectory(f"/disk/{name}"))

        return task

    for name in ("store-1", "store-2"):
        store(reactor, noting(name), results)
    for name in ("demand-1", "demand-2"):
        demand(reactor, noting(name), results)
    assert reactor.barrier().wait(SECONDS)
    gate.open()
    results.wait_for(6)
    assert sorted(order.values[:2]) == ["demand-1", "demand-2"]


def test_stores_leave_the_reserve_to_loads(simulated, start, results):
    reactor, gate = start(simulated, count=4, store_reserve=1), Gate()
    for _ in range(6):
        store(reactor, lambda slot: parked(gate), results)
    gate.expect(3)
    assert reactor.barrier().wait(SECONDS)
    assert (reactor.state().slots_used, reactor.state().tasks_waiting) == (3, 3)
    demand(reactor, lambda slot: read_task(slot, "/disk"), results)
    assert results.wait_for(1) == [0]
    gate.open()
    gate.expect(3)
    gate.open()
    results.wait_for(7)


def test_a_slot_is_never_given_to_two_tasks_at_once(simulated, start, results):
    owners, twice = set(), []

    def task(slot):
        if slot.index in owners:
            twice.append(slot.index)
        owners.add(slot.index)
        yield from read_task(slot, "/disk")
        owners.discard(slot.index)

    reactor = start(simulated)
    for _ in range(100):
        demand(reactor, task, results)
    results.wait_for(100)
    assert twice == []


def test_no_more_reads_and_writes_are_in_flight_than_the_depth(start, results):
    class CountingDisk(SimulatedDisk):
        """Notes how many reads and writes are in flight at most."""

        in_flight, peak = 0, 0

        def submit(self, operation, token):
            if isinstance(operation, Read | Write):
                self.in_flight += 1
                self.peak = max(self.peak, self.in_flight)
            super().submit(operation, token)

        def _perform(self, operation):
            self.in_flight -= isinstance(operation, Read | Write)
            return super()._perform(operation)

    ring = CountingDisk(seed=6)
    reactor = start(ring, depth=2)
    for index in range(50):
        demand(reactor, lambda slot, index=index: copy_task(slot, "/disk", index, 0), results)
    results.wait_for(50)
    assert ring.peak == 2


# ---- await ----


def test_an_awaiting_task_gets_the_value_from_another_thread(disk, start, results):
    reactor, gate = start(disk.ring), Gate()
    for _ in range(4):
        demand(reactor, lambda slot: parked(gate), results)
    gate.expect(4)
    thread = threading.Thread(target=gate.open, args=("value",))
    thread.start()
    thread.join()
    assert results.wait_for(4) == ["value"] * 4


def test_an_await_may_be_resumed_at_once_on_the_reactor_thread(simulated, start, results):
    def task(slot):
        total = 0
        for number in range(100):
            total += yield Await(lambda resume, number=number: resume(number))
        return total

    demand(start(simulated), task, results)
    assert results.wait_for(1) == [4950]


def test_a_second_resume_is_ignored(simulated, start, results):
    reactor, gate = start(simulated), Gate()

    def task(slot):
        first = yield gate.wait()
        second = yield gate.wait()
        return first, second

    demand(reactor, task, results)
    gate.expect(1)
    (resume,) = gate.resumes
    gate.open("first")
    gate.expect(1)
    resume("stale")
    assert reactor.barrier().wait(SECONDS)
    gate.open("second")
    results.wait_for(1)
    resume("after the end")
    demand(reactor, lambda slot: read_task(slot, "/disk"), results)
    assert results.wait_for(2) == [("first", "second"), 0]
    assert reactor.is_alive()


# ---- faults ----


def test_an_interrupted_operation_is_repeated(simulated, start, results):
    simulated.fail(Read, error=errno.EINTR, times=MAX_RETRIES)
    simulated.fail(Open, error=errno.EAGAIN)
    demand(start(simulated), lambda slot: read_task(slot, "/disk"), results)
    assert results.wait_for(1) == [0]


def test_an_endless_storm_of_interruptions_reaches_the_task(simulated, start, results):
    simulated.fail(Read, error=errno.EINTR, times=MAX_RETRIES + 1)
    demand(start(simulated), lambda slot: read_task(slot, "/disk"), results)
    assert results.wait_for(1)[0].errno == errno.EINTR


def test_a_hung_read_does_not_hold_up_other_tasks(simulated, start, results):
    simulated.hang(Read)
    reactor = start(simulated, depth=2)
    hung = Results()
    demand(reactor, lambda slot: read_task(slot, "/disk"), hung)
    for _ in range(20):
        demand(reactor, lambda slot: read_task(slot, "/disk"), results)
    with results.changed:
        assert results.changed.wait_for(lambda: len(results.values) + len(hung.values) == 20, SECONDS)
    simulated.release()
    assert results.wait_for(20) == [0] * 20
    assert hung.wait_for(1) == [0]


# ---- end ----


def test_stop_drops_what_waits_and_finishes_what_runs(simulated, start, results):
    reactor, gate, dropped = start(simulated, count=1, store_reserve=0), Gate(), Results()
    demand(reactor, lambda slot: parked(gate), results)
    gate.expect(1)
    demand(reactor, lambda slot: parked(gate), dropped)
    assert reactor.barrier().wait(SECONDS)
    assert not reactor.stop(0)
    assert isinstance(dropped.wait_for(1)[0], TransientError)
    gate.open("done")
    assert reactor.stop(SECONDS)
    assert results.values == ["done"]
    assert simulated.closed


def test_after_a_stop_tasks_are_refused(simulated, start, results):
    reactor = start(simulated)
    assert reactor.stop(SECONDS)
    assert not reactor.is_alive()
    demand(reactor, lambda slot: read_task(slot, "/disk"), results)
    assert isinstance(results.wait_for(1)[0], TransientError)
    assert reactor.barrier().is_set()
    assert reactor.stop(SECONDS)


def test_a_hung_disk_makes_stop_return_false_and_keeps_the_ring(simulated, start, results):
    simulated.hang(Read)
    reactor, gate = start(simulated), Gate()

    def task(slot):
        descriptor = yield Open("/disk/file", os.O_RDWR | os.O_CREAT)
        yield gate.wait()
        return (yield Read(descriptor, slot.address, PAGE, 0))

    demand(reactor, task, results)
    gate.expect(1)
    gate.open()
    assert reactor.barrier().wait(SECONDS)
    assert not reactor.stop(0.05)
    assert not simulated.closed
    simulated.release()
    assert reactor.stop(SECONDS)
    assert simulated.closed


class BrokenDisk(SimulatedDisk):
    """Its `wait` raises once it is broken, as io_uring_enter does when the kernel fails it."""

    broken = False

    def wait(self, timeout_seconds):
        completions = super().wait(timeout_seconds)
        if self.broken:
            raise OSError(errno.ENXIO, "broken")
        return completions


def test_a_dead_reactor_fails_every_task_with_a_transient_error(start, results, caplog):
    ring, gate, cleanup = BrokenDisk(seed=7), Gate(), []

    def task(slot):
        try:
            yield gate.wait()
        finally:
            cleanup.append(slot.index)
            yield Close(3)

    reactor = start(ring, count=2)
    for _ in range(3):
        demand(reactor, task, results)
    gate.expect(2)
    ring.broken = True
    ring.wake()
    assert all(isinstance(value, TransientError) for value in results.wait_for(3))
    demand(reactor, task, results)
    assert isinstance(results.wait_for(4)[3], TransientError)
    assert reactor.stop(SECONDS)
    assert not reactor.is_alive()
    assert len(cleanup) == 2
    assert ring.closed
    assert "reactor failed" in caplog.text
    gate.open()


def test_a_dead_reactor_keeps_the_ring_while_the_disk_hangs(start, results, caplog):
    ring = BrokenDisk(seed=8)
    ring.hang(Read)
    reactor, gate = start(ring), Gate()

    def task(slot):
        yield gate.wait()
        yield Read(0, slot.address, PAGE, 0)

    demand(reactor, task, results)
    gate.expect(1)
    gate.open()
    assert reactor.barrier().wait(SECONDS)
    ring.broken = True
    ring.wake()
    assert isinstance(results.wait_for(1)[0], TransientError)
    assert not reactor.stop(SECONDS)
    assert not ring.closed


def test_impossible_arguments_are_refused(simulated):
    slots = StagingMemory(slot_size_bytes=PAGE, budget_bytes=4 * PAGE).slots
    for depth, reserve in ((0, 0), (1, 4), (1, -1)):
        with pytest.raises(ValueError, match="depth"):
            Reactor(simulated, slots, depth=depth, store_reserve=reserve)


def test_a_close_is_never_repeated_because_its_descriptor_may_be_somebody_elses_by_then(simulated, start, results):
    simulated.fail(Close, error=errno.EINTR)
    demand(start(simulated), lambda slot: read_task(slot, "/disk"), results)
    assert isinstance(results.wait_for(1)[0], InterruptedError)
    assert not any(isinstance(operation, Close) for operation in simulated.history)
    simulated.files.lose_processes()
