"""Which blocks were wanted by more than one request: only those may use the whole of a day's write budget.

Most prompts are never seen again, and an SSD wears by what is written. Kept only while the pool has a write budget, so
it costs nothing otherwise. Owned by the scheduler's thread.
"""

from collections.abc import Iterable
from itertools import islice

DEFAULT_CAPACITY = 262_144
"""Keys remembered, about 30 MiB; what has not been wanted for longest is forgotten, and counts as new again."""

DROPPED_SHARE = 256
"""A full memory drops this fraction of its keys at once, as the index does, and for the same reason."""


class Sightings:
    """A bounded memory of keys that requests asked for."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._seen: dict[bytes, bool] = {}
        self.is_on = False

    def __len__(self) -> int:
        return len(self._seen)

    def switch(self, *, on: bool) -> None:
        """Begin to remember, or stop and forget everything."""
        self.is_on = on
        if not on:
            self._seen.clear()

    def note(self, keys: Iterable[bytes]) -> None:
        """Remember the keys that one request wants; once a request."""
        if not self.is_on:
            return
        seen = self._seen
        for key in keys:
            # Taken out first, so that it goes to the end of those that are dropped.
            seen[key] = seen.pop(key, None) is not None
        excess = len(seen) - self._capacity
        if excess > 0:
            for key in list(islice(seen, max(excess, self._capacity // DROPPED_SHARE))):
                del seen[key]

    def is_repeated(self, key: bytes) -> bool:
        """Return whether at least two requests wanted the block, as far as remembered."""
        return self._seen.get(key, False)
