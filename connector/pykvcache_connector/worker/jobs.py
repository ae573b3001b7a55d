"""vLLM's transfer jobs and their blocks: who is where, and when a job is over for vLLM.

A job is over when none of its blocks touches GPU memory any more: a store's blocks are in staging slots (their writing
goes on), a load's are in the KV cache or given up. One lock guards everything here; nothing blocks while it is held.
"""

import enum
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pykvcache_connector.worker.layout import BlockRows


class BlockState(enum.Enum):
    """Where a block of a job is, as far as GPU memory is concerned."""

    WAITING = "waiting"
    COPYING = "copying"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Block:
    """One offloaded block of a job.

    Args:
        key: vLLM's offload key.
        ready: mark of the compute work that its copy must wait for.
        recency_ns: modification time of the file that a store makes.
        is_repeated: at least two requests wanted the block that is stored.
    """

    job: "Job"
    key: bytes
    rows: BlockRows
    ready: Any
    recency_ns: int = 0
    is_repeated: bool = False
    state: BlockState = BlockState.WAITING


@dataclass(slots=True, eq=False)
class Job:
    """One of vLLM's transfer jobs.

    Args:
        generation: of the identity that it began under.
        failed_rows: GPU blocks whose load failed; vLLM recomputes them.
    """

    job_id: int
    is_store: bool
    started: float
    generation: int = 0
    blocks: list[Block] = field(default_factory=list)
    open_blocks: int = 0
    moved_bytes: int = 0
    failed_rows: set[int] = field(default_factory=set)


class Jobs:
    """All jobs that vLLM still waits for, and those that finished since it last asked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, Job] = {}
        self._finished: list[tuple[Job, float]] = []

    def add(self, job: Job) -> None:
        """Start tracking a job; one without blocks is finished at once."""
        with self._changed:
            job.open_blocks = len(job.blocks)
            self._open[job.job_id] = job
            if not job.open_blocks:
                self._finish(job)

    def begin_copy(self, block: Block) -> bool:
        """Mark a block as touching GPU memory; False if it was given up meanwhile."""
        with self._changed:
            if block.state is not BlockState.WAITING:
                return False
            block.state = BlockState.COPYING
            return True

    def end(self, block: Block, *, moved_bytes: int, failed: bool = False) -> bool:
        """Mark a block as no longer touching GPU memory; False if it already was over."""
        with self._changed:
            return self._end(block, moved_bytes=moved_bytes, failed=failed)

    def give_up(self, job_ids: Iterable[int]) -> list[Block]:
        """End all blocks of these jobs whose copy has not begun, and return them; loads count as failed."""
        with self._changed:
            jobs = [self._open[job_id] for job_id in job_ids if job_id in self._open]
            blocks = [block for job in jobs for block in job.blocks if block.state is BlockState.WAITING]
            for block in blocks:
                self._end(block, moved_bytes=0, failed=not block.job.is_store)
            return blocks

    def wait(self, job_ids: Iterable[int]) -> None:
        """Sleep until no copy of these jobs is running; copies are short, they never wait for a disk."""
        wanted = set(job_ids)
        with self._changed:
            while not wanted.isdisjoint(self._open):
                self._changed.wait()

    def late(self, limit_seconds: float) -> list[int]:
        """Return the load jobs that have taken longer than the limit."""
        now = time.monotonic()
        with self._changed:
            return [job.job_id for job in self._open.values() if not job.is_store and now - job.started > limit_seconds]

    def take_finished(self) -> list[tuple[Job, float]]:
        """Return (job, seconds it took) of the jobs that finished since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def _end(self, block: Block, *, moved_bytes: int, failed: bool) -> bool:
        if block.state is BlockState.DONE:
            return False
        block.state = BlockState.DONE
        job = block.job
        job.moved_bytes += moved_bytes
        if failed:
            job.failed_rows.update(block.rows.rows)
        job.open_blocks -= 1
        if not job.open_blocks:
            self._finish(job)
        return True

    def _finish(self, job: Job) -> None:
        del self._open[job.job_id]
        self._finished.append((job, time.monotonic() - job.started))
        self._changed.notify_all()
