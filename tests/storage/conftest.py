"""Every ring behind one harness, and staging memory, for the tests of the storage part."""

import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_storage.memory import Slot, StagingMemory
from pykvcache_storage.reactor.operations import Close, Open, Read, Ring, RingOperation, Task, Write
from pykvcache_storage.reactor.reactor import Priority, Reactor
from pykvcache_storage.reactor.ring_threads import ThreadRing
from pykvcache_storage.reactor.ring_uring import UringRing
from pykvcache_storage.reactor.system_calls import perform
from pykvcache_storage.testing.blocks import block_content
from pykvcache_storage.testing.disk import SimulatedDisk

TMPFS = "/dev/shm"
DEADLINE_SECONDS = 100.0
"""A write through to a disk that others keep busy takes its time; what hangs must end before pytest's own deadline."""
SLOT_SIZE_BYTES = 1 << 20


@dataclass
class Disk:
    """A ring and a folder that it can reach.

    `flags` are added to every open: O_DIRECT or nothing.
    """

    ring: Ring
    folder: str
    flags: int

    @property
    def simulated(self) -> bool:
        return isinstance(self.ring, SimulatedDisk)

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def do(self, operation: RingOperation) -> int:
        """Carry out one operation; return its result."""
        self.ring.submit(operation, 7)
        ((token, result),) = self.ring.wait(DEADLINE_SECONDS)
        assert token == 7
        return result

    def do_all(self, operations: list[RingOperation]) -> list[int]:
        """Carry out operations at once; return their results in order. Each completes exactly once."""
        for token, operation in enumerate(operations):
            self.ring.submit(operation, token)
        results: dict[int, int] = {}
        while len(results) < len(operations):
            completions = self.ring.wait(DEADLINE_SECONDS)
            assert completions, "operations are missing"
            for token, result in completions:
                assert token not in results
                results[token] = result
        return [results[token] for token in range(len(operations))]

    def open(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open a file; return its descriptor."""
        descriptor = self.do(Open(self.path(name), flags | self.flags))
        assert descriptor >= 0, os.strerror(-descriptor)
        return descriptor

    def write_file(self, name: str, slot: Slot, content: bytes) -> str:
        """Create a file; return its path."""
        descriptor = self.open(name)
        slot.data[: len(content)] = content
        assert self.do(Write(descriptor, slot.address, len(content), 0)) == len(content)
        assert self.do(Close(descriptor)) == 0
        return self.path(name)

    def read_file(self, name: str, slot: Slot) -> bytes:
        descriptor = self.open(name, os.O_RDONLY)
        count = self.do(Read(descriptor, slot.address, len(slot.data), 0))
        assert self.do(Close(descriptor)) == 0
        return bytes(slot.data[:count])

    def modified_ns(self, path: str) -> int | None:
        """Return the modification time that was set."""
        if isinstance(self.ring, SimulatedDisk):
            return self.ring.files.modified_ns(path)
        return os.stat(path).st_mtime_ns

    def system_result(self, operation: RingOperation) -> int:
        """Return what the plain system call says about the same operation."""
        assert not self.simulated
        return perform(operation)


def _uring(*, force_async: bool) -> UringRing:
    try:
        return UringRing(entries=8, force_async=force_async)
    except (ImportError, OSError) as error:
        pytest.skip(f"io_uring is not available: {error}")


KINDS = [
    "uring-disk-direct",
    "uring-disk-buffered",
    "uring-tmpfs-direct",
    "uring-tmpfs-buffered",
    "threads-disk-direct",
    "threads-tmpfs-buffered",
    "simulated-memory-direct",
]


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> Iterator[Disk]:
    """Every ring on every medium; queues are small, so that each test overflows them."""
    engine, medium, access = request.param.split("-")
    if engine == "simulated":
        simulated = SimulatedDisk(seed=11)
        yield Disk(simulated, simulated.root, os.O_DIRECT)
        simulated.files.lose_processes()
        return
    flags = os.O_DIRECT if access == "direct" else 0
    inline = medium == "tmpfs" or access == "buffered"
    with tempfile.TemporaryDirectory(dir=TMPFS if medium == "tmpfs" else tmp_path) as folder:
        if perform(Close(perform(Open(f"{folder}/probe", os.O_CREAT | os.O_RDWR | flags)))) < 0:
            pytest.skip(f"{medium} refuses O_DIRECT")
        ring: Ring = _uring(force_async=inline) if engine == "uring" else ThreadRing(4)
        yield Disk(ring, folder, flags)
        ring.close()


@pytest.fixture
def slots() -> list[Slot]:
    """Four slots of 1 MiB."""
    return StagingMemory(slot_size_bytes=SLOT_SIZE_BYTES, budget_bytes=4 * SLOT_SIZE_BYTES).slots


@pytest.fixture
def unmount() -> Callable[[object], None]:
    """Return a function that unmounts what nobody may be using; the kernel closes a ring's files a moment later."""

    def end(point: object) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS / 2
        never = threading.Event()
        while (done := subprocess.run(["umount", str(point)], capture_output=True, check=False)).returncode:
            assert time.monotonic() < deadline, done.stderr.decode()
            never.wait(0.05)

    return end


@pytest.fixture
def big_slots() -> list[Slot]:
    """Two slots of 28 MiB: one block of a 3B model."""
    size = 28 << 20
    return StagingMemory(slot_size_bytes=size, budget_bytes=2 * size).slots


@pytest.fixture
def block_key() -> BlockKey:
    return BlockKey(fingerprint_of({"model": "test"}), bytes(range(1, 33)), group=2, rank=1)


@pytest.fixture
def make_block(block_key: BlockKey) -> Callable[..., bytes]:
    """Return a function that makes the content of a block file as long as a slot, different for each seed."""

    def make(seed: int = 0, *, key: BlockKey = block_key) -> bytes:
        payload = random.Random(seed).randbytes(SLOT_SIZE_BYTES - HEADER_SIZE_BYTES)
        return block_content(key, payload)

    return make


@pytest.fixture
def run(slots: list[Slot]) -> Iterator[Callable[..., object]]:
    """Return a function that runs one task on a reactor over a ring: it returns the result, or raises it."""
    reactors: dict[int, Reactor] = {}
    one_at_a_time = threading.Lock()

    def reactor_of(ring: Ring) -> Reactor:
        with one_at_a_time:
            if id(ring) not in reactors:
                reactors[id(ring)] = Reactor(ring, slots, depth=4, store_reserve=1)
            return reactors[id(ring)]

    def run_task(ring: Ring, factory: Callable[[Slot], Task[object]]) -> object:
        reactor = reactor_of(ring)
        future: Future[object] = Future()
        reactor.submit(factory, priority=Priority.DEMAND, on_done=future.set_result)
        result = future.result(DEADLINE_SECONDS)
        if isinstance(result, Exception):
            raise result
        return result

    yield run_task
    for reactor in reactors.values():
        assert reactor.stop(DEADLINE_SECONDS)
