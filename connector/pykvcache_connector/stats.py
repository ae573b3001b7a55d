"""What the connector counted since the last step, on its way from scheduler and workers to vLLM's /metrics.

Each process has one `Counts`; vLLM collects it every step, adds up all processes and hands the sum to the API server,
where `ConnectorPromMetrics` turns it into Prometheus series. The metrics are declared in `pykvcache_contract.metrics`.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

from pykvcache_connector.vllm_api import KVConnectorPromMetrics, KVConnectorStats
from pykvcache_contract.metrics import CONNECTOR_METRICS, Kind, Metric

_SEPARATOR = "\t"
_BY_NAME = {metric.name: metric for metric in CONNECTOR_METRICS}


class Counts:
    """Thread-safe sums since the last `take`. Labels are given in the order of the metric's declaration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = _empty()
        self._gauges: dict[str, float] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Increase a counter."""
        key = _key(name, labels)
        with self._lock:
            counters = self._data["counters"]
            counters[key] = counters.get(key, 0) + value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add an observation to a histogram."""
        with self._lock:
            self._data["histograms"].setdefault(_key(name, labels), []).append(value)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; it travels only when it changed."""
        key = _key(name, labels)
        with self._lock:
            if self._gauges.get(key) != value:
                self._gauges[key] = self._data["gauges"][key] = value

    def take(self) -> "ConnectorStats":
        """Return and reset what was counted."""
        with self._lock:
            data, self._data = self._data, _empty()
        return ConnectorStats(data=data)


def _empty() -> dict[str, Any]:
    return {"counters": {}, "gauges": {}, "histograms": {}}


def _key(name: str, labels: tuple[str, ...]) -> str:
    metric = _BY_NAME[name]
    if len(labels) != len(metric.labels):
        raise ValueError(f"{name} has the labels {metric.labels}, got {labels}")
    return _SEPARATOR.join((name, *labels))


@dataclass
class ConnectorStats(KVConnectorStats):
    """Counts of one or several processes: plain dictionaries, because they travel by msgpack."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.data = _empty()

    def reset(self) -> None:
        """Forget everything."""
        self.data = _empty()

    def aggregate(self, other: KVConnectorStats) -> "ConnectorStats":
        """Add another process's counts to these and return them."""
        for key, value in other.data["counters"].items():
            self.data["counters"][key] = self.data["counters"].get(key, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        for key, values in other.data["histograms"].items():
            self.data["histograms"].setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows: the counters that moved."""
        return {key.replace(_SEPARATOR, ":"): round(value, 6) for key, value in self.data["counters"].items() if value}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers every metric of the contract's table on vLLM's registry and feeds it."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._create(metric, labelnames) for metric in CONNECTOR_METRICS}
        for engine in per_engine_labelvalues:
            self._start_at_zero(engine)

    def _create(self, metric: Metric, labelnames: list[str]) -> Any:
        classes = {Kind.COUNTER: self._counter_cls, Kind.GAUGE: self._gauge_cls, Kind.HISTOGRAM: self._histogram_cls}
        options: dict[str, Any] = {"buckets": metric.buckets} if metric.kind is Kind.HISTOGRAM else {}
        return classes[metric.kind](
            name=metric.name, documentation=metric.help, labelnames=[*labelnames, *metric.labels], **options
        )

    def _start_at_zero(self, engine: int) -> None:
        """Make counters visible before their first event, so that rates and alerts see the step from zero."""
        for metric in CONNECTOR_METRICS:
            for labels in metric.initial_labels:
                self._series(_SEPARATOR.join((metric.name, *labels)), engine)

    def _series(self, key: str, engine: int) -> Any:
        name, *labels = key.split(_SEPARATOR)
        return self._metrics[name].labels(*self.per_engine_labelvalues[engine], *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's counts, summed over processes."""
        for key, value in transfer_stats_data["counters"].items():
            self._series(key, engine_idx).inc(value)
        for key, value in transfer_stats_data["gauges"].items():
            self._series(key, engine_idx).set(value)
        for key, values in transfer_stats_data["histograms"].items():
            series = self._series(key, engine_idx)
            for value in values:
                series.observe(value)
