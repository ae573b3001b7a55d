"""Which blocks the workers must have read before vLLM is promised a load: two-phase loads, the scheduler's side.

Facts: vLLM cannot recompute a block that it was promised when the model has several KV-cache groups; slots are few;
requests share blocks. Therefore a request names everything that its load would need; the workers read it, and only
when every rank has verified every block may vLLM be told. A block that cannot be read is a miss, and the request
chooses anew.

Two requests that each hold half of the slots and wait for the rest would wait for ever: so a request is admitted only
when all its blocks fit, first come, first served, and until then holds nothing. A promised block is never let go: loads
under way hold their blocks too. What waits longer than the deadline is recomputed. Owned by the scheduler's thread.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pykvcache_connector.messages import StagingOrders
from pykvcache_connector.vllm_api import GroupShape

logger = logging.getLogger(__name__)


class Progress(Enum):
    """How far the blocks of a request are."""

    WAITING = "waiting"
    READY = "ready"
    LATE = "late"


@dataclass(slots=True)
class _Block:
    """A block that workers read or hold. It is held while a request wants it or a load copies it."""

    ticket: int
    ranks: int = 0
    requests: set[str] = field(default_factory=set)
    loads: int = 0

    @property
    def is_held(self) -> bool:
        return bool(self.requests or self.loads)


@dataclass(slots=True)
class _Wish:
    """What a request wants; it holds its blocks once it is admitted. `is_void`: one of them could not be read."""

    deadline: float
    keys: frozenset[bytes] = frozenset()
    missing: int = 0
    is_admitted: bool = False
    is_void: bool = False
    is_late: bool = False


class Staging:
    """The blocks of all requests that are to be loaded in two phases.

    Args:
        timeout_seconds: from a request's first wish until it is given up.
        on_late: called once for each request that is given up, with whether reads are what it still waited for.
        clock: monotonic seconds; a parameter for tests.
    """

    def __init__(
        self, *, timeout_seconds: float, on_late: Callable[[bool], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout = timeout_seconds
        self._on_late = on_late
        self._clock = clock
        self._blocks_max = 0
        self._rank_count = 0
        self._blocks: dict[bytes, _Block] = {}
        self._keys: dict[int, bytes] = {}
        self._wishes: dict[str, _Wish] = {}
        self._queue: dict[str, None] = {}
        self._held = 0
        self._ticket = 0
        self._number = 0
        self._to_stage: dict[int, bytes] = {}
        self._to_release: list[int] = []

    def start(self, *, blocks_max: int, rank_count: int) -> None:
        """Switch two-phase loads on.

        Args:
            blocks_max: most blocks that may be held at once on every rank.
            rank_count: ranks that must have a block before it counts.
        """
        self._blocks_max = blocks_max
        self._rank_count = rank_count

    @property
    def blocks_max(self) -> int:
        """Return the most blocks that one request can have; 0 where loads are not in two phases."""
        return self._blocks_max

    # ---- requests ----

    def want(self, request_id: str, keys: Sequence[bytes]) -> Progress:
        """Say which blocks a request's load needs, no more than `blocks_max`, and return how far they are.

        A request that is late stays so until it is forgotten. One that wants others than before is admitted anew,
        before those that wait, and keeps its deadline.
        """
        wish = self._wishes.get(request_id)
        if wish is None:
            wish = self._wishes[request_id] = _Wish(self._clock() + self._timeout)
        if self._is_late(request_id, wish):
            return Progress.LATE
        wanted = frozenset(keys)
        if wanted != wish.keys or wish.is_void:
            is_next = wish.is_admitted or wish.is_void
            self._let_go(request_id, wish)
            wish.keys, wish.is_void = wanted, False
            self._queue = {request_id: None, **self._queue} if is_next else {**self._queue, request_id: None}
        self._admit()
        return Progress.READY if wish.is_admitted and not wish.missing else Progress.WAITING

    def is_waiting(self, request_id: str) -> bool:
        """Return whether asking again would change nothing."""
        wish = self._wishes.get(request_id)
        return (
            wish is not None
            and not (wish.is_void or wish.is_late)
            and (not wish.is_admitted or wish.missing > 0)
            and self._clock() < wish.deadline
        )

    def drop(self, request_id: str) -> None:
        """Let go what a request wanted; it loads nothing. A late one stays late.

        Why a load is given up must not depend on who is asked first at its deadline: the workers tell of a hanging disk
        a moment later, and their news may come in the same step.
        """
        wish = self._wishes.get(request_id)
        if wish is not None and not self._is_late(request_id, wish):
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Let go what a request wanted; it is gone."""
        wish = self._wishes.pop(request_id, None)
        if wish is not None:
            self._let_go(request_id, wish)

    def load_began(self, request_id: str, keys: Collection[bytes]) -> None:
        """Hold the blocks of a load until it ends, instead of its request's wishes."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.ranks < self._rank_count:
                logger.error("a block was promised that is not staged; it is read now. Please report it")
            if block is not None:
                self._held += not block.is_held
                block.loads += 1
        self.forget(request_id)

    def load_ended(self, keys: Collection[bytes]) -> None:
        """Let go the blocks of a load that is over on every rank."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.loads:
                block.loads -= 1
                self._held -= not block.is_held

    # ---- workers ----

    def orders(self) -> StagingOrders | None:
        """Return what to tell the workers in this step, None if nothing."""
        for request_id, wish in self._wishes.items():
            self._is_late(request_id, wish)
        self._admit()
        for key in [key for key, block in self._blocks.items() if not block.is_held]:
            self._release(key)
        if not self._to_stage and not self._to_release:
            return None
        self._number += 1
        orders = StagingOrders(self._number, self._to_stage, tuple(self._to_release))
        self._to_stage, self._to_release = {}, []
        return orders

    def staged(self, ranks_by_ticket: Mapping[int, int]) -> None:
        """Take in on how many further ranks blocks are staged."""
        for ticket, ranks in ranks_by_ticket.items():
            block = self._blocks.get(self._keys.get(ticket, b""))
            if block is None or block.ticket != ticket:
                continue
            block.ranks += ranks
            if block.ranks == self._rank_count:
                for request_id in block.requests:
                    self._wishes[request_id].missing -= 1

    def failed(self, key: bytes) -> None:
        """Take in that a block cannot be read on some rank: whoever wants it must choose anew."""
        block = self._blocks.get(key)
        if block is None or block.loads or block.ranks == self._rank_count:
            # Staged blocks stay usable whatever became of their files.
            return
        for request_id in list(block.requests):
            wish = self._wishes[request_id]
            self._let_go(request_id, wish)
            wish.is_void = True
        self._release(key)

    def reset(self) -> None:
        """Forget everything: workers let all blocks go when the generation changes."""
        for request_id in list(self._wishes):
            self.forget(request_id)
        self._blocks.clear()
        self._keys.clear()
        self._to_stage, self._to_release = {}, []
        self._held = 0

    def abandon(self) -> None:
        """Let go what requests want: the cache was turned off."""
        for request_id in list(self._wishes):
            self.forget(request_id)

    # ---- own ----

    def _is_late(self, request_id: str, wish: _Wish) -> bool:
        if not wish.is_late and self._clock() >= wish.deadline:
            waited_for_reads = wish.is_admitted and wish.missing > 0
            self._let_go(request_id, wish)
            wish.is_late = True
            self._on_late(waited_for_reads)
        return wish.is_late

    def _admit(self) -> None:
        while self._queue:
            request_id = next(iter(self._queue))
            wish = self._wishes[request_id]
            new = sum(1 for key in wish.keys if key not in self._blocks or not self._blocks[key].is_held)
            if self._held + new > self._blocks_max:
                return
            del self._queue[request_id]
            wish.is_admitted = True
            for key in wish.keys:
                self._hold(key, request_id, wish)

    def _hold(self, key: bytes, request_id: str, wish: _Wish) -> None:
        block = self._blocks.get(key)
        if block is None:
            self._ticket += 1
            block = self._blocks[key] = _Block(self._ticket)
            self._keys[block.ticket] = key
        self._held += not block.is_held
        block.requests.add(request_id)
        wish.missing += block.ranks < self._rank_count
        # Known to the workers or not: they hold it longer for being told again.
        self._to_stage[block.ticket] = key

    def _let_go(self, request_id: str, wish: _Wish) -> None:
        self._queue.pop(request_id, None)
        if wish.is_admitted:
            for key in wish.keys:
                block = self._blocks.get(key)
                if block is not None and request_id in block.requests:
                    block.requests.remove(request_id)
                    self._held -= not block.is_held
        wish.keys, wish.missing, wish.is_admitted = frozenset(), 0, False

    def _release(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        del self._keys[block.ticket]
        self._to_stage.pop(block.ticket, None)
        self._to_release.append(block.ticket)


# ---- which blocks a load needs ----


def needed(shape: GroupShape, *, computed_tokens: int, end_tokens: int) -> range:
    """Return the indices of a group's offloaded blocks that vLLM loads at most, to have tokens up to `end_tokens`.

    >>> needed(GroupShape(0, 1, 64), computed_tokens=70, end_tokens=256)
    range(1, 4)
    >>> needed(GroupShape(0, 1, 64, window_blocks=1), computed_tokens=0, end_tokens=255)
    range(2, 4)
    """
    last = -(-end_tokens // shape.tokens_per_block)
    first = computed_tokens // shape.tokens_per_block
    if shape.window_blocks is not None:
        # Where the end lies inside a block, the window begins up to a block earlier.
        reach = shape.window_blocks + (end_tokens % shape.tokens_per_block != 0)
        first = max(first, last - reach)
    return range(first, last)


def longest_end(shapes: Sequence[GroupShape], *, computed_tokens: int, end_tokens: int, blocks_max: int) -> int:
    """Return the last end of a prefix up to `end_tokens` whose load needs no more blocks than may be staged."""

    def count(end: int) -> int:
        return sum(len(needed(shape, computed_tokens=computed_tokens, end_tokens=end)) for shape in shapes)

    step = max(shape.tokens_per_block for shape in shapes)
    while end_tokens > computed_tokens and count(end_tokens) > blocks_max:
        end_tokens = (end_tokens - 1) // step * step
    return max(end_tokens, computed_tokens)


def smallest_blocks_max(shapes: Sequence[GroupShape]) -> int:
    """Return the fewest blocks that must be staged at once for any load."""
    step = max(shape.tokens_per_block for shape in shapes)
    return sum(len(needed(shape, computed_tokens=0, end_tokens=step)) for shape in shapes)
