"""Which offloaded blocks are known to exist.

A memory of answers, not a copy of the pool: it starts empty, learns from lookups and from this engine's own stores, and
forgets the oldest when it is full. So a start-up never scans the pool, however many blocks it holds (ADR 0007).
Owned by the scheduler's thread.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

DEFAULT_CAPACITY = 1_000_000
"""Keys remembered: 106 MiB (measured by pykvcache_bench.lookup), enough for a pool of 28 TB in 28 MiB blocks."""

DROPPED_SHARE = 256
"""A full index drops this fraction of its keys at once. Finding a dictionary's oldest key means stepping over all that
were deleted before it: one at a time, an addition to a full index of a million keys took 0.25 ms."""

DENIAL_SECONDS = 600.0
"""How long a block whose file cannot be read stays a miss, before it is tried again."""


class Index:
    """A bounded set of offload keys, oldest out first; and keys that must count as missing for a while.

    A dictionary of bytes to None is invisible to Python's garbage collector, so its size costs no pauses.

    Args:
        clock: monotonic seconds; a parameter for tests.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._present: dict[bytes, None] = {}
        self._denied: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, key: bytes) -> bool:
        return key in self._present

    def add(self, key: bytes) -> None:
        """Remember that a block exists; a denied one stays missing."""
        if self.is_denied(key):
            return
        self._present[key] = None
        self._drop_oldest(self._present)

    def learn(self, *, present: Sequence[bytes], absent: Sequence[bytes]) -> None:
        """Take in what a lookup found: hundreds of keys at a time, so without a call for each."""
        if self._denied:
            present = [key for key in present if not self.is_denied(key)]
        self._present.update(dict.fromkeys(present))
        self._drop_oldest(self._present)
        if not self._present.keys().isdisjoint(absent):
            for key in absent:
                self.discard(key)

    def discard(self, key: bytes) -> None:
        """Forget a block that is no longer there."""
        self._present.pop(key, None)

    def deny(self, key: bytes) -> None:
        """Make a key a miss for a while: its file is there but cannot be read, and asking again would fail again."""
        self.discard(key)
        self._denied[key] = self._clock() + DENIAL_SECONDS
        self._drop_oldest(self._denied)

    def is_denied(self, key: bytes) -> bool:
        """Return whether the key must count as missing now."""
        until = self._denied.get(key)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._denied[key]
        return False

    def clear(self) -> None:
        """Forget everything: the blocks belong to another fingerprint now."""
        self._present.clear()
        self._denied.clear()

    def _drop_oldest(self, keys: dict[bytes, Any]) -> None:
        excess = len(keys) - self._capacity
        if excess > 0:
            for key in list(islice(keys, max(excess, self._capacity // DROPPED_SHARE))):
                del keys[key]
