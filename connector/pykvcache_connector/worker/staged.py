"""Blocks that were read and verified before vLLM was promised anything, and wait in their slots: phase one of two.

Facts: vLLM cannot be told that a load of a model with several KV-cache groups failed; a disk can fail or hang at any
time; slots are few. Therefore such loads read first: a block's task owns its slot as always, reads, checks header and
payload without touching the KV cache, reports, and sleeps in its slot. A load job then only copies, which needs no
disk. The task ends when the scheduler lets the block go and no copy of it is under way; several jobs may copy it.

The scheduler never lets a block go that it has promised. A block that it forgot, which would be a mistake of ours, is
let go after an age that no promise reaches. One lock guards all blocks here; nothing blocks while it is held.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pykvcache_connector.worker.copies import Copier, Copy
from pykvcache_connector.worker.files import BlockFiles, Target
from pykvcache_connector.worker.layout import BlockLayout, BlockRows
from pykvcache_connector.worker.outcomes import Outcomes
from pykvcache_contract.errors import CorruptBlockError
from pykvcache_contract.keys import BlockKey
from pykvcache_storage.memory import Slot
from pykvcache_storage.reactor.operations import Await, Task
from pykvcache_storage.reactor.reactor import Priority, Reactor

logger = logging.getLogger(__name__)

NO_ROWS = BlockRows((), 0)


@dataclass(slots=True, eq=False)
class StagedBlock:
    """One block on its way into a slot, or waiting there.

    Args:
        ticket: the scheduler's number of this reading.
        ready: mark of the compute work at submission; the copier wants one.
        touched: when the scheduler last spoke of it.
        slot: where it is, once verified.
        copies: load jobs that are copying it now.
        leave: ends the sleeping task.
    """

    ticket: int
    offload_key: bytes
    key: BlockKey
    generation: int
    ready: Any
    touched: float
    slot: Slot | None = None
    copies: int = 0
    is_released: bool = False
    leave: Callable[[Any], None] | None = None


class StagedBlocks:
    """All staged blocks of a worker.

    Args:
        blocks_max: a ticket beyond it is ignored; its request then waits until its deadline and is a miss.
        age_seconds_max: a block that the scheduler has not spoken of for longer is let go.
    """

    def __init__(
        self,
        files: BlockFiles,
        layouts: Mapping[int, BlockLayout],
        *,
        reactor: Reactor,
        copier: Copier,
        outcomes: Outcomes,
        blocks_max: int,
        age_seconds_max: float,
    ) -> None:
        self._files = files
        self._layouts = layouts
        self._reactor = reactor
        self._copier = copier
        self._outcomes = outcomes
        self._blocks_max = blocks_max
        self._age_seconds_max = age_seconds_max
        self._lock = threading.Lock()
        self._blocks: dict[int, StagedBlock] = {}
        self._by_key: dict[bytes, StagedBlock] = {}

    # ---- vLLM's worker thread ----

    def stage(self, ticket: int, offload_key: bytes, target: Target) -> None:
        """Start reading a block, or keep the one of this ticket for longer."""
        with self._lock:
            known = self._blocks.get(ticket)
            if known is not None:
                known.touched = time.monotonic()
                return
            if len(self._blocks) >= self._blocks_max:
                logger.warning("a block is not staged: %d are, which is the most", len(self._blocks))
                return
            key = self._files.key(offload_key, target)
            block = StagedBlock(
                ticket, offload_key, key, target.generation, self._copier.mark(), touched=time.monotonic()
            )
            self._blocks[ticket] = self._by_key[offload_key] = block
        self._reactor.submit(
            lambda slot: None if block.is_released else self._read(block, slot),
            priority=Priority.DEMAND,
            on_done=lambda result: self._settle(block, result),
        )

    def release(self, tickets: Iterable[int]) -> None:
        """Let blocks go; their slots are free when no copy of them is under way."""
        with self._lock:
            for ticket in tickets:
                if ticket in self._blocks:
                    self._release(self._blocks[ticket])

    def release_all(self) -> None:
        """Let all blocks go."""
        with self._lock:
            for block in list(self._blocks.values()):
                self._release(block)

    def release_forgotten(self) -> None:
        """Let blocks go that the scheduler must have forgotten."""
        limit = time.monotonic() - self._age_seconds_max
        with self._lock:
            forgotten = [block for block in self._blocks.values() if block.touched < limit]
            for block in forgotten:
                self._release(block)
        if forgotten:
            logger.warning("%d staged blocks were never let go; please report it", len(forgotten))

    def claim(self, offload_key: bytes) -> StagedBlock | None:
        """Return the block to copy from, if it is staged; the caller calls `copied` after its copy."""
        with self._lock:
            block = self._by_key.get(offload_key)
            if block is None or block.slot is None:
                return None
            block.copies += 1
            return block

    # ---- any thread ----

    def copied(self, block: StagedBlock) -> None:
        """Note the end of a copy."""
        with self._lock:
            block.copies -= 1
            self._let_go(block)

    def _release(self, block: StagedBlock) -> None:
        self._blocks.pop(block.ticket, None)
        if self._by_key.get(block.offload_key) is block:
            del self._by_key[block.offload_key]
        block.is_released = True
        self._let_go(block)

    def _let_go(self, block: StagedBlock) -> None:
        if block.is_released and not block.copies and block.leave is not None:
            leave, block.leave = block.leave, None
            leave(None)

    # ---- the reactor's thread ----

    def _read(self, block: StagedBlock, slot: Slot) -> Task[None]:
        self._outcomes.staging_began(block)
        slot = slot.front(self._layouts[block.key.group].file_size_bytes)
        try:
            header = yield from self._files.read(block.key, slot)
            if self._files.verify_payload:
                checksum = yield self._checksum(block, slot)
                self._files.check(block.key, header, checksum)
        except CorruptBlockError as error:
            self._fail(block, error)
            yield from self._files.set_aside(block.key, block.offload_key, block.generation, error)
            return
        self._outcomes.staging_ended(block)
        with self._lock:
            block.slot = slot
        self._outcomes.staged(block.ticket, block.generation)
        yield Await(lambda resume: self._sleep(block, resume))

    def _checksum(self, block: StagedBlock, slot: Slot) -> Await:
        def start(resume: Callable[[Any], None]) -> None:
            self._copier.submit(
                Copy(
                    slot,
                    NO_ROWS,
                    block.ready,
                    is_store=False,
                    wants_checksum=True,
                    on_done=resume,
                    group=block.key.group,
                )
            )

        return Await(start)

    def _sleep(self, block: StagedBlock, resume: Callable[[Any], None]) -> None:
        with self._lock:
            block.leave = resume
            self._let_go(block)

    def _settle(self, block: StagedBlock, result: Any) -> None:
        """Note the end of a task. Where a staged block's was cut off with the reactor, its slot is not used again."""
        if isinstance(result, Exception) and block.slot is None:
            self._fail(block, result)

    def _fail(self, block: StagedBlock, error: Exception) -> None:
        self._outcomes.staging_ended(block)
        self._outcomes.load_failed(block.offload_key, block.generation, error)
        self.release([block.ticket])
