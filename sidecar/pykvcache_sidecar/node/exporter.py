"""The node agent's state as Prometheus series: every pool's, summed over its directories, and the node's own.

The directories of one pool are added up to one snapshot. Namespaces have no label: how many there are is up to tenants.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from pykvcache_contract import metrics
from pykvcache_contract.api.node import NodePool, NodePoolState
from pykvcache_contract.metrics import NODE_METRICS, POOL_LABEL, POOL_STATES, SIDECAR_METRICS
from pykvcache_sidecar.book import FingerprintRow, Levels, ScanRow, Snapshot
from pykvcache_sidecar.exporter import Series, family, series


@dataclass(frozen=True, slots=True)
class PoolNow:
    """One pool on this node.

    Args:
        directories: what the care of each knows.
        problems: sentences by directory that cannot be cared for.
    """

    report: NodePool
    directories: tuple[Snapshot, ...]
    problems: dict[str, str]


@dataclass(frozen=True, slots=True)
class NodeNow:
    """Everything at one moment.

    Args:
        heard_seconds: Unix time at which the API server was heard last.
        volumes, status_writes: counts by result.
    """

    pools: tuple[PoolNow, ...]
    disks: int
    is_registered: bool
    heard_seconds: float
    volumes: dict[str, int]
    status_writes: dict[str, int]


class NodeCollector(Collector):
    """Yields every metric of `SIDECAR_METRICS` for every pool, and of `NODE_METRICS`."""

    def __init__(self, now: Callable[[], NodeNow]) -> None:
        self._now = now

    def collect(self) -> Iterator[Family]:
        """Yield all families with their series."""
        now = self._now()
        of_pools = [
            (pool.report.name, series(merged(pool.directories), capacity_bytes=pool.report.capacity_bytes))
            for pool in now.pools
        ]
        for metric in SIDECAR_METRICS:
            values = {
                (name, *labels): value
                for name, all_of_it in of_pools
                for labels, value in all_of_it[metric.name].items()
            }
            yield family(metric, values, first_labels=(POOL_LABEL,))
        of_node = node_series(now)
        for metric in NODE_METRICS:
            yield family(metric, of_node[metric.name])


def node_series(now: NodeNow) -> dict[str, Series]:
    """Return the series of every metric of the node itself: its values by label values."""
    by_pool = {(pool.report.name,): pool for pool in now.pools}
    return {
        metrics.NODE_POOL_READY.name: {
            name: float(pool.report.state is NodePoolState.READY) for name, pool in by_pool.items()
        },
        metrics.NODE_POOL_MOUNTS.name: {name: float(pool.report.mounts) for name, pool in by_pool.items()},
        metrics.NODE_POOL_DIRECTORIES.name: {name: float(len(pool.directories)) for name, pool in by_pool.items()},
        metrics.NODE_DISKS.name: {(): float(now.disks)},
        metrics.NODE_REGISTERED.name: {(): float(now.is_registered)},
        metrics.NODE_API_HEARD.name: {(): now.heard_seconds},
        metrics.NODE_VOLUMES.name: {(result,): float(count) for result, count in now.volumes.items()},
        metrics.NODE_STATUS_WRITES.name: {(result,): float(count) for result, count in now.status_writes.items()},
    }


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the directories of one pool as if they were one; what is unknown of one is unknown of all."""
    if not snapshots:
        return Snapshot("")
    ages = [now.last_evicted_age_seconds for now in snapshots if now.last_evicted_age_seconds]
    return Snapshot(
        pool=snapshots[0].pool,
        state=max((now.state for now in snapshots), key=_SEVERITY.index),
        levels=_levels([now.levels for now in snapshots]),
        fingerprints=tuple(_rows(row for now in snapshots for row in now.fingerprints)),
        scan=ScanRow(
            ended_seconds=min(now.scan.ended_seconds for now in snapshots),
            duration_seconds=max(now.scan.duration_seconds for now in snapshots),
            files=sum(now.scan.files for now in snapshots),
        ),
        evicted_blocks=_sums([now.evicted_blocks for now in snapshots]),
        evicted_bytes=_sums([now.evicted_bytes for now in snapshots]),
        last_evicted_age_seconds=min(ages, default=0.0),
        swept_files=sum(now.swept_files for now in snapshots),
        dropped_fingerprints=sum(now.dropped_fingerprints for now in snapshots),
        scrubbed_blocks=sum(now.scrubbed_blocks for now in snapshots),
        scrubbed_bytes=sum(now.scrubbed_bytes for now in snapshots),
        damaged_blocks=sum(now.damaged_blocks for now in snapshots),
        failed_removals=sum(now.failed_removals for now in snapshots),
        tick_age_seconds=max(now.tick_age_seconds for now in snapshots),
    )


_SEVERITY = ("working", "standby", "starting", *(state for state in POOL_STATES[3:]))
"""States from the best to the worst; a pool is what the worst of its directories is."""


def _levels(levels: Sequence[Levels]) -> Levels:
    return Levels(
        used_bytes=_sum([one.used_bytes for one in levels]),
        allowed_bytes=_sum([one.allowed_bytes for one in levels]),
        free_bytes=levels[0].free_bytes,  # all lie on one filesystem
        write_budget_bytes=_sum([one.write_budget_bytes for one in levels]),
        written_bytes=_sum([one.written_bytes for one in levels]),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _sums(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {reason: sum(count[reason] for count in counts) for reason in counts[0]}


def _rows(rows: Iterable[FingerprintRow]) -> list[FingerprintRow]:
    """Return one row for each fingerprint: namespaces may use the same model."""
    found: dict[str, FingerprintRow] = {}
    for row in rows:
        other = found.get(row.directory)
        found[row.directory] = row if other is None else _added(other, row)
    return list(found.values())


def _added(one: FingerprintRow, other: FingerprintRow) -> FingerprintRow:
    newest = [row.newest_seconds for row in (one, other) if row.newest_seconds is not None]
    oldest = [row.oldest_seconds for row in (one, other) if row.oldest_seconds is not None]
    return FingerprintRow(
        directory=one.directory,
        model=one.model or other.model,
        blocks=one.blocks + other.blocks,
        size_bytes=one.size_bytes + other.size_bytes,
        newest_seconds=max(newest, default=None),
        oldest_seconds=min(oldest, default=None),
    )
