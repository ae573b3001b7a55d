"""A snapshot as Prometheus series, by the contract's table; made anew for every scrape.

Series are bounded: the fingerprints with most bytes have their own, the rest is added up as `other`.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from pykvcache_contract import metrics
from pykvcache_contract.metrics import FINGERPRINTS_MAX, OTHER, POOL_STATES, SIDECAR_METRICS, Kind, Metric
from pykvcache_sidecar.book import Book, FingerprintRow, Snapshot
from pykvcache_sidecar.status import by_size

Series = dict[tuple[str, ...], float]


class PoolCollector(Collector):
    """Yields every metric of `SIDECAR_METRICS`, for one pool."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def collect(self) -> Iterator[Family]:
        """Yield all families with their series."""
        values = series(self._book.snapshot(), capacity_bytes=self._book.settings.capacity_bytes)
        return (family(metric, values[metric.name]) for metric in SIDECAR_METRICS)


def family(metric: Metric, values: Series, *, first_labels: tuple[str, ...] = ()) -> Family:
    """Return one metric with its series.

    Args:
        first_labels: names of labels whose values come before the metric's own.
    """
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    result = kind(metric.name, metric.help, labels=first_labels + metric.labels)
    for labels, value in values.items():
        result.add_metric(labels, value)
    return result


def series(now: Snapshot, *, capacity_bytes: int) -> dict[str, Series]:
    """Return the series of every metric: its values by label values."""
    levels = now.levels
    single = {
        metrics.POOL_CAPACITY: capacity_bytes,
        metrics.EVICTED_AGE: now.last_evicted_age_seconds,
        metrics.SWEPT_FILES: now.swept_files,
        metrics.SCRUBBED_BLOCKS: now.scrubbed_blocks,
        metrics.SCRUBBED_BYTES: now.scrubbed_bytes,
        metrics.DAMAGED_BLOCKS: now.damaged_blocks,
        metrics.SCAN_DURATION: now.scan.duration_seconds,
        metrics.SCAN_FILES: now.scan.files,
        metrics.DROPPED_FINGERPRINTS: now.dropped_fingerprints,
        metrics.FAILED_REMOVALS: now.failed_removals,
        metrics.POOL_ACTIVE: now.is_active,
        metrics.POOL_READY: now.is_ready,
    }
    blocks, sizes = _per_fingerprint(now.fingerprints)
    # What is unknown is not zero: its series is absent, as all of these are while the pool is not there.
    known_or_not = {
        metrics.POOL_USED: levels.used_bytes,
        metrics.POOL_ALLOWED: levels.allowed_bytes,
        metrics.POOL_FREE: levels.free_bytes,
        metrics.WRITTEN_TODAY: levels.written_bytes,
        metrics.WRITE_BUDGET: levels.write_budget_bytes,
    }
    levels_now: dict[str, Series] = {
        metric.name: {} if value is None else {(): float(value)} for metric, value in known_or_not.items()
    }
    unlabelled: dict[str, Series] = {metric.name: {(): float(value)} for metric, value in single.items()}
    return {
        **unlabelled,
        **levels_now,
        metrics.POOL_BLOCKS.name: blocks,
        metrics.POOL_SIZE.name: sizes,
        metrics.EVICTED_BLOCKS.name: {(reason,): float(count) for reason, count in now.evicted_blocks.items()},
        metrics.EVICTED_BYTES.name: {(reason,): float(size) for reason, size in now.evicted_bytes.items()},
        metrics.POOL_STATE.name: {(state,): float(state == now.state) for state in POOL_STATES},
    }


def _per_fingerprint(rows: tuple[FingerprintRow, ...]) -> tuple[Series, Series]:
    blocks: Series = {}
    sizes: Series = {}
    for number, row in enumerate(by_size(rows)):
        labels = (row.model, row.directory) if number < FINGERPRINTS_MAX else (OTHER, OTHER)
        blocks[labels] = blocks.get(labels, 0.0) + row.blocks
        sizes[labels] = sizes.get(labels, 0.0) + row.size_bytes
    return blocks, sizes
