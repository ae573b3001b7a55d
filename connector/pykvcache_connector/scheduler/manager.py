"""Answers vLLM's scheduler: which blocks are on disk, which to load, which to store. Never blocks, sees no bytes.

One per engine, on the scheduler's thread. Three sources feed its index: lookups, the workers' reports, nothing else.
"""

import collections
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pykvcache_connector.messages import BlockKeysSpec, Identity, StagingOrders, StoreNotes, WorkerReport
from pykvcache_connector.scheduler.admission import Admission
from pykvcache_connector.scheduler.index import Index
from pykvcache_connector.scheduler.lookup import Lookup
from pykvcache_connector.scheduler.prefixes import Prefixes
from pykvcache_connector.scheduler.sightings import Sightings
from pykvcache_connector.scheduler.staging import Progress, Staging
from pykvcache_connector.scheduler.trace import Trace, Traced
from pykvcache_connector.scheduler.uses import Uses
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import (
    HIT,
    MISS,
    RETRY,
    GroupShape,
    OffloadingManager,
    PrepareStoreOutput,
    default_offloading_context,
    disk_hit_source,
    split_offload_key,
)
from pykvcache_contract import metrics
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_file, quarantine_path, rank_directory

logger = logging.getLogger(__name__)

MAX_EXCLUDED = 65_536
"""Requests remembered as excluded; far more than an engine runs at once."""
CLOSE_SECONDS = 1.0
"""How long the engine's end may wait for the last uses to be noted."""


class Manager(OffloadingManager):
    """The scheduler's half of the cache.

    Args:
        clock: monotonic seconds; a parameter for tests.
        wall_clock: Unix time; a parameter for tests.

    Attributes:
        off_reason: why the cache is off, or None; set by the connector before the first request.
    """

    def __init__(
        self,
        settings: Settings,
        counts: Counts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.counts = counts
        self._clock = clock
        self._index = Index(clock=clock)
        self._uses = Uses(Trace(settings.trace) if settings.trace else None)
        self._lookup = Lookup(on_damaged=self._quarantine, on_use=self._uses.note, clock=clock, wall_clock=wall_clock)
        self._prefixes = Prefixes(clock=wall_clock)
        self._sightings = Sightings()
        self._admission = Admission(settings.load_bytes_in_flight, clock=clock)
        self._generation = 0
        self._identity: Identity | None = None
        self._make_identity: Callable[[int], Identity] | None = None
        self._staging = Staging(
            timeout_seconds=settings.load_timeout_seconds,
            on_late=self._note_late,
            clock=clock,
        )
        self._beyond: dict[str, frozenset[bytes]] = {}
        self._excluded: dict[str, None] = {}
        self._block_sizes: tuple[Mapping[int, int], ...] = ()
        self._writers: tuple[int, ...] = ()
        self._shapes: tuple[GroupShape, ...] = ()
        self._stored_ranks: dict[bytes, int] = {}
        self.off_reason: str | None = "the workers have not started"

    # ---- start-up and every step, called by the connector ----

    def start(
        self,
        make_identity: Callable[[int], Identity],
        *,
        block_sizes: tuple[Mapping[int, int], ...],
        writers: tuple[int, ...],
        shapes: tuple[GroupShape, ...],
        staged_max: int = 0,
    ) -> None:
        """Switch the cache on.

        Args:
            make_identity: gives the identity of a generation; called now, and at every reset.
            block_sizes: size in bytes of each rank's block files, by KV-cache group.
            writers: ranks that write files; all of theirs must exist for a hit.
            shapes: of the KV-cache groups.
            staged_max: most blocks staged at once in two-phase loads; 0: loads are streamed.
        """
        self._make_identity = make_identity
        self._identity = make_identity(self._generation)
        self._block_sizes = block_sizes
        self._writers = writers
        self._shapes = shapes
        self._prefixes.start({shape.group: shape.hashes_per_block for shape in shapes})
        self._staging.start(blocks_max=staged_max, rank_count=len(block_sizes))
        self.off_reason = None

    def identity(self) -> Identity | None:
        """Return where blocks live now, None while the cache is off."""
        return self._identity if self.off_reason is None else None

    def begin(self, request_id: str, keys: list[bytes], *, hashes: Sequence[bytes]) -> None:
        """Start looking up a new request's blocks.

        Args:
            keys: of its whole blocks, group by group.
            hashes: vLLM's own list of the request's block hashes, which grows.
        """
        identity = self.identity()
        if identity is None:
            return
        self._prefixes.begin(request_id, hashes)
        if not keys:
            return
        self._sightings.note(keys)
        deadline = self._clock() + self.settings.lookup_timeout_seconds
        paths, traced = self._paths_of(identity), self._traced(identity)
        if not self._lookup.ask(request_id, keys, paths=paths, deadline=deadline, traced=traced):
            self.counts.add(metrics.DECLINED.name, 1, "lookup", "queue_full")

    def exclude(self, request_id: str) -> None:
        """Neither load nor store anything for a request whose block hashes do not cover all that made its KV.

        Remembered beyond its end, because vLLM 0.26 and later offer a finished request's last blocks afterwards.
        """
        self.counts.add(metrics.DECLINED.name, 1, "lookup", "adapter")
        self._excluded[request_id] = None
        if len(self._excluded) > MAX_EXCLUDED:
            del self._excluded[next(iter(self._excluded))]

    def is_waiting(self, request_id: str) -> bool:
        """Return whether the answer to the request's lookup is still expected, or blocks that it wants staged."""
        self._learn()
        return self._lookup.is_pending(request_id) or self._staging.is_waiting(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that is gone."""
        self._lookup.forget(request_id)
        self._prefixes.end(request_id)
        self._staging.forget(request_id)
        self._beyond.pop(request_id, None)

    def step_over(self) -> None:
        """Note that vLLM has offered everything it stores in this step, also of requests that ended before."""
        self._prefixes.step_over()

    def apply(self, report: WorkerReport) -> None:
        """Learn what became of blocks in the workers."""
        identity = self._identity
        if identity is None or report.generation != identity.generation:
            return
        for key, count in report.stored.items():
            self._note_stored(key, count)
        for key in report.dropped:
            self._stored_ranks.pop(key, None)
        for key in report.lost:
            self._index.discard(key)
        for key in report.unreadable:
            self._index.deny(key)
        self._staging.staged(report.staged)
        for key in report.lost | report.unreadable:
            self._staging.failed(key)
        self._admission.note(
            full_reason=report.full_reason,
            is_stalled=report.is_stalled,
            is_over_budget=report.is_over_budget,
            is_budget_spent=report.is_budget_spent,
        )
        if report.has_write_budget is not None:
            self._sightings.switch(on=report.has_write_budget)
        self.counts.set(metrics.INDEX_KEYS.name, len(self._index))

    def may_start_load(self, block_counts: Mapping[int, int]) -> bool:
        """Return whether a load of so many blocks of each group fits under the limit of bytes in flight."""
        if self._admission.may_start(self._size_of(block_counts)):
            return True
        self.counts.add(metrics.DECLINED.name, 1, "load", "in_flight_limit")
        return False

    # ---- two-phase loads, called by the connector ----

    @property
    def staged_max(self) -> int:
        """Return the most blocks of a two-phase load; 0 where loads are streamed."""
        return self._staging.blocks_max

    def stage(self, request_id: str, keys: Sequence[bytes]) -> Progress:
        """Have those of these blocks that exist staged for a request, and return how far they are."""
        return self._staging.want(request_id, [key for key in keys if key in self._index])

    def drop_staged(self, request_id: str) -> None:
        """Let go what a request wanted staged; it loads nothing."""
        self._staging.drop(request_id)

    def limit_lookup(self, request_id: str, beyond: Collection[bytes]) -> None:
        """Make blocks a miss for one request, because with them its load would need more than may be staged."""
        if beyond:
            self._beyond[request_id] = frozenset(beyond)
        else:
            self._beyond.pop(request_id, None)

    def staging_orders(self) -> StagingOrders | None:
        """Return what the workers must stage and let go now; taken once per step."""
        if self.off_reason is not None:
            self._staging.abandon()
        return self._staging.orders() if self._staging.blocks_max else None

    # ---- vLLM's interface ----

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a block can be loaded: hit, miss, or ask again."""
        if self.off_reason is not None or req_context.req_id in self._excluded:
            return MISS
        if self._lookup.has_answers():
            self._learn()
        if self._admission.is_stalled():
            self.counts.add(metrics.DECLINED.name, 1, "load", "stalled")
            return MISS
        if self._beyond and key in self._beyond.get(req_context.req_id, ()):
            return MISS
        if key in self._index:  # never while it is denied
            return HIT
        if self._index.is_denied(key):
            self.counts.add(metrics.DECLINED.name, 1, "load", "unreadable")
            return MISS
        if self._lookup.is_pending(req_context.req_id):
            return RETRY
        if self._lookup.is_late(req_context.req_id):
            self._lookup.forget(req_context.req_id)
            self.counts.add(metrics.DECLINED.name, 1, "lookup", "timeout")
        return MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> BlockKeysSpec:
        """Return what the workers must load."""
        self._admission.started(self._size_of(self._count(keys)))
        if self._staging.blocks_max:
            self._staging.load_began(req_context.req_id, keys)
        return BlockKeysSpec([bytes(key) for key in keys])

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Note that a load is over in every worker."""
        self._admission.finished(self._size_of(self._count(keys)))
        if self._staging.blocks_max:
            self._staging.load_ended(keys)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Return which of a request's computed blocks to store: those that are not there and not on their way."""
        wanted: list[bytes] = []
        if self.off_reason is None and req_context.req_id not in self._excluded:
            self._learn()
            wanted = [bytes(key) for key in keys if self._wants(key)]
            if wanted and (reason := self._admission.full_reason()):
                self.counts.add(metrics.DECLINED.name, len(wanted), "store", reason)
                wanted = []
            if wanted and self._admission.is_budget_spent():
                self.counts.add(metrics.DECLINED.name, len(wanted), "store", "write_budget")
                wanted = []
            if wanted and self._admission.is_over_budget():
                wanted = self._within_budget(wanted)
        for key in wanted:
            self._stored_ranks[key] = 0
        spec = BlockKeysSpec(wanted, self._notes(req_context.req_id, wanted))
        return PrepareStoreOutput(keys_to_store=wanted, store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Do nothing: the copy is over, but the block exists only when its worker reports it published."""

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default policy; the connector starts the lookup, because it sees the request."""
        return default_offloading_context()

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Return vLLM's label of the tier."""
        return disk_hit_source()

    def take_events(self) -> Iterable[Any]:
        """Return no events."""
        return ()

    def reset_cache(self) -> None:
        """Go on with a fresh fingerprint: after a reset the weights in memory may differ from those on disk."""
        self._index.clear()
        self._lookup.reset()
        self._stored_ranks.clear()
        self._admission.reset()
        self._staging.reset()
        self._beyond.clear()
        self._generation += 1
        if self._identity is not None and self._make_identity is not None:
            self._identity = self._make_identity(self._generation)

    def shutdown(self) -> None:
        """End the threads."""
        self._lookup.close()
        self._uses.close(CLOSE_SECONDS)

    # ---- own ----

    def _note_late(self, waited_for_reads: bool) -> None:
        """Count a request whose blocks were not staged in time; a worker says a little later that its disk hangs."""
        self.counts.add(metrics.DECLINED.name, 1, "load", "staging_timeout")
        if waited_for_reads:
            self._admission.note(is_stalled=True)

    def _within_budget(self, keys: list[bytes]) -> list[bytes]:
        """Return those that were wanted more than once; the others would be copied for nothing."""
        kept = [key for key in keys if self._sightings.is_repeated(key)]
        if len(kept) < len(keys):
            self.counts.add(metrics.DECLINED.name, len(keys) - len(kept), "store", "write_budget")
        return kept

    def _notes(self, request_id: str, keys: list[bytes]) -> StoreNotes:
        return StoreNotes(
            recencies_ns=self._prefixes.recencies_ns(request_id, keys),
            repeated=[self._sightings.is_repeated(key) for key in keys],
        )

    def _traced(self, identity: Identity) -> Traced | None:
        """Return what the trace says of every request, None without a trace.

        It lists one group, of full attention where there is one, and counts the bytes of all: at most what they take.
        """
        if not self.settings.trace:
            return None
        shape = next((shape for shape in self._shapes if shape.window_blocks is None), self._shapes[0])
        block_bytes = sum(
            self._block_sizes[rank][other.group] * -(-shape.tokens_per_block // other.tokens_per_block)
            for rank in self._writers
            for other in self._shapes
        )
        fingerprint = identity.fingerprints[self._writers[0]]
        return Traced(fingerprint, shape.group, shape.tokens_per_block, block_bytes)

    def _wants(self, key: bytes) -> bool:
        if key in self._stored_ranks:
            self.counts.add(metrics.DECLINED.name, 1, "store", "in_progress")
            return False
        return key not in self._index and not self._index.is_denied(key)

    def _note_stored(self, key: bytes, count: int) -> None:
        total = self._stored_ranks.get(key, 0) + count
        if total >= len(self._writers):
            self._stored_ranks.pop(key, None)
            self._index.add(key)
        elif key in self._stored_ranks:
            self._stored_ranks[key] = total

    def _learn(self) -> None:
        for answer in self._lookup.take_answers():
            self._index.learn(present=answer.present, absent=answer.absent)

    def _count(self, keys: Collection[bytes]) -> dict[int, int]:
        """Return how many of these keys are of each group."""
        groups = self._block_sizes[0] if self._block_sizes else {}
        if len(groups) == 1:
            return dict.fromkeys(groups, len(keys))
        return collections.Counter(split_offload_key(key)[1] for key in keys)

    def _size_of(self, block_counts: Mapping[int, int]) -> int:
        """Return the bytes of so many blocks of each group, on the rank where they are most."""
        return max(
            (sum(count * sizes[group] for group, count in block_counts.items()) for sizes in self._block_sizes),
            default=0,
        )

    def _paths_of(self, identity: Identity) -> Callable[[bytes], list[tuple[str, int]]]:
        """Return a function that gives a key's files and sizes, one per writing rank."""
        pool, sizes_of = self.settings.pool, self._block_sizes
        folders = [
            (os.path.join(pool, rank_directory(identity.fingerprints[rank], rank)), sizes_of[rank])
            for rank in self._writers
        ]

        def paths(key: bytes) -> list[tuple[str, int]]:
            # Hundreds of times a request, and it competes with the scheduler for the interpreter: no more than needed.
            block_hash, group = split_offload_key(key)
            file = block_file(block_hash, group)
            return [(f"{folder}/{file}", sizes[group]) for folder, sizes in folders]

        return paths

    def _quarantine(self, key: bytes, path: str) -> None:
        """Move a file of a wrong size aside (lookup thread): it could never be loaded, and would bar a new one."""
        # From the path, not from the identity: that may be a newer generation's by now.
        folder, rank = path.split(os.sep)[-5:-3]
        block_hash, group = split_offload_key(key)
        target = quarantine_path(BlockKey(Fingerprint(folder), block_hash, group, int(rank.removeprefix("r"))))
        try:
            os.replace(path, os.path.join(self.settings.pool, target))
        except OSError as error:
            logger.warning("%s has a wrong size and cannot be moved aside: %s", path, error.strerror)
            return
        self.counts.add(metrics.QUARANTINED.name, 1)
        logger.warning("%s has a wrong size and was moved to quarantine", path)
