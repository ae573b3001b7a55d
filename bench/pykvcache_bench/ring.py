"""Our reactor against fio on the same directory: `python -m pykvcache_bench.ring --directory DIR`.

Both do direct I/O of 28 MiB at depth 16 from and to memory on huge pages, for a fixed time after a ramp, in
interleaved rounds, because the speed of a shared disk drifts by more than the difference. Our side pays for what the
product does: each block is a task that opens its file, reads or writes, and closes it; fio keeps the file open.

Two tunables of glibc make fio's memory what ours is: on huge pages, and touched before the clock starts. The report
says how much of it lay on huge pages.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pykvcache_contract.units import format_size
from pykvcache_storage.memory import Slot, StagingMemory
from pykvcache_storage.probe import EngineName, ProbeResult, make_ring, probe
from pykvcache_storage.reactor.operations import Close, Open, Read, Ring, Task, Write
from pykvcache_storage.reactor.reactor import Priority, Reactor

BLOCK_SIZE_BYTES = 28 << 20
"""256 tokens of a 3B model in fp16."""
DEPTH = 16
SPARE_SLOTS = 4
"""Blocks that are being opened or closed while DEPTH others are read."""
PAGE_SIZE_BYTES = 4096
FIO_MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.perturb=85"
TARGETS = {"uring": 0.95, "threads": 0.85}
ENGINES: tuple[EngineName, ...] = ("uring", "threads")
Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and for how long."""

    path: str
    block_count: int
    seconds: float
    ramp_seconds: float


@dataclass(slots=True)
class Load:
    """Keeps a reactor busy with tasks and counts those that end inside a window of time.

    Args:
        make_task: gets a slot and the task's number; the task returns True.
        parallel: how many tasks are queued or running at any time.
    """

    reactor: Reactor
    make_task: Callable[[Slot, int], Task[bool]]
    parallel: int
    finished: int = 0
    started: int = 0
    running: int = 0
    stopping: bool = False
    failures: list[BaseException] = field(default_factory=list)
    idle: threading.Event = field(default_factory=threading.Event)

    def run(self, *, ramp_seconds: float, seconds: float) -> float:
        """Return how many tasks ended per second after the ramp.

        Counted as fio does: what is in flight at the end of the ramp counts whole, and the clock stops when nothing is
        in flight any more.
        """
        # All of them are counted up front: the first may end before the last is submitted.
        self.running = self.parallel
        for _ in range(self.parallel):
            self._submit()
        time.sleep(ramp_seconds)
        before, started = self.finished, time.perf_counter()
        time.sleep(seconds)
        self.stopping = True
        self.idle.wait()
        if self.failures:
            raise self.failures[0]
        return (self.finished - before) / (time.perf_counter() - started)

    def _submit(self) -> None:
        number, self.started = self.started, self.started + 1
        self.reactor.submit(lambda slot: self.make_task(slot, number), priority=Priority.DEMAND, on_done=self._on_done)

    def _on_done(self, result: Any) -> None:
        self.finished += result is not None
        if isinstance(result, BaseException):
            self.failures.append(result)
        if self.stopping or self.failures:
            self.running -= 1
            if self.running == 0:
                self.idle.set()
        else:
            self._submit()


def block_task(slot: Slot, number: int, *, settings: Settings, direction: Direction, flags: int) -> Task[bool]:
    """Read or write one block of the file, as the product does one block file."""
    descriptor = yield Open(settings.path, os.O_RDWR | flags)
    try:
        kind = Read if direction == "read" else Write
        offset = number % settings.block_count * BLOCK_SIZE_BYTES
        count = yield kind(descriptor, slot.address, BLOCK_SIZE_BYTES, offset)
        if count != BLOCK_SIZE_BYTES:
            raise OSError(f"{direction} moved {count} bytes")
        return True
    finally:
        yield Close(descriptor)


def measure_reactor(ring: Ring, memory: StagingMemory, settings: Settings, direction: Direction, flags: int) -> float:
    """Return MB/s of a reactor over the ring."""
    reactor = Reactor(ring, list(memory.slots), depth=DEPTH, store_reserve=0)
    load = Load(
        reactor,
        lambda slot, number: block_task(slot, number, settings=settings, direction=direction, flags=flags),
        parallel=len(memory.slots),
    )
    rate = load.run(ramp_seconds=settings.ramp_seconds, seconds=settings.seconds)
    reactor.stop(30)
    return rate * BLOCK_SIZE_BYTES / 1e6


def measure_fio(settings: Settings, direction: Direction, *, direct: bool) -> tuple[float, int]:
    """Return fio's MB/s, and how many bytes of its memory lay on huge pages."""
    command = ["fio", "--name=ring", f"--filename={settings.path}", f"--rw={direction}", f"--bs={BLOCK_SIZE_BYTES}"]
    command += [f"--iodepth={DEPTH}", f"--direct={int(direct)}", "--ioengine=io_uring", "--mem=malloc", "--thread=1"]
    command += [f"--size={settings.block_count * BLOCK_SIZE_BYTES}", "--time_based", f"--runtime={settings.seconds}s"]
    command += [f"--ramp_time={settings.ramp_seconds}s", "--invalidate=0", "--output-format=json"]
    environment = {**os.environ, "GLIBC_TUNABLES": FIO_MEMORY}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(settings.ramp_seconds + settings.seconds / 2)
        huge = huge_page_bytes(process.pid)
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"fio failed: {output}")
    return json.loads(output[output.index("{") :])["jobs"][0][direction]["bw_bytes"] / 1e6, huge


def huge_page_bytes(pid: int) -> int:
    """Return how much of a process's memory lies on anonymous huge pages."""
    match = re.search(r"AnonHugePages:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(match[1]) * 1024 if match else 0


def compare(found: ProbeResult, settings: Settings, *, rounds: int) -> None:
    """Print medians of MB/s, and of the per-round ratio of ours to fio, for both engines and directions."""
    memory = touched_memory()
    flags = os.O_DIRECT if found.direct_io else 0
    for direction in ("read", "write"):
        rates: dict[str, list[float]] = {"fio": [], **{engine: [] for engine in ENGINES}}
        huge = 0
        for index in range(rounds):
            names = list(rates)
            for name in names[index % 3 :] + names[: index % 3]:
                if name == "fio":
                    rate, huge = measure_fio(settings, direction, direct=found.direct_io)
                else:
                    rate = measure_reactor(ring_of(found, name), memory, settings, direction, flags)
                rates[name].append(rate)
        report(direction, rates, huge)
    print(f"our huge pages: {format_size(huge_page_bytes(os.getpid()))} of {format_size(memory.size_bytes)}")


def report(direction: Direction, rates: dict[str, list[float]], huge: int) -> None:
    """Print one direction's result."""
    listed = " ".join(f"{rate:.0f}" for rate in rates["fio"])
    print(f"{direction}: fio      {statistics.median(rates['fio']):6.0f} MB/s ({listed}), {format_size(huge)} huge")
    for engine in ENGINES:
        ratio = statistics.median(ours / fio for ours, fio in zip(rates[engine], rates["fio"], strict=True))
        listed = " ".join(f"{rate:.0f}" for rate in rates[engine])
        verdict = "ok" if ratio >= TARGETS[engine] else "MISSED"
        print(
            f"{direction}: {engine:8} {statistics.median(rates[engine]):6.0f} MB/s ({listed}) "
            f"RATIO {ratio:.3f} target {TARGETS[engine]} {verdict}"
        )


def ring_of(found: ProbeResult, engine: str) -> Ring:
    """Return a ring of this engine, set up as the product would."""
    if engine == "threads":
        return make_ring(replace(found, engine="threads"), threads=DEPTH)
    return make_ring(found)


def touched_memory() -> StagingMemory:
    """Return staging memory whose pages exist: the product touches them once, when it registers them with CUDA."""
    count = DEPTH + SPARE_SLOTS
    memory = StagingMemory(slot_size_bytes=BLOCK_SIZE_BYTES, budget_bytes=count * BLOCK_SIZE_BYTES)
    for slot in memory.slots:
        slot.data[:] = os.urandom(1 << 20) * (BLOCK_SIZE_BYTES >> 20)
    return memory


def measure_overhead(directory: str, engine: str, *, seconds: float) -> None:
    """Print what one operation costs: 4 KiB reads from a filesystem in memory, where the device costs nothing.

    Processor time of all our threads, kernel included, because the wall clock also measures our neighbours.
    """
    memory = StagingMemory(slot_size_bytes=PAGE_SIZE_BYTES, budget_bytes=DEPTH * PAGE_SIZE_BYTES)
    found = replace(probe(directory), direct_io=False, force_async=False)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(PAGE_SIZE_BYTES))
        file.flush()
        ring_cost = cost_on_ring(ring_of(found, engine), file.fileno(), memory, seconds)
        task_cost = cost_in_tasks(ring_of(found, engine), file.fileno(), memory, seconds)
    print(f"overhead: {engine:8} {ring_cost:5.1f} us an operation on the bare ring, {task_cost:5.1f} us in tasks")


def cost_on_ring(ring: Ring, descriptor: int, memory: StagingMemory, seconds: float) -> float:
    """Return microseconds of processor time per read without a reactor, DEPTH at a time."""
    count, processor, deadline = 0, time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for slot in memory.slots:
            ring.submit(Read(descriptor, slot.address, PAGE_SIZE_BYTES, 0), slot.index)
        done = 0
        while done < len(memory.slots):
            done += len(ring.wait(None))
        count += done
    cost = (time.process_time() - processor) / count
    ring.close()
    return cost * 1e6


def cost_in_tasks(ring: Ring, descriptor: int, memory: StagingMemory, seconds: float) -> float:
    """Return microseconds of processor time per read in tasks of 100 reads, one task per slot."""

    def read(slot: Slot, _: int) -> Task[bool]:
        for _ in range(100):
            yield Read(descriptor, slot.address, PAGE_SIZE_BYTES, 0)
        return True

    reactor = Reactor(ring, list(memory.slots), depth=DEPTH, store_reserve=0)
    load = Load(reactor, read, parallel=DEPTH)
    processor = time.process_time()
    load.run(ramp_seconds=0, seconds=seconds)
    cost = (time.process_time() - processor) / (load.finished * 100)
    reactor.stop(30)
    return cost * 1e6


def measure_idle(found: ProbeResult, engine: str, *, seconds: float) -> None:
    """Print how much processor time a reactor uses that has nothing to do."""
    memory = StagingMemory(slot_size_bytes=PAGE_SIZE_BYTES, budget_bytes=DEPTH * PAGE_SIZE_BYTES)
    reactor = Reactor(ring_of(found, engine), list(memory.slots), depth=DEPTH, store_reserve=0)
    reactor.barrier().wait()
    processor, wall = time.process_time(), time.monotonic()
    time.sleep(seconds)
    used = (time.process_time() - processor) / (time.monotonic() - wall)
    reactor.stop(30)
    print(f"idle:     {engine:8} {used * 100:.4f} % of one processor over {seconds:.0f} s")


def main() -> None:
    """Run all measurements and remove all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="on the disk to measure")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a filesystem in memory")
    parser.add_argument("--blocks", type=int, default=64, help="file size in blocks of 28 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    options = parser.parse_args()
    found = probe(options.directory)
    print(f"{os.uname().release}, {os.cpu_count()} processors, {found}")
    for engine in ENGINES:
        measure_idle(found, engine, seconds=options.idle_seconds)
        measure_overhead(options.tmpfs, engine, seconds=min(options.seconds, 2))
    with tempfile.NamedTemporaryFile(dir=options.directory, prefix="pykvcache-bench-") as file:
        for _ in range(options.blocks):
            file.write(os.urandom(1 << 20) * (BLOCK_SIZE_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())
        settings = Settings(file.name, options.blocks, options.seconds, ramp_seconds=1.0)
        compare(found, settings, rounds=options.rounds)


if __name__ == "__main__":
    main()
