"""Faults inside a running engine: reads or writes that the disk does not answer, files that vanish after lookups.

Installed by the driver before an engine starts, because rings are made at start-up. Product code knows nothing of it.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pykvcache_connector.scheduler.lookup import Lookup
from pykvcache_connector.worker import start
from pykvcache_storage.reactor.operations import Read, RingOperation, Write


class FaultyRing:
    """A ring in front of another; operations that `faults` holds reach the other one only once they are released."""

    def __init__(self, inner: Any, faults: "Faults") -> None:
        self.inner = inner
        self.name = inner.name
        self._faults = faults

    def submit(self, operation: RingOperation, token: int) -> None:
        if not self._faults.hold(self, operation, token):
            self.inner.submit(operation, token)

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        for operation, token in self._faults.take_released(self):
            self.inner.submit(operation, token)
        return [completion for completion in self.inner.wait(timeout_seconds) if completion[0] != _NOBODY]

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


class Faults:
    """What is switched on; called on the driver's thread and on the reactor's and lookup's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings: list[FaultyRing] = []
        self._held: list[tuple[FaultyRing, RingOperation, int]] = []
        self._reads_left: int | None = None
        self._writes_left: int | None = None
        self._victims: Path | None = None
        self._lookups_left = 0
        self._undo: list[Callable[[], None]] = []

    # ---- installation ----

    def patch(self, owner: Any, name: str, replacement: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        self._undo.append(lambda: setattr(owner, name, original))

    def remove(self) -> None:
        """Let everything go on and take the faults out again."""
        self.release()
        while self._undo:
            self._undo.pop()()

    def wrap_ring(self, inner: Any) -> FaultyRing:
        ring = FaultyRing(inner, self)
        self._rings.append(ring)
        return ring

    # ---- calls of the driver ----

    def hold_reads(self, after: int = 0) -> None:
        """After so many reads no further one is answered."""
        self._reads_left = after

    def hold_writes(self, after: int) -> None:
        """After so many writes each further one does half of its work and is never answered."""
        self._writes_left = after

    def held(self) -> int:
        """Return how many operations are held."""
        with self._lock:
            return len(self._held)

    def held_reads(self) -> int:
        """Return how many reads are held."""
        with self._lock:
            return sum(isinstance(operation, Read) for _, operation, _ in self._held)

    def release_writes(self) -> None:
        """Answer the writes that were held, and hold no more; reads stay as they are."""
        with self._lock:
            self._writes_left = None
        for ring in self._rings:
            ring.wake()

    def release(self) -> None:
        """Answer what was held, and hold no more."""
        with self._lock:
            self._reads_left = None
        self.release_writes()

    def delete_after_lookups(self, pool: str, count: int) -> None:
        """Delete all block files once so many lookups have looked, before anybody sees the last one's answer."""
        self._victims, self._lookups_left = Path(pool), count

    # ---- other threads ----

    def hold(self, ring: FaultyRing, operation: RingOperation, token: int) -> bool:
        with self._lock:
            if isinstance(operation, Read) and self._reads_left is not None:
                return self._count_read(ring, operation, token)
            if isinstance(operation, Write) and self._writes_left is not None:
                return self._count_write(ring, operation, token)
        return False

    def _count_read(self, ring: FaultyRing, operation: Read, token: int) -> bool:
        if self._reads_left:
            self._reads_left -= 1
            return False
        self._held.append((ring, operation, token))
        return True

    def _count_write(self, ring: FaultyRing, operation: Write, token: int) -> bool:
        if self._writes_left:
            self._writes_left -= 1
            return False
        half = operation.size_bytes // 8192 * 4096
        ring.inner.submit(Write(operation.descriptor, operation.address, half, operation.offset), _NOBODY)
        self._held.append((ring, operation, token))
        return True

    def take_released(self, ring: FaultyRing) -> list[tuple[RingOperation, int]]:
        with self._lock:
            released = [item for item in self._held if item[0] is ring and not self._is_holding(item[1])]
            self._held = [item for item in self._held if item not in released]
            return [(operation, token) for _, operation, token in released]

    def _is_holding(self, operation: RingOperation) -> bool:
        return (self._reads_left if isinstance(operation, Read) else self._writes_left) is not None

    def answered(self) -> None:
        self._lookups_left -= 1
        if self._victims is not None and not self._lookups_left:
            for file in self._victims.glob("*/r*/*/*/*.kvb"):
                file.unlink(missing_ok=True)


_NOBODY = 1 << 40
"""A token that no task has."""


def install() -> Faults:
    """Put the faults in place, all switched off."""
    faults = Faults()
    make_ring, answer = start.make_ring, Lookup._find_all

    def make_faulty_ring(*arguments: Any, **options: Any) -> FaultyRing:
        return faults.wrap_ring(make_ring(*arguments, **options))

    def answer_then_fail(lookup: Lookup, question: Any) -> Any:
        result = answer(lookup, question)
        faults.answered()
        return result

    faults.patch(start, "make_ring", make_faulty_ring)
    faults.patch(Lookup, "_find_all", answer_then_fail)
    return faults
