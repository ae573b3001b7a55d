"""Splits vLLM's jobs into one task per block and drives them: file ⇄ slot ⇄ KV cache.

Runs on vLLM's worker thread (submit, poll, wait) and on the reactor's (tasks). vLLM is told that a job is over when no
copy touches GPU memory any more; whether a block reached the disk is reported separately, so a slow disk never holds
GPU blocks. No failure leaves this module as an exception: a load's is a block to recompute, a store's a dropped store.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache_connector.messages import Identity, StagingOrders, StoreNotes
from pykvcache_connector.vllm_api import split_offload_key
from pykvcache_connector.worker.copies import Copier, Copy
from pykvcache_connector.worker.files import BlockFiles, Target
from pykvcache_connector.worker.housekeeping import Housekeeping
from pykvcache_connector.worker.jobs import Block, BlockState, Job, Jobs
from pykvcache_connector.worker.layout import BlockLayout, BlockRows
from pykvcache_connector.worker.outcomes import Declined, Outcomes
from pykvcache_connector.worker.staged import StagedBlock, StagedBlocks
from pykvcache_contract.errors import CapacityError, CorruptBlockError, ReadOnlyError, TransientError
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey
from pykvcache_contract.recency import recency_ns
from pykvcache_storage.block import FileAccess, is_own_limit
from pykvcache_storage.memory import Slot
from pykvcache_storage.probe import PublishMethod
from pykvcache_storage.publish import Published, publish_block
from pykvcache_storage.reactor.operations import Await, Task
from pykvcache_storage.reactor.reactor import Priority, Reactor

logger = logging.getLogger(__name__)

MAX_WAITING_STORES = 4096
"""Blocks of stores that may wait for a slot; more are dropped, and the prefix is stored when it is next computed."""
STAGED_AGE_FACTOR = 4.0
"""How many load deadlines a staged block may outlive the scheduler's last word; a promise ends after two."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What the transfer is told and does not decide.

    Args:
        rank: of this worker.
        file_rank: whose files it reads; 0 for all where ranks hold equal bytes.
        is_writer: False where another rank writes the same bytes.
        read_only_reason: why nothing can be written to the pool; empty if it can.
        staged_max: most blocks that the scheduler may have staged at once.
    """

    directory: str
    rank: int
    file_rank: int
    is_writer: bool
    read_only_reason: str
    access: FileAccess
    method: PublishMethod
    fsync: bool
    verify_payload: bool
    load_timeout_seconds: float
    staged_max: int = 0


class Transfer:
    """All loads and stores of one worker.

    Args:
        layouts: of each KV-cache group, by vLLM's number of it.
        reactor, copier, housekeeping: owned and closed by the transfer.
    """

    def __init__(
        self,
        options: TransferOptions,
        layouts: Mapping[int, BlockLayout],
        *,
        reactor: Reactor,
        copier: Copier,
        housekeeping: Housekeeping,
        outcomes: Outcomes,
    ) -> None:
        self.options = options
        self.layouts = layouts
        self.outcomes = outcomes
        self._reactor = reactor
        self._copier = copier
        self._housekeeping = housekeeping
        self._jobs = Jobs()
        self._target: Target | None = None
        self._orders = 0
        self._files = BlockFiles(
            options.directory,
            file_rank=options.file_rank,
            access=options.access,
            verify_payload=options.verify_payload,
            outcomes=outcomes,
        )
        self._staged = StagedBlocks(
            self._files,
            layouts,
            reactor=reactor,
            copier=copier,
            outcomes=outcomes,
            blocks_max=options.staged_max,
            age_seconds_max=STAGED_AGE_FACTOR * options.load_timeout_seconds,
        )

    # ---- vLLM's worker thread ----

    def use(self, identity: Identity | None) -> None:
        """Adopt the scheduler's identity; cheap when nothing changed."""
        if identity is None:
            return
        owner = self.options.file_rank
        fingerprint = identity.fingerprints[owner]
        if self._target is None or self._target.generation != identity.generation:
            self._target = Target(identity.generation, fingerprint)
            self._staged.release_all()
            self.outcomes.begin_generation(identity.generation)
            if self.options.is_writer and not self.options.read_only_reason:
                self._housekeeping.prepare(fingerprint, identity.descriptions[owner])

    def obey(self, orders: StagingOrders) -> None:
        """Stage and let go blocks as the scheduler says; the same orders a second time change nothing."""
        if self._target is None or orders.number <= self._orders:
            return
        self._orders = orders.number
        self._staged.release(orders.release)
        for ticket, key in orders.stage.items():
            self._staged.stage(ticket, key, self._target)

    def submit(
        self,
        job_id: int,
        *,
        is_store: bool,
        keys: Sequence[bytes],
        rows: Sequence[BlockRows | None],
        notes: StoreNotes | None = None,
    ) -> None:
        """Start a job; never blocks and never fails.

        Args:
            rows: of each key; None for a block that is not whole on the GPU and is not stored.
            notes: of the keys of a store; without them a block counts as a head that is wanted now and once.
        """
        target = self._target
        job = Job(job_id, is_store, time.monotonic(), target.generation if target else 0)
        if is_store and not self._accepts_store(target, keys):
            self._jobs.add(job)
            return
        ready, notes = self._copier.mark(), notes or _no_notes(len(keys))
        job.blocks = [
            Block(job, key, part, ready, recency, is_repeated)
            for key, part, recency, is_repeated in zip(keys, rows, notes.recencies_ns, notes.repeated, strict=True)
            if part is not None
        ]
        if len(job.blocks) < len(keys):
            partial = [key for key, part in zip(keys, rows, strict=True) if part is None]
            self.outcomes.declined("store", "incomplete", partial, job.generation)
        self._jobs.add(job)
        if target is None:
            self._jobs.give_up([job_id])
            return
        for block in job.blocks:
            staged = None if is_store else self._staged.claim(block.key)
            if staged is None:
                self._start(block, target)
            else:
                self._copy_staged(block, staged)

    def poll(self) -> list[tuple[Job, float]]:
        """Return (job, seconds) of jobs that are over; loads past their deadline end here, as failed."""
        late = self._jobs.late(self.options.load_timeout_seconds)
        if late:
            self._give_up(late, "timeout")
        self._staged.release_forgotten()
        self.outcomes.check_overdue(self.options.load_timeout_seconds)
        self.outcomes.record_load(self._reactor.state())
        return self._jobs.take_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs no longer touch GPU memory; waits for copies, never for the disk.

        Blocks that have no slot by now are given up: a store is dropped, a load is recomputed.
        """
        self._reactor.barrier().wait()
        self._give_up(job_ids, "stopped")
        self._jobs.wait(job_ids)

    def close(self, timeout_seconds: float) -> None:
        """Finish the stores that have begun, within a time limit, and end all threads."""
        self._staged.release_all()
        drained = self._reactor.stop(timeout_seconds)
        if not drained:
            logger.warning("the disk did not finish in time; unpublished blocks are lost, which is harmless")
        self._copier.close()
        self._housekeeping.close()

    def _accepts_store(self, target: Target | None, keys: Sequence[bytes]) -> bool:
        if target is None or not self.options.is_writer:
            return False
        if self.options.read_only_reason:
            self.outcomes.stores_refused(keys, target.generation, ReadOnlyError(self.options.read_only_reason))
            return False
        if self._reactor.state().tasks_waiting + len(keys) > MAX_WAITING_STORES:
            self.outcomes.declined("store", "staging_full", keys, target.generation)
            return False
        return True

    def _give_up(self, job_ids: set[int] | list[int], reason: str) -> None:
        for block in self._jobs.give_up(job_ids):
            generation = block.job.generation
            if block.job.is_store:
                self.outcomes.declined("store", "staging_full", [block.key], generation)
            else:
                self.outcomes.load_given_up(block.key, generation, reason)

    def _start(self, block: Block, target: Target) -> None:
        key = self._files.key(block.key, target)
        generation = block.job.generation
        if block.job.is_store:
            self._reactor.submit(
                lambda slot: self._store(block, key, slot) if self._is_wanted(block) else None,
                priority=Priority.STORE,
                on_done=lambda result: self._settle_store(block, generation, result),
            )
        else:
            self._reactor.submit(
                lambda slot: self._load(block, key, generation, slot) if self._is_wanted(block) else None,
                priority=Priority.DEMAND,
                on_done=lambda result: self._settle_load(block, generation, result),
            )

    def _copy_staged(self, block: Block, staged: StagedBlock) -> None:
        """Copy a block that is in its slot already; the job waits for no disk."""
        begins = self._jobs.begin_copy(block)
        assert begins
        assert staged.slot is not None
        group = staged.key.group

        def on_done(result: Any) -> None:
            self._staged.copied(staged)
            failed = isinstance(result, Exception)
            if failed:
                self._fail_load(block, block.job.generation, TransientError(f"copy of a staged block: {result}"))
            else:
                self._jobs.end(block, moved_bytes=self.layouts[group].used_size_bytes)
            self.outcomes.load_ended(block, 0 if failed else self.layouts[group].used_size_bytes)

        self._copier.submit(
            Copy(
                staged.slot, block.rows, block.ready, is_store=False, wants_checksum=False, on_done=on_done, group=group
            )
        )

    # ---- the reactor's thread ----

    def _is_wanted(self, block: Block) -> bool:
        wanted = block.state is BlockState.WAITING
        if wanted:
            self.outcomes.task_began(block)
        return wanted

    def _load(self, block: Block, key: BlockKey, generation: int, slot: Slot) -> Task[int | None]:
        layout = self.layouts[key.group]
        slot = slot.front(layout.file_size_bytes)
        try:
            header = yield from self._files.read(key, slot)
            if not self._jobs.begin_copy(block):
                return None
            checksum = yield self._copy(block, slot, key.group)
            self._files.check(key, header, checksum)
        except CorruptBlockError as error:
            # First the report, then the job's end, then the disk: nobody may wait for the disk, or be told "hit" again.
            self._fail_load(block, generation, error)
            yield from self._files.set_aside(key, block.key, generation, error)
            return None
        self._jobs.end(block, moved_bytes=layout.used_size_bytes)
        return layout.used_size_bytes

    def _copy(self, block: Block, slot: Slot, group: int) -> Await:
        def start(resume: Callable[[Any], None]) -> None:
            wants_checksum = block.job.is_store or self.options.verify_payload
            self._copier.submit(Copy(slot, block.rows, block.ready, block.job.is_store, wants_checksum, resume, group))

        return Await(start)

    def _store(self, block: Block, key: BlockKey, slot: Slot) -> Task[Published | Declined | None]:
        if not self._jobs.begin_copy(block):
            return None
        layout = self.layouts[key.group]
        slot = slot.front(layout.file_size_bytes)
        checksum = yield self._copy(block, slot, key.group)
        self._jobs.end(block, moved_bytes=layout.used_size_bytes)
        if isinstance(checksum, Exception):
            raise TransientError(f"copy: {checksum}") from checksum
        header = BlockHeader(key, layout.payload_size_bytes, layout.used_size_bytes, checksum)
        slot.data[:HEADER_SIZE_BYTES] = encode_header(header)
        return (yield from self._publish(block, key, slot))

    def _publish(self, block: Block, key: BlockKey, slot: Slot) -> Task[Published | Declined]:
        size = len(slot.data)
        temporary = yield self._housekeeping.reserve(key.fingerprint, size, is_repeated=block.is_repeated)
        if isinstance(temporary, Exception):
            raise temporary
        if isinstance(temporary, Declined):
            return temporary
        try:
            outcome = yield from publish_block(
                slot=slot,
                temporary=temporary,
                target=self._files.path(key),
                modified_ns=block.recency_ns,
                access=self.options.access,
                method=self.options.method,
                fsync=self.options.fsync,
            )
        except CapacityError as error:
            if is_own_limit(error):
                self._housekeeping.release(size)
            else:
                self._housekeeping.refuse(size)
            raise
        except BaseException:  # The reactor may end a task from outside.
            self._housekeeping.release(size)
            raise
        if outcome is not Published.FIRST:
            self._housekeeping.release(size)
        return outcome

    def _settle_store(self, block: Block, generation: int, result: Any) -> None:
        """Record what became of a block; called once for each, whatever happened."""
        self._jobs.end(block, moved_bytes=0)
        size_bytes = self.layouts[split_offload_key(block.key)[1]].file_size_bytes
        self.outcomes.store_ended(block, generation, result, size_bytes)

    def _settle_load(self, block: Block, generation: int, result: Any) -> None:
        """Record what became of a block; called once for each, whatever happened."""
        if isinstance(result, Exception):
            self._fail_load(block, generation, result)
        self.outcomes.load_ended(block, result if isinstance(result, int) else 0)

    def _fail_load(self, block: Block, generation: int, error: Exception) -> None:
        """Make the block one to recompute, unless it was given up before; the report goes first."""
        if block.state is not BlockState.DONE:
            self.outcomes.load_failed(block.key, generation, error)
            self._jobs.end(block, moved_bytes=0, failed=True)


def _no_notes(count: int) -> StoreNotes:
    return StoreNotes([recency_ns(time.time(), 0)] * count, [False] * count)
