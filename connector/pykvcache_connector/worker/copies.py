"""Copies between KV tensors and staging slots, with the payload's checksum on the way. One thread of its own.

Facts: KV pages of a block are scattered over rows of one or many tensors; one large copy reaches the PCIe bandwidth and
many small ones do not; a CPU core checks 8-16 GB/s and a GPU thousands. Therefore on a GPU the pages are gathered into
(scattered from) a scratch buffer in GPU memory, which is copied whole and whose checksum the GPU computes. Copies wait
for the compute stream's work at submission: a load must not overwrite blocks that the running step still reads, a store
must see what it wrote.

On the CPU the slot itself is the scratch, and numpy copies and sums: torch would give this thread a team of OpenMP
threads of its own, as many as there are processors, and they fight with vLLM's team, which waits at every barrier for
its slowest thread. [measured] 2 cores, 120 million parameters: storing cost 15 % of vLLM's time, with numpy 2 %.

A damaged payload may reach the KV rows of its own request before the checksum is known; the block is then reported
as failed before vLLM lets the request use it.
"""

import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pykvcache_connector.worker.checksum import Checksum, unsigned
from pykvcache_connector.worker.layout import BlockLayout, BlockRows
from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_storage.checksum import checksum
from pykvcache_storage.memory import Slot, StagingMemory

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

LANES = 3
"""Copies in flight on a GPU, each with its own stream and scratch buffer: enough to hide launches behind PCIe."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One block to copy between its rows and a slot; a load without rows only computes the checksum of the slot.

    Args:
        slot: exactly as long as the block's file.
        ready: from `Copier.mark`, at submission on vLLM's thread.
        on_done: called on the copy thread with the payload's checksum (unsigned) or an exception.
        is_store: rows → slot; else slot → rows.
        wants_checksum: False skips it (then 0 is given).
        group: the KV-cache group whose tensors the rows are of.
    """

    slot: Slot
    rows: BlockRows
    ready: Any
    is_store: bool
    wants_checksum: bool
    on_done: Callable[[Any], None]
    group: int = 0


class Copier(Protocol):
    """Runs copies in order of submission, on its own thread."""

    def mark(self) -> Any:
        """Return a mark of the compute work issued so far; called on vLLM's thread."""

    def submit(self, copy: Copy) -> None:
        """Queue a copy; never blocks."""

    def close(self) -> None:
        """End the thread after the copies queued so far."""


class KVTensors:
    """The KV cache of one group as rows of words.

    Args:
        tensors: int8, shape (GPU blocks, row size), rows contiguous; owned by vLLM.
        layout: pages taken of each row.
        group: vLLM's number of it.

    Attributes:
        parts: for each tensor its pages as words, their place in the payload, and the bytes of one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: BlockLayout, group: int = 0) -> None:
        self.layout = layout
        self.group = group
        self.device = tensors[0].device
        self.parts = [
            (_as_words(tensor[:, :size], offset), offset, size)
            for tensor, (offset, size) in zip(tensors, layout.segments(), strict=True)
        ]

    def gather(self, rows: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy the pages of a whole offloaded block into a payload; `rows` is int64 on the tensors' device.

        Raises:
            ValueError: fewer pages than a block has; the rest of the payload would be another block's bytes.
        """
        self.layout.check_whole(len(rows))
        for words, offset, size in self.parts:
            target = payload[offset : offset + self.layout.blocks * size].view(words.dtype).view(len(rows), -1)
            torch.index_select(words, 0, rows, out=target)
        payload[self.layout.used_size_bytes :].zero_()

    def scatter(self, rows: torch.Tensor, first_page: int, payload: torch.Tensor) -> None:
        """Copy pages first_page … of a payload into rows."""
        for words, offset, size in self.parts:
            pages = payload[offset : offset + self.layout.blocks * size].view(words.dtype).view(self.layout.blocks, -1)
            words.index_copy_(0, rows, pages[first_page : first_page + len(rows)])


def _as_words(pages: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the pages as 64-bit words where sizes and their place in the payload allow it: an eighth of the moves."""
    aligned = all(size % 8 == 0 for size in (pages.shape[1], pages.stride(0), pages.data_ptr(), offset))
    return pages.view(torch.int64) if aligned else pages.view(torch.uint8)


def payload_of(slot: Slot) -> torch.Tensor:
    """Return the slot's payload as a uint8 tensor over the same memory."""
    return torch.frombuffer(slot.data, dtype=torch.uint8)[HEADER_SIZE_BYTES:]


class _CopyThread:
    """The queue and thread that both copiers share; `None` ends it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="pykvcache-copies", daemon=True)

    def submit(self, copy: Copy) -> None:
        """Queue a copy; never blocks."""
        self._queue.put(copy)

    def close(self) -> None:
        """End the thread after the copies queued so far."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _main(self) -> None:
        raise NotImplementedError


class _HostPages:
    """The rows of one group as numpy sees them; the same memory as its tensors."""

    def __init__(self, tensors: KVTensors) -> None:
        self._layout = tensors.layout
        self._parts = [(words.numpy(), offset, size) for words, offset, size in tensors.parts]

    def gather(self, rows: Sequence[int], payload: Bytes) -> None:
        """Copy the pages of a whole offloaded block into a payload; see `KVTensors.gather`."""
        self._layout.check_whole(len(rows))
        for words, offset, size in self._parts:
            for row, page in zip(rows, self._pages(payload, words.dtype, offset, size), strict=True):
                page[:] = words[row]
        payload[self._layout.used_size_bytes :] = 0

    def scatter(self, rows: Sequence[int], first_page: int, payload: Bytes) -> None:
        """Copy pages first_page … of a payload into rows."""
        for words, offset, size in self._parts:
            pages = self._pages(payload, words.dtype, offset, size)
            for row, page in zip(rows, pages[first_page : first_page + len(rows)], strict=True):
                words[row] = page

    def _pages(self, payload: Bytes, words: Any, offset: int, size: int) -> Any:
        blocks = self._layout.blocks
        return payload[offset : offset + blocks * size].view(words).reshape(blocks, -1)


class HostCopier(_CopyThread):
    """Copies for KV tensors in host memory (vLLM on the CPU)."""

    def __init__(self, *groups: KVTensors) -> None:
        super().__init__()
        self._pages = {tensors.group: _HostPages(tensors) for tensors in groups}
        self._thread.start()

    def mark(self) -> None:
        """Return nothing: on the CPU a step's work is done when it returns."""

    def _main(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                result: Any = self._run(copy)
            except Exception as error:
                logger.exception("a copy failed; its block is recomputed or not stored")
                result = error
            copy.on_done(result)

    def _run(self, copy: Copy) -> int:
        payload = np.frombuffer(copy.slot.data, np.uint8)[HEADER_SIZE_BYTES:]
        pages = self._pages[copy.group]
        if copy.is_store:
            pages.gather(copy.rows.rows, payload)
        else:
            pages.scatter(copy.rows.rows, copy.rows.first_page, payload)
        return checksum(payload) if copy.wants_checksum else 0


@dataclass(slots=True)
class _Lane:
    """One stream with its scratch buffer, row numbers and checksum on both sides of the bus."""

    stream: Any
    scratch: torch.Tensor
    rows_host: torch.Tensor
    rows: torch.Tensor
    sum_host: torch.Tensor
    done: Any


class CudaCopier(_CopyThread):
    """Copies for KV tensors on a GPU.

    Takes `LANES` × the largest payload of GPU memory, and pins the staging memory.
    """

    def __init__(self, memory: StagingMemory, *groups: KVTensors) -> None:
        super().__init__()
        self._tensors = {tensors.group: tensors for tensors in groups}
        self._checksums = {
            tensors.group: Checksum(tensors.layout.payload_size_bytes, tensors.device) for tensors in groups
        }
        self._device = groups[0].device
        self.is_pinned = _pin(memory)
        self._lanes = collections.deque(self._make_lane() for _ in range(LANES))
        self._in_flight: collections.deque[tuple[_Lane, Copy]] = collections.deque()
        self._thread.start()

    def _make_lane(self) -> _Lane:
        layouts = [tensors.layout for tensors in self._tensors.values()]
        payload_size_bytes = max(layout.payload_size_bytes for layout in layouts)
        blocks = max(layout.blocks for layout in layouts)
        return _Lane(
            stream=torch.cuda.Stream(self._device),
            scratch=torch.zeros(payload_size_bytes, dtype=torch.uint8, device=self._device),
            rows_host=torch.empty(blocks, dtype=torch.int64, pin_memory=True),
            rows=torch.empty(blocks, dtype=torch.int64, device=self._device),
            sum_host=torch.zeros((), dtype=torch.int64, pin_memory=True),
            # blocking: the thread sleeps in the driver instead of spinning while it waits.
            done=torch.cuda.Event(blocking=True),
        )

    def mark(self) -> Any:
        """Return an event behind all compute work issued so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _main(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            copy = self._next()
            if copy is None:
                break
            self._launch(copy)
        while self._in_flight:
            self._retire()

    def _next(self) -> Copy | None:
        """Return the next copy; while there is none, retire what is in flight."""
        while self._in_flight:
            with contextlib.suppress(queue.Empty):
                return self._queue.get_nowait()
            self._retire()
        return self._queue.get()

    def _launch(self, copy: Copy) -> None:
        if not self._lanes:
            self._retire()
        lane = self._lanes.popleft()
        try:
            with torch.cuda.stream(lane.stream):
                self._enqueue(lane, copy)
                lane.done.record(lane.stream)
        except Exception as error:
            logger.exception("a copy failed; its block is recomputed or not stored")
            self._lanes.append(lane)
            copy.on_done(error)
            return
        self._in_flight.append((lane, copy))

    def _enqueue(self, lane: _Lane, copy: Copy) -> None:
        lane.stream.wait_event(copy.ready)
        count = len(copy.rows.rows)
        lane.rows_host[:count] = torch.tensor(copy.rows.rows, dtype=torch.int64)
        rows = lane.rows[:count]
        rows.copy_(lane.rows_host[:count], non_blocking=True)
        payload = payload_of(copy.slot)
        scratch, tensors = lane.scratch[: len(payload)], self._tensors[copy.group]
        if copy.is_store:
            tensors.gather(rows, scratch)
            payload.copy_(scratch, non_blocking=True)
        else:
            scratch.copy_(payload, non_blocking=True)
            tensors.scatter(rows, copy.rows.first_page, scratch)
        if copy.wants_checksum:
            lane.sum_host.copy_(self._checksums[copy.group].of(scratch), non_blocking=True)

    def _retire(self) -> None:
        lane, copy = self._in_flight.popleft()
        result: Any
        try:
            lane.done.synchronize()
            result = unsigned(int(lane.sum_host)) if copy.wants_checksum else 0
        except Exception as error:
            logger.exception("a copy failed; its block is recomputed or not stored")
            result = error
        self._lanes.append(lane)
        copy.on_done(result)


def _pin(memory: StagingMemory) -> bool:
    """Register the staging memory with CUDA; without it copies are right but slow."""
    code = torch.cuda.cudart().cudaHostRegister(memory.address, memory.size_bytes, 0)
    if int(code) != 0:
        logger.warning("staging memory is not pinned (CUDA error %d); copies will be slow", int(code))
        return False
    return True


def make_copier(groups: Sequence[KVTensors], memory: StagingMemory) -> HostCopier | CudaCopier:
    """Return the copier for where the KV cache lies."""
    return CudaCopier(memory, *groups) if groups[0].device.type == "cuda" else HostCopier(*groups)


def cpu_features() -> str:
    """Return the instruction set that vLLM's CPU kernels pack KV pages for; part of the layout."""
    return str(torch.backends.cpu.get_cpu_capability())
