"""A worker's half: built when vLLM registers its KV cache, from probe, staging memory, ring, reactor and copies.

A wrong option raises `ConfigurationError` and stops the engine at start-up, unless the options say `when_unfit: adapt`.
A pool that cannot be used does not: the worker then says why and goes on without the cache.
"""

import logging
from collections.abc import Sequence
from typing import Any

from pykvcache_connector import vllm_api
from pykvcache_connector.messages import Identity, StagingOrders, WorkerHello, WorkerReport
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.worker.copies import KVTensors, cpu_features, make_copier
from pykvcache_connector.worker.handler import Handler
from pykvcache_connector.worker.housekeeping import Housekeeping
from pykvcache_connector.worker.layout import BlockLayout
from pykvcache_connector.worker.outcomes import Outcomes
from pykvcache_connector.worker.transfer import Transfer, TransferOptions
from pykvcache_contract import metrics
from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError, ReadOnlyError
from pykvcache_contract.units import format_size
from pykvcache_storage.block import FileAccess
from pykvcache_storage.memory import StagingMemory
from pykvcache_storage.pool import Pool, open_pool
from pykvcache_storage.probe import ProbeResult, make_ring, probe, probe_read_only
from pykvcache_storage.reactor.reactor import Reactor

logger = logging.getLogger(__name__)


class WorkerSide:
    """What the connector needs in a worker's process.

    Args:
        blocks: GPU blocks of one offloaded block.
        group_ids: vLLM's numbers of the KV-cache groups, in the order of its canonical KV caches.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        counts: Counts,
        *,
        blocks: int,
        group_ids: Sequence[int],
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._counts = counts
        self._blocks = blocks
        self._group_ids = group_ids
        self._rank, _ = vllm_api.rank_and_world(vllm_config)
        self._handler = Handler(None)
        self._layout: dict[str, Any] = {}
        self._block_sizes_bytes: dict[int, int] = {}
        self._unavailable: str | None = "the KV cache was not registered"

    def make_handler(self, kv_caches: Any) -> Handler:
        """Return the handler over vLLM's canonical KV caches; it does nothing where the pool cannot be used.

        Raises:
            ConfigurationError: an option must be changed, and `when_unfit` is `error`.
        """
        groups = [
            KVTensors([tensor for tensor, _ in refs], BlockLayout(tuple(size for _, size in refs), self._blocks), group)
            for group, refs in zip(self._group_ids, vllm_api.canonical_groups(kv_caches), strict=True)
        ]
        self._block_sizes_bytes = {tensors.group: tensors.layout.file_size_bytes for tensors in groups}
        self._layout = self._describe(groups)
        try:
            self._handler = Handler(
                make_transfer(
                    self._settings,
                    groups,
                    rank=self._rank,
                    is_replicated=vllm_api.is_replicated(self._vllm_config),
                    counts=self._counts,
                ),
                can_recompute=vllm_api.can_recompute(self._kv_cache_config),
            )
            self._unavailable = None
        except (PoolUnavailableError, ReadOnlyError) as error:
            self._unavailable = str(error)
        except ConfigurationError as error:
            if self._settings.when_unfit == "error":
                raise
            self._unavailable = str(error)
        return self._handler

    def _describe(self, groups: Sequence[KVTensors]) -> dict[str, Any]:
        """Return everything about the layout that changes the bytes of a block; rank and sizes of the cache do not."""
        pages = [list(tensors.layout.page_sizes_bytes) for tensors in groups]
        device = groups[0].device.type
        return {
            "page_sizes_bytes": pages[0] if len(pages) == 1 else pages,
            "gpu_blocks": self._blocks,
            "device": device,
            "cpu": cpu_features() if device == "cpu" else "",
            **vllm_api.describe_layout(self._vllm_config, self._kv_cache_config),
        }

    def hello(self) -> WorkerHello:
        """Return what the scheduler must know."""
        transfer = self._handler.transfer
        staged_max = transfer.options.staged_max if transfer else 0
        return WorkerHello(self._rank, self._layout, self._block_sizes_bytes, self._unavailable, staged_max)

    def use(self, identity: Identity | None, staging: StagingOrders | None) -> None:
        """Adopt the scheduler's identity, then do what it says about staged blocks."""
        if self._handler.transfer is not None:
            self._handler.transfer.use(identity)
            if staging is not None:
                self._handler.transfer.obey(staging)

    def take_failed_rows(self) -> set[int]:
        """Return the GPU blocks of finished loads that must be recomputed, once."""
        return self._handler.take_failed_rows()

    def take_report(self) -> WorkerReport | None:
        """Return what is new for the scheduler, or None."""
        return self._handler.transfer.outcomes.take_report() if self._handler.transfer else None


def make_transfer(
    settings: Settings,
    groups: Sequence[KVTensors],
    *,
    rank: int,
    is_replicated: bool,
    counts: Counts,
) -> Transfer:
    """Return a running transfer.

    Args:
        groups: vLLM's KV tensors, by KV-cache group.
        is_replicated: all ranks hold equal bytes, so rank 0 writes and all read its files.

    Raises:
        ConfigurationError: an option must be changed.
        PoolUnavailableError: go on without the cache.
    """
    pool = open_pool(settings.pool, create=settings.create_pool, for_writing=True)
    examine = probe if pool.writable else probe_read_only
    found = examine(settings.pool, engine=settings.engine, direct_io=settings.direct_io)
    largest = max(tensors.layout.file_size_bytes for tensors in groups)
    memory = StagingMemory(slot_size_bytes=largest, budget_bytes=settings.staging)
    _announce(settings, memory, found, pool, rank=rank, counts=counts)
    slot_count = len(memory.slots)
    store_reserve = max(1, slot_count // 4)
    copier = make_copier(groups, memory)
    reactor = Reactor(
        make_ring(found, entries=2 * max(settings.depth, 1), threads=settings.depth),
        memory.slots,
        depth=settings.depth,
        store_reserve=store_reserve,
    )
    options = TransferOptions(
        directory=pool.directory,
        rank=rank,
        file_rank=0 if is_replicated else rank,
        is_writer=rank == 0 or not is_replicated,
        read_only_reason=pool.read_only_reason,
        access=FileAccess(direct=found.direct_io),
        method=found.publish,
        fsync=settings.fsync,
        verify_payload=settings.integrity == "payload",
        load_timeout_seconds=settings.load_timeout_seconds,
        # However many blocks are staged, a store can still start.
        staged_max=max(1, slot_count - store_reserve - 1),
    )
    outcomes = Outcomes(counts, rank=rank)
    return Transfer(
        options,
        {tensors.group: tensors.layout for tensors in groups},
        reactor=reactor,
        copier=copier,
        housekeeping=Housekeeping(
            pool,
            capacity_bytes=settings.capacity,
            on_write_budget=outcomes.write_budget,
            may_create=settings.create_pool,
        ),
        outcomes=outcomes,
    )


def _announce(
    settings: Settings,
    memory: StagingMemory,
    found: ProbeResult,
    pool: Pool,
    *,
    rank: int,
    counts: Counts,
) -> None:
    """Say once, in the log and as metrics, what will be used and why."""
    logger.info(
        "pool %s (%s): %s, %s, %s; blocks of %s, %d staging slots%s; capacity %s",
        pool.directory,
        found.filesystem,
        found.engine_reason,
        found.direct_reason,
        found.publish_reason,
        format_size(memory.slot_size_bytes),
        len(memory.slots),
        " on huge pages" if memory.huge_pages else "",
        format_size(settings.capacity) if settings.capacity else "as the pool's sidecar allows",
    )
    if not pool.writable:
        logger.warning("blocks are loaded but not stored: %s", pool.read_only_reason)
    label = str(rank)
    counts.set(metrics.STAGING_BYTES.name, memory.size_bytes, label)
    counts.set(metrics.STAGING_SLOTS.name, len(memory.slots), label)
    direct = "on" if found.direct_io else "off"
    counts.set(metrics.ENGINE_INFO.name, 1, label, found.engine, direct, found.publish.value)
