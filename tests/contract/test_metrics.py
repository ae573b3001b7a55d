"""The table of metrics keeps its conventions, and is one that Prometheus will take."""

import math
import re

import pytest

from pykvcache_contract import metrics
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.metrics import (
    CONNECTOR_METRICS,
    NODE_METRICS,
    OPERATOR_METRICS,
    SIDECAR_METRICS,
    VLLM_LABELS,
    WEBHOOK_METRICS,
    Kind,
    Metric,
)
from pykvcache_contract.names import (
    METRIC_PREFIX,
    NODE_METRIC_PREFIX,
    OPERATOR_METRIC_PREFIX,
    POOL_METRIC_PREFIX,
    WEBHOOK_METRIC_PREFIX,
)

MAX_SERIES = 24
"""Most label combinations of one metric that exist from the start."""
LABELS = {"rank", "tier", "reason", "operation", "ring", "direct_io", "publish", "model", "fingerprint", "state"}
LABELS |= {"certificate", "pool", "readable", "ready", "resource", "result", "verb"}
REASONS = {"", *(reason.word for reason in SkipReason)}
"""Spelt as in annotations and Events; none for pods that have the cache."""
TABLES = {
    METRIC_PREFIX: CONNECTOR_METRICS,
    POOL_METRIC_PREFIX: SIDECAR_METRICS,
    NODE_METRIC_PREFIX: NODE_METRICS,
    OPERATOR_METRIC_PREFIX: OPERATOR_METRICS,
    WEBHOOK_METRIC_PREFIX: WEBHOOK_METRICS,
}
ALL_METRICS = tuple(metric for table in TABLES.values() for metric in table)

every_metric = pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)


@every_metric
def test_a_metric_repeats_no_label_of_its_own_or_of_vllm(metric: Metric):
    labels = [*VLLM_LABELS, *metric.labels]
    assert sorted(set(labels)) == sorted(labels)


def test_no_two_metrics_share_a_name():
    names = [metric.name for metric in ALL_METRICS]
    assert sorted(set(names)) == sorted(names)


@every_metric
def test_initial_labels_fit_the_declared_ones(metric: Metric):
    assert {len(metric.labels)} >= {len(values) for values in metric.initial_labels}


def test_every_declared_metric_is_in_the_table():
    declared = {value.name for value in vars(metrics).values() if isinstance(value, Metric)}
    assert declared == {metric.name for metric in ALL_METRICS}


@every_metric
def test_a_metric_keeps_the_conventions_of_names(metric):
    prefix = next(prefix for prefix, table in TABLES.items() if metric in table)
    assert re.fullmatch(prefix + r"[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|gb|percent)(_|$)", metric.name), "base units only"
    assert metric.help.endswith(".")
    assert metric.help[0].isupper() or metric.help[0].isdigit()


@every_metric
def test_labels_are_few_known_and_bounded(metric):
    assert set(metric.labels) <= LABELS
    assert len(metric.initial_labels) == len(set(metric.initial_labels)) <= MAX_SERIES
    for values in metric.initial_labels:
        assert len(values) == len(metric.labels)
        assert all(re.fullmatch(r"[a-z_]+", value) or value in REASONS for value in values)


@every_metric
def test_counters_and_histograms_are_visible_before_their_first_event(metric):
    if metric.kind is Kind.GAUGE:
        assert metric.initial_labels == ()
    else:
        assert metric.initial_labels


@every_metric
def test_only_histograms_have_buckets_and_theirs_grow(metric):
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(math.isfinite(bound) for bound in metric.buckets)


def test_reasons_are_declared_once_each():
    for reasons in (metrics.LOAD_FAILURES, metrics.STORE_FAILURES, metrics.DECLINES, metrics.EVICTION_REASONS):
        assert len(reasons) == len(set(reasons))
    assert len(metrics.POOL_STATES) == len(set(metrics.POOL_STATES))
