"""The operator's metrics, as declared in the contract. Event loop's thread only."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from pykvcache_contract.metrics import RECONCILE_DURATION, RECONCILES, Kind, Metric

Samples = Callable[[], Iterable[tuple[Metric, tuple[str, ...], float]]]
"""Returns (metric, label values, value) of each series that is kept elsewhere."""


class Metrics:
    """Everything on /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._results = Counter(RECONCILES.name, RECONCILES.help, RECONCILES.labels, registry=self.registry)
        for labels in RECONCILES.initial_labels:
            self._results.labels(*labels)
        self._duration = Histogram(
            RECONCILE_DURATION.name,
            RECONCILE_DURATION.help,
            buckets=RECONCILE_DURATION.buckets,
            registry=self.registry,
        )

    def add(self, samples: Samples) -> None:
        """Serve series that are read where they are kept, when somebody asks."""
        self.registry.register(Collected(samples))

    @contextlib.contextmanager
    def reconciling(self) -> Iterator[None]:
        """Count one reconcile and its time."""
        started, result = time.perf_counter(), "error"
        try:
            yield
            result = "success"
        finally:
            self._results.labels(result).inc()
            self._duration.observe(time.perf_counter() - started)


class Collected(Collector):
    """Series that are read where they are kept, when somebody asks."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, labels, value in self._samples():
            if metric.name not in families:
                kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.help, labels=metric.labels)
            families[metric.name].add_metric(labels, value)
        return families.values()
