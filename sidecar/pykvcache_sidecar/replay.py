"""Serves a trace from a simulated pool, and counts what was found.

What is simulated: a request finds the blocks that are there from its head to the first hole; those of its blocks that
are there are noted as used, once per minute of the clock (contract: recency.py); the others are stored, unless the pool
is at its capacity, where writers stop. Between requests, once an interval, the sidecar looks: above the high watermark
it evicts down to the low one, in the order of its policy. What is not: time to compute, write and remove, write
budgets, and what GPU memory served, which a trace does not tell; all pools are wrong in the same way.

How: within one fingerprint every policy keeps the order of modification times (policy.py), so each has a heap by them,
and an eviction compares only the heads of the heaps. A block that is used again gets a new entry; the old one is found
stale when it comes up, and a heap half full of stale ones is made anew. A block of a request takes 1 to 2 µs of a core
for each pool (docs/benchmarks.md); a block that is there takes some 250 bytes of memory, one of the endless pool 100.

Pure computation; the clock is the trace's.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from pykvcache_contract.recency import QUANTUM_SECONDS, recency_ns
from pykvcache_sidecar.policy import BlockUse, Policy, make_policy
from pykvcache_sidecar.trace import Request

_STALE_ENTRIES_MIN = 1024
"""Fewer are not worth making a heap anew."""


@dataclass(slots=True)
class Tally:
    """What requests of one fingerprint, or of all, found and left."""

    requests: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    lookup_bytes: int = 0
    hit_bytes: int = 0
    stored_bytes: int = 0
    refused_bytes: int = 0
    evicted_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the share of the tokens looked up that were found."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    def add(self, other: "Tally") -> None:
        """Add another's figures."""
        for each in fields(Tally):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def note(self, request: Request, hits: int) -> None:
        """Count a request that found so many of its blocks."""
        self.requests += 1
        self.lookup_tokens += len(request.blocks) * request.tokens_per_block
        self.hit_tokens += hits * request.tokens_per_block
        self.lookup_bytes += len(request.blocks) * request.block_bytes
        self.hit_bytes += hits * request.block_bytes


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum."""
    result = Tally()
    for tally in tallies:
        result.add(tally)
    return result


def saved_work(tallies: Mapping[str, Tally], costs: Mapping[str, float]) -> float | None:
    """Return the share of the work for all prompts that hits saved; None if no cost is known.

    Work is bytes times what a byte costs.
    """
    if not costs:
        return None
    wanted = sum(tally.lookup_bytes * costs.get(name, 1.0) for name, tally in tallies.items())
    found = sum(tally.hit_bytes * costs.get(name, 1.0) for name, tally in tallies.items())
    return found / wanted if wanted else 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a pool is and when it is tidied.

    Args:
        high, low: shares of the capacity; eviction starts above the one and ends at the other.
        interval_seconds: between two looks of the sidecar.
    """

    capacity_bytes: int
    high: float = 0.9
    low: float = 0.8
    interval_seconds: float = 1.0


@dataclass(slots=True)
class _Shelf:
    """The blocks of one fingerprint.

    Args:
        modified: the modification time of each block that is there.
        heap: times and blocks, oldest first; an entry whose time is not the block's is stale.
    """

    name: str
    block_bytes: int
    modified: dict[int, int] = field(default_factory=dict)
    heap: list[tuple[int, int]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def want(self, blocks: list[int], now: float) -> list[tuple[int, int]]:
        """Note the use of what is there, and return depth and block of what is absent."""
        absent = []
        modified = self.modified
        # What `is_due` says, as one comparison: this loop is nearly all of the time.
        due_ns = recency_ns(now - QUANTUM_SECONDS, 0)
        for depth, block in enumerate(blocks):
            seen_ns = modified.get(block)
            if seen_ns is None:
                absent.append((depth, block))
            elif seen_ns <= due_ns:
                self.put(block, recency_ns(now, depth))
        return absent

    def put(self, block: int, modified_ns: int) -> None:
        self.modified[block] = modified_ns
        heapq.heappush(self.heap, (modified_ns, block))
        if len(self.heap) > 2 * len(self.modified) + _STALE_ENTRIES_MIN:
            self.heap = [(known_ns, known) for known, known_ns in self.modified.items()]
            heapq.heapify(self.heap)

    def oldest(self) -> BlockUse | None:
        """Return the use of the least recent block; None if there is no block."""
        heap, modified = self.heap, self.modified
        while heap:
            modified_ns, block = heap[0]
            if modified.get(block) == modified_ns:
                return BlockUse(self.name, modified_ns, self.block_bytes)
            heapq.heappop(heap)
        return None

    def remove_oldest(self) -> None:
        """Remove the block that `oldest` told."""
        _, block = heapq.heappop(self.heap)
        del self.modified[block]
        self.tally.evicted_bytes += self.block_bytes


class Replay:
    """One simulated pool under one policy.

    Args:
        policy: one of `policy.POLICY_NAMES`.
        costs: from `costs.read_costs`.

    Raises:
        ConfigurationError: no such policy.
    """

    def __init__(self, *, policy: str, costs: Mapping[str, float], bounds: Bounds) -> None:
        make_policy(policy, costs, now_ns=0)
        self.policy = policy
        self.bounds = bounds
        self.used_bytes = 0
        self._costs = costs
        self._shelves: dict[str, _Shelf] = {}
        self._now = -math.inf
        self._next_look = -math.inf

    @property
    def tallies(self) -> dict[str, Tally]:
        """Return what was counted, by fingerprint."""
        return {name: shelf.tally for name, shelf in self._shelves.items()}

    def serve(self, request: Request) -> int:
        """Serve one request and return how many of its blocks were found; time never goes back."""
        self._now = max(self._now, request.seconds)
        self._look()
        shelf = self._shelves.get(request.fingerprint)
        if shelf is None:
            shelf = self._shelves[request.fingerprint] = _Shelf(request.fingerprint, request.block_bytes)
        absent = shelf.want(request.blocks, self._now)
        hits = absent[0][0] if absent else len(request.blocks)
        shelf.tally.note(request, hits)
        self._store(shelf, absent)
        return hits

    def _store(self, shelf: _Shelf, absent: list[tuple[int, int]]) -> None:
        for depth, block in absent:
            if block in shelf.modified:
                continue  # named twice in one request
            if self.used_bytes + shelf.block_bytes > self.bounds.capacity_bytes:
                shelf.tally.refused_bytes += shelf.block_bytes
                continue
            shelf.put(block, recency_ns(self._now, depth))
            shelf.tally.stored_bytes += shelf.block_bytes
            self.used_bytes += shelf.block_bytes

    def _look(self) -> None:
        """Do what the sidecar did since the last request; nothing happened in between, so its first look is all."""
        if self._now < self._next_look:
            return
        if self.used_bytes > self.bounds.high * self.bounds.capacity_bytes:
            self._evict(make_policy(self.policy, self._costs, now_ns=int(self._next_look * 10**9)))
        self._next_look = (self._now // self.bounds.interval_seconds + 1) * self.bounds.interval_seconds

    def _evict(self, policy: Policy) -> None:
        heads = [
            (policy.rank(use), number, shelf)
            for number, shelf in enumerate(self._shelves.values())
            if (use := shelf.oldest()) is not None
        ]
        heapq.heapify(heads)
        while heads and self.used_bytes > self.bounds.low * self.bounds.capacity_bytes:
            _, number, shelf = heads[0]
            shelf.remove_oldest()
            self.used_bytes -= shelf.block_bytes
            use = shelf.oldest()
            if use is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (policy.rank(use), number, shelf))


class Endless:
    """A pool without bounds: every block that was wanted before is found. No policy finds more."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self._seen: dict[str, set[int]] = {}

    def serve(self, request: Request) -> int:
        """Serve one request and return how many of its blocks were found."""
        seen = self._seen.setdefault(request.fingerprint, set())
        hits = next((depth for depth, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        tally = self.tallies.setdefault(request.fingerprint, Tally())
        tally.note(request, hits)
        known_count = len(seen)
        seen.update(request.blocks)
        tally.stored_bytes += (len(seen) - known_count) * request.block_bytes
        return hits
