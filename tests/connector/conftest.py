"""A worker's transfer over a real pool, with KV tensors in host memory: what the tests of the connector share."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Importing vLLM warns about its own dependencies.
    import pykvcache_connector.connector  # noqa: F401

from pykvcache_connector.messages import Identity, WorkerReport
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import make_offload_key
from pykvcache_connector.worker.copies import HostCopier, KVTensors
from pykvcache_connector.worker.housekeeping import Housekeeping
from pykvcache_connector.worker.jobs import Job
from pykvcache_connector.worker.layout import BlockLayout, BlockRows
from pykvcache_connector.worker.outcomes import Outcomes
from pykvcache_connector.worker.start import make_transfer
from pykvcache_connector.worker.transfer import Transfer, TransferOptions
from pykvcache_contract.keys import BlockKey, Fingerprint, fingerprint_of
from pykvcache_contract.metrics import Metric
from pykvcache_contract.paths import block_path, fingerprint_directory
from pykvcache_storage.block import FileAccess
from pykvcache_storage.memory import StagingMemory
from pykvcache_storage.pool import open_pool
from pykvcache_storage.probe import PublishMethod
from pykvcache_storage.reactor.operations import MakeDirectory
from pykvcache_storage.reactor.reactor import Reactor
from pykvcache_storage.testing.disk import SimulatedDisk
from pykvcache_storage.usage import UsageLedger

SECONDS = 60
"""Far above what anything takes on a busy machine: only what never happens waits so long."""
LAYOUT = BlockLayout(page_sizes_bytes=(3072, 1000), blocks=2)
"""Two KV tensors of unequal pages; an offloaded block takes 8144 of 8192 bytes."""
ROW_SIZES_BYTES = (3072, 1024)
ROW_COUNT = 256


def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; fail if it never does."""
    deadline = time.monotonic() + SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.001)


def fingerprint_of_generation(generation: int) -> Fingerprint:
    return fingerprint_of({"model": "test", "generation": generation})


def make_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 128, (ROW_COUNT, size), dtype=torch.int8, generator=generator) for size in ROW_SIZES_BYTES
    ]


@dataclass
class Worker:
    """A transfer, its KV tensors, and what vLLM would do with them.

    Block number n of the tests lies in GPU blocks 2n and 2n + 1.
    """

    transfer: Transfer
    tensors: list[torch.Tensor]
    counts: Counts
    pool: Path
    report: WorkerReport = field(default_factory=WorkerReport)
    jobs: dict[int, Job] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    next_job: int = 0

    @staticmethod
    def key(number: int) -> bytes:
        return bytes(make_offload_key(bytes.fromhex(fingerprint_of({"block": number})), 0))

    @staticmethod
    def rows(number: int) -> tuple[int, ...]:
        return (2 * number, 2 * number + 1)

    def path(self, number: int, *, generation: int = 0) -> Path:
        block_hash = bytes.fromhex(fingerprint_of({"block": number}))
        return self.pool / block_path(BlockKey(fingerprint_of_generation(generation), block_hash, 0, 0))

    def use(self, generation: int) -> None:
        """Adopt an identity of two ranks with one fingerprint."""
        fingerprints = (fingerprint_of_generation(generation),) * 2
        self.transfer.use(Identity(generation, fingerprints, ({"test": generation},) * 2))

    def store(self, numbers: Sequence[int]) -> int:
        """Start storing blocks; return the job's number."""
        return self._submit(numbers, is_store=True)

    def load(self, numbers: Sequence[int]) -> int:
        """Start loading blocks into their own rows; return the job's number."""
        return self._submit(numbers, is_store=False)

    def _submit(self, numbers: Sequence[int], *, is_store: bool) -> int:
        self.next_job += 1
        keys = [self.key(number) for number in numbers]
        rows = [BlockRows(self.rows(number), 0) for number in numbers]
        self.transfer.submit(self.next_job, is_store=is_store, keys=keys, rows=rows)
        return self.next_job

    def step(self) -> None:
        """Do what vLLM does after each step: ask for finished jobs, our report and metrics."""
        for job, _ in self.transfer.poll():
            self.jobs[job.job_id] = job
        report = self.transfer.outcomes.take_report()
        if report is not None:
            self.report = self.report.merge(report)
        for name, value in self.counts.take().data["counters"].items():
            self.counted[name] = self.counted.get(name, 0) + value

    def finish(self, job_id: int) -> Job:
        """Return a job once it is over for vLLM."""

        def is_over() -> bool:
            self.step()
            return job_id in self.jobs

        until(is_over)
        return self.jobs[job_id]

    def settle(self, numbers: Sequence[int]) -> None:
        """Return once it is known what became of these blocks' files."""
        wanted = {self.key(number) for number in numbers}

        def is_known() -> bool:
            self.step()
            return wanted <= self.report.stored.keys() | self.report.dropped

        until(is_known)

    def store_all(self, numbers: Sequence[int]) -> None:
        """Store blocks and check that all were published."""
        self.finish(self.store(numbers))
        self.settle(numbers)
        assert {self.key(number) for number in numbers} <= self.report.stored.keys()

    def wipe(self) -> None:
        """Forget the KV cache."""
        for tensor in self.tensors:
            tensor.zero_()

    def pages(self, number: int) -> list[bytes]:
        """Return the used bytes of a block's rows."""
        sizes = LAYOUT.page_sizes_bytes
        return [
            bytes(tensor[row, :size].numpy().tobytes())
            for tensor, size in zip(self.tensors, sizes, strict=True)
            for row in self.rows(number)
        ]

    def total(self, metric: Metric, *labels: str) -> float:
        """Return what a counter has reached."""
        return self.counted.get("\t".join((metric.name, *labels)), 0)

    def expect(self, value: float, metric: Metric, *labels: str) -> None:
        """Wait until a counter has a value: blocks are counted when their task ends, a little after their job."""

        def has_value() -> bool:
            self.step()
            return self.total(metric, *labels) == value

        until(has_value)

    def files(self) -> list[str]:
        """Return all files in fingerprint folders except descriptions and locks."""
        found = [path for path in self.pool.glob("*/**/*") if path.is_file() and path.suffix not in (".json", ".lock")]
        return sorted(str(path.relative_to(self.pool)) for path in found)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A counted, empty pool."""
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True)
    UsageLedger(str(directory)).recount(lambda: 0)
    return directory


@pytest.fixture
def make_worker(pool: Path, mounts) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker on the pool; options are those of the connector.

    Needs `mounts`, so that mounts outlive the workers.
    """
    workers: list[Worker] = []

    def make(
        *,
        slots: int = 8,
        seed: int = 0,
        generation: int = 0,
        rank: int = 0,
        is_replicated: bool = False,
        **options: object,
    ) -> Worker:
        directory = Path(str(options.pop("pool", pool)))
        settings = Settings.parse({"pool": str(directory), "staging": slots * LAYOUT.file_size_bytes} | options)
        tensors, counts = make_tensors(seed), Counts()
        transfer = make_transfer(
            settings, [KVTensors(tensors, LAYOUT)], rank=rank, is_replicated=is_replicated, counts=counts
        )
        workers.append(Worker(transfer, tensors, counts, directory))
        workers[-1].use(generation)
        return workers[-1]

    yield make
    for worker in workers:
        worker.transfer.close(SECONDS)


@pytest.fixture
def make_simulated_worker(pool: Path) -> Iterator[Callable[..., tuple[Worker, SimulatedDisk]]]:
    """Return a function that starts a worker whose block files are simulated; locks and usage are real files."""
    workers: list[tuple[Worker, SimulatedDisk]] = []

    def make(*, slots: int = 4, load_timeout_seconds: float = 30.0, seed: int = 7) -> tuple[Worker, SimulatedDisk]:
        disk = SimulatedDisk(seed, root=str(pool))
        for generation in (0, 1):
            folder = pool / fingerprint_directory(fingerprint_of_generation(generation))
            for path in (folder, folder / "tmp", folder / "quarantine"):
                disk.files.perform(MakeDirectory(str(path)))
        tensors, counts = make_tensors(seed), Counts()
        size = LAYOUT.file_size_bytes
        memory = StagingMemory(slot_size_bytes=size, budget_bytes=slots * size)
        options = TransferOptions(
            directory=str(pool),
            rank=0,
            file_rank=0,
            is_writer=True,
            read_only_reason="",
            access=FileAccess(direct=True),
            method=PublishMethod.LINK,
            fsync=False,
            verify_payload=True,
            load_timeout_seconds=load_timeout_seconds,
            staged_max=max(1, slots // 2),
        )
        outcomes = Outcomes(counts, rank=0)
        transfer = Transfer(
            options,
            {0: LAYOUT},
            reactor=Reactor(disk, memory.slots, depth=16, store_reserve=max(1, slots // 4)),
            copier=HostCopier(KVTensors(tensors, LAYOUT)),
            housekeeping=Housekeeping(
                open_pool(str(pool), create=True), capacity_bytes=1 << 40, on_write_budget=outcomes.write_budget
            ),
            outcomes=outcomes,
        )
        worker = Worker(transfer, tensors, counts, pool)
        worker.use(0)
        workers.append((worker, disk))
        return worker, disk

    yield make
    for worker, disk in workers:
        disk.release()
        worker.transfer.close(SECONDS)
        disk.files.lose_processes()


@pytest.fixture
def read_only_view(tmp_path: Path, mounts) -> Callable[[Path], Path]:
    """Return a function that shows a directory again under another path, mounted read-only."""

    def show(directory: Path) -> Path:
        view = tmp_path / "read-only view"
        mounts.bind(directory, view)
        mounts.remount(view, "bind,ro")
        return view

    return show


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], object]], None]:
    """Return a function that waits for a condition."""
    return until


@pytest.fixture
def used_on_disk() -> Callable[[Path], int]:
    """Return a function that adds up the sizes of all block files below a directory."""

    def count(directory: Path) -> int:
        return sum(os.path.getsize(path) for path in directory.rglob("*.kvb"))

    return count


class ManualClock:
    """Monotonic seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def wall_clock() -> ManualClock:
    """Unix time, a few seconds into a minute."""
    clock = ManualClock()
    clock.now = 1_800_000_003.5
    return clock
