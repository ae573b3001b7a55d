"""A simulated disk: a ring whose kernel is a few lines of Python, with seeded order and injected faults.

It passes the conformance suite of the real rings. Operations in flight take effect one after the other in a random
order, some of them only with a later `wait`, as on a real disk; the seed makes a run repeatable, and belongs into the
message of a failed test.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from errno import EIO

from pykvcache_storage.reactor.operations import Read, RingOperation, Write
from pykvcache_storage.testing.filesystem import SECTOR_SIZE_BYTES, MemoryFilesystem

Kind = type[RingOperation]


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: Kind
    first: int
    last: int
    error: int = 0
    shorten: bool = False
    hang: bool = False


class SimulatedDisk:
    """Implements `Ring` over files in memory.

    Args:
        seed: of order, short lengths and losses.
        root: absolute path of the directory that exists at first.
        filesystem: the state to go on from; a fresh one by default.

    `fail`, `shorten` and `hang` concern the `nth` operation of a kind from the call on (1 is the next), and the
    `times - 1` that follow it; operations count when they take effect, not when they are submitted.
    """

    name = "simulated"

    def __init__(self, seed: int = 0, *, root: str = "/disk", filesystem: MemoryFilesystem | None = None) -> None:
        self.seed = seed
        self.files = filesystem or MemoryFilesystem(root)
        self.root = self.files.root
        self.history: list[RingOperation] = []
        self._random = random.Random(seed)
        self._faults: list[_Fault] = []
        self._counts: Counter[Kind] = Counter()
        self._operations_left: int | None = None
        self._pending: list[tuple[RingOperation, int]] = []
        self._hung: list[tuple[RingOperation, int]] = []
        # Guards _pending, _hung and _woken: tests wake and release from their own threads.
        self._changed = threading.Condition()
        self._woken = False
        self.closed = False

    # ---- faults ----

    def fail(self, kind: Kind, *, error: int, nth: int = 1, times: int = 1) -> None:
        """Let operations fail with an errno, without any effect. `times` > 1 with EINTR is a storm."""
        self._add(kind, nth, times, lambda fault: replace(fault, error=error))

    def shorten(self, kind: type[Read | Write], *, nth: int = 1, times: int = 1) -> None:
        """Let reads or writes move fewer bytes than asked for: whole sectors, at least one."""
        self._add(kind, nth, times, lambda fault: replace(fault, shorten=True))

    def hang(self, kind: Kind, *, nth: int = 1, times: int = 1) -> None:
        """Let operations never complete, until `release`."""
        self._add(kind, nth, times, lambda fault: replace(fault, hang=True))

    def release(self) -> None:
        """Let hung operations go on, and no more hang. Callable from any thread."""
        with self._changed:
            self._faults = [fault for fault in self._faults if not fault.hang]
            self._pending += self._hung
            self._hung.clear()
            self._changed.notify_all()

    def crash_after(self, count: int) -> None:
        """Let `count` more operations happen; all later ones fail with EIO and have no effect."""
        self._operations_left = count

    @property
    def crashed(self) -> bool:
        """Whether the crash has come."""
        return self._operations_left == 0

    def restart(self, *, power_loss: bool) -> "SimulatedDisk":
        """Return the disk as the next process finds it; with `power_loss`, without what was not durable."""
        if power_loss:
            self.files.lose_power(self._random)
        else:
            self.files.lose_processes()
        return SimulatedDisk(self._random.randrange(1 << 32), filesystem=self.files)

    def _add(self, kind: Kind, nth: int, times: int, adjust: Callable[[_Fault], _Fault]) -> None:
        first = self._counts[kind] + nth
        self._faults.append(adjust(_Fault(kind, first, first + times - 1)))

    # ---- Ring ----

    def submit(self, operation: RingOperation, token: int) -> None:
        """Queue one operation."""
        with self._changed:
            self._pending.append((operation, token))

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        """Let some of the operations in flight take effect; sleep if there are none."""
        completions: list[tuple[int, int]] = []
        with self._changed:
            while not completions and not self._woken:
                if self._pending:
                    completions = self._complete_some()
                elif not self._changed.wait(timeout_seconds):
                    break
            self._woken = False
        return completions

    def wake(self) -> None:
        """Make a present or the next `wait` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Release the ring; the files stay."""
        self.closed = True

    def _complete_some(self) -> list[tuple[int, int]]:
        self._random.shuffle(self._pending)
        count = self._random.randint(1, len(self._pending))
        chosen, self._pending = self._pending[:count], self._pending[count:]
        completions = []
        for operation, token in chosen:
            result = self._perform(operation)
            if result is None:
                self._hung.append((operation, token))
            else:
                completions.append((token, result))
        return completions

    def _perform(self, operation: RingOperation) -> int | None:
        """Return the result, or None if the operation hangs."""
        if self.crashed:
            return -EIO
        kind = type(operation)
        self._counts[kind] += 1
        for fault in self._faults:
            if fault.kind is kind and fault.first <= self._counts[kind] <= fault.last:
                if fault.hang:
                    return None
                if fault.error:
                    return -fault.error
                operation = self._shortened(operation)
        if self._operations_left is not None:
            self._operations_left -= 1
        self.history.append(operation)
        return self.files.perform(operation)

    def _shortened(self, operation: RingOperation) -> RingOperation:
        assert isinstance(operation, Read | Write)
        sectors = operation.size_bytes // SECTOR_SIZE_BYTES
        if sectors < 2:
            return operation
        return replace(operation, size_bytes=self._random.randrange(1, sectors) * SECTOR_SIZE_BYTES)
