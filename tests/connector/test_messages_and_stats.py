"""What scheduler, workers and API server send each other: merged, packed, unpacked and shown to Prometheus."""

import functools
import pickle
import threading
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pykvcache_connector.connector import PyKVCacheConnector
from pykvcache_connector.messages import ConnectorMetadata, Identity, WorkerHello, WorkerMetadata, WorkerReport
from pykvcache_connector.stats import ConnectorPromMetrics, ConnectorStats, Counts
from pykvcache_connector.vllm_api import OffloadingWorkerMetadata
from pykvcache_contract import metrics
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.metrics import CONNECTOR_METRICS, Kind

# ---- messages ----


def test_reports_of_two_ranks_add_up():
    one = WorkerReport(3, {b"a": 1, b"b": 1}, dropped={b"c"}, lost={b"d"}, full_reason="pool_full")
    other = WorkerReport(3, {b"a": 1}, dropped={b"e"}, unreadable={b"f"}, is_stalled=True)
    merged = WorkerReport(3, {b"a": 2, b"b": 1}, {b"c", b"e"}, {b"d"}, {b"f"}, "pool_full", is_stalled=True)
    assert one.merge(other) == other.merge(one) == merged
    assert one.stored == {b"a": 1, b"b": 1}, "merging changes neither report"


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [("", "", ""), ("pool_full", "", "pool_full"), ("pool_full", "unavailable", "unavailable")],
)
def test_of_two_ranks_reasons_a_disk_that_is_away_counts(one, other, merged):
    first, second = WorkerReport(full_reason=one), WorkerReport(full_reason=other)
    assert first.merge(second).full_reason == second.merge(first).full_reason == merged


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [(None, None, None), (None, False, False), (False, False, False), (None, True, True), (False, True, True)],
)
def test_the_disks_of_two_ranks_are_stalled_if_either_is(one, other, merged):
    first, second = WorkerReport(is_stalled=one), WorkerReport(is_stalled=other)
    assert first.merge(second).is_stalled is second.merge(first).is_stalled is merged


def test_of_two_generations_the_newer_report_counts():
    old, new = WorkerReport(1, {b"a": 1}, full_reason="pool_full"), WorkerReport(2, {b"b": 1})
    assert old.merge(new) == new.merge(old) == new


def worker_metadata(report: WorkerReport | None, *jobs: int) -> WorkerMetadata:
    metadata = WorkerMetadata(report=report)
    for job in jobs:
        metadata.mark_completed(job)
    return metadata


@pytest.mark.parametrize(
    ("one", "other", "report"),
    [
        (None, None, None),
        (WorkerReport(0, {b"a": 1}), None, WorkerReport(0, {b"a": 1})),
        (None, WorkerReport(0, {b"a": 1}), WorkerReport(0, {b"a": 1})),
        (WorkerReport(0, {b"a": 1}), WorkerReport(0, {b"a": 1}), WorkerReport(0, {b"a": 2})),
    ],
    ids=["neither", "first", "second", "both"],
)
def test_workers_metadata_adds_up_with_and_without_reports(one, other, report):
    merged = worker_metadata(one, 1, 2).aggregate(worker_metadata(other, 2, 3))
    assert merged.completed_jobs == {1: 1, 2: 2, 3: 1}
    assert merged.report == report
    assert isinstance(merged, WorkerMetadata)


def test_workers_metadata_adds_up_with_vllms_own_class():
    other = OffloadingWorkerMetadata()
    other.mark_completed(2)
    merged = worker_metadata(WorkerReport(0, {b"a": 1}), 1).aggregate(other)
    assert merged.completed_jobs == {1: 1, 2: 1}
    assert merged.report == WorkerReport(0, {b"a": 1})


def test_three_workers_add_up_in_any_order():
    parts = [worker_metadata(WorkerReport(0, {b"a": 1}), number) for number in range(3)]
    merged = functools.reduce(lambda one, other: one.aggregate(other), parts)
    assert merged.report.stored == {b"a": 3}
    assert merged.completed_jobs == {0: 1, 1: 1, 2: 1}


def test_everything_that_travels_by_pickle_arrives_unchanged():
    identity = Identity(1, (Fingerprint("ab" * 32),), ({"a": 1},))
    for message in (
        WorkerHello(0, {"a": [1]}, {0: 4096}, None, 7),
        identity,
        worker_metadata(WorkerReport(1, {b"a": 1}), 4),
        WorkerReport(1, {b"a": 1}, {b"b"}),
    ):
        assert pickle.loads(pickle.dumps(message)) == message
    assert "identity" in ConnectorMetadata.__dataclass_fields__


# ---- counts ----


def test_counters_add_up_and_start_anew_after_each_step():
    counts = Counts()
    counts.add(metrics.LOAD_BYTES.name, 10)
    counts.add(metrics.LOAD_BYTES.name, 5)
    counts.add(metrics.DECLINED.name, 1, "store", "pool_full")
    counts.observe(metrics.LOAD_DURATION.name, 0.5)
    assert counts.take().data == {
        "counters": {metrics.LOAD_BYTES.name: 15, f"{metrics.DECLINED.name}\tstore\tpool_full": 1},
        "gauges": {},
        "histograms": {metrics.LOAD_DURATION.name: [0.5]},
    }
    assert counts.take().is_empty()


def test_a_gauge_travels_only_when_it_changed():
    counts = Counts()
    for value, expected in ((1, {"x": 1}), (1, {}), (2, {"x": 2})):
        counts.set(metrics.STAGING_BYTES.name, value, "x")
        gauges = counts.take().data["gauges"]
        assert gauges == {f"{metrics.STAGING_BYTES.name}\t{name}": number for name, number in expected.items()}


def test_a_metric_that_is_not_declared_or_lacks_labels_is_our_mistake():
    with pytest.raises(KeyError):
        Counts().add("vllm:pykvcache_unknown_total", 1)
    with pytest.raises(ValueError, match="has the labels"):
        Counts().add(metrics.DECLINED.name, 1, "store")


def test_nothing_is_lost_when_threads_count_at_once():
    counts, total = Counts(), 0
    threads = [
        threading.Thread(target=lambda: [counts.add(metrics.LOAD_BLOCKS.name, 1) for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        total += counts.take().data["counters"].get(metrics.LOAD_BLOCKS.name, 0)
    assert total + counts.take().data["counters"].get(metrics.LOAD_BLOCKS.name, 0) == 4000


def filled(scale: int = 1) -> Counts:
    """Return counts of every metric in the table."""
    counts = Counts()
    for metric in CONNECTOR_METRICS:
        labels = metric.initial_labels[0] if any(metric.initial_labels) else tuple("x" for _ in metric.labels)
        if metric.kind is Kind.COUNTER:
            counts.add(metric.name, scale, *labels)
        elif metric.kind is Kind.GAUGE:
            counts.set(metric.name, scale, *labels)
        else:
            counts.observe(metric.name, scale, *labels)
    return counts


def test_stats_of_processes_add_up_counters_join_observations_and_keep_the_last_gauge():
    merged = filled(1).take().aggregate(filled(2).take())
    assert set(merged.data["counters"].values()) == {3}
    assert set(merged.data["gauges"].values()) == {2}
    assert all(values == [1, 2] for values in merged.data["histograms"].values())


def test_empty_stats_change_nothing():
    stats = filled().take()
    before = pickle.dumps(stats.data)
    stats.aggregate(ConnectorStats())
    assert pickle.dumps(stats.data) == before
    merged = ConnectorStats().aggregate(stats)
    assert merged.data == stats.data
    assert ConnectorStats().is_empty()
    stats.reset()
    assert stats.is_empty()


def test_stats_travel_by_msgpack_to_the_api_server():
    stats = filled().take()
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))
    rebuilt = PyKVCacheConnector.build_kv_connector_stats(received)
    assert rebuilt.data == stats.data
    assert isinstance(rebuilt, ConnectorStats)
    assert PyKVCacheConnector.build_kv_connector_stats(None).is_empty()


def test_the_log_line_shows_counters_that_moved():
    counts = Counts()
    counts.add(metrics.STORE_BLOCKS.name, 0)
    counts.add(metrics.DECLINED.name, 2, "store", "pool_full")
    assert counts.take().reduce() == {f"{metrics.DECLINED.name}:store:pool_full": 2}


# ---- Prometheus ----


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def prometheus(registry) -> ConnectorPromMetrics:
    """Our metrics as vLLM makes them, for two engines."""
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    values = {0: ["m", "0"], 1: ["m", "1"]}
    return PyKVCacheConnector.build_prom_metrics(config, types, ["model_name", "engine"], values)


def series(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def names_of(registry: CollectorRegistry) -> set[str]:
    return {name.split("{")[0] for name in series(registry)}


def served_name(metric) -> str:
    return metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")


def test_every_metric_of_the_table_is_served_once_it_was_counted(prometheus, registry):
    prometheus.observe(filled().take().data, 0)
    assert {served_name(metric) for metric in CONNECTOR_METRICS} <= names_of(registry)


def test_counters_and_histograms_are_served_as_zero_before_anything_happened(prometheus, registry):
    expected = {served_name(metric) for metric in CONNECTOR_METRICS if metric.kind is not Kind.GAUGE}
    assert expected <= names_of(registry)
    assert {value for name, value in series(registry).items() if "_created" not in name} == {0}
    name = 'vllm:pykvcache_declines_total{engine="1",model_name="m",operation="store",reason="pool_full"}'
    assert series(registry)[name] == 0


def test_steps_add_up_for_their_own_engine_only(prometheus, registry):
    for _ in range(3):
        prometheus.observe(filled(2).take().data, 1)
    found = series(registry)
    assert found['vllm:pykvcache_load_bytes_total{engine="1",model_name="m"}'] == 6
    assert found['vllm:pykvcache_load_bytes_total{engine="0",model_name="m"}'] == 0
    assert found['vllm:pykvcache_load_duration_seconds_count{engine="1",model_name="m"}'] == 3
    assert found['vllm:pykvcache_load_duration_seconds_sum{engine="1",model_name="m"}'] == 6
    assert found['vllm:pykvcache_staging_bytes{engine="1",model_name="m",rank="x"}'] == 2


def test_every_reason_that_the_code_counts_is_declared_beforehand(prometheus, registry):
    before = set(series(registry))
    counts = Counts()
    for reason in metrics.LOAD_FAILURES:
        counts.add(metrics.LOAD_FAILED.name, 1, reason)
    for reason in metrics.STORE_FAILURES:
        counts.add(metrics.STORE_FAILED.name, 1, reason)
    for decline in metrics.DECLINES:
        counts.add(metrics.DECLINED.name, 1, *decline)
    prometheus.observe(counts.take().data, 0)
    assert set(series(registry)) == before
