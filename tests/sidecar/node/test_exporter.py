"""What the agent serves: one series for each pool, whatever number of directories it has."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pykvcache_contract.api.node import AgentStatus, NodePool, NodePoolState
from pykvcache_contract.metrics import NODE_METRICS, SIDECAR_METRICS
from pykvcache_sidecar.book import FingerprintRow, Levels, ScanRow, Snapshot
from pykvcache_sidecar.node.answers import NodeAnswers, Views
from pykvcache_sidecar.node.exporter import NodeNow, PoolNow, merged

FIRST = Snapshot(
    "/mnt/a/ns/team-a",
    state="working",
    levels=Levels(10, 100, 1000, 7, 1),
    fingerprints=(FingerprintRow("0" * 12, "llama", 2, 20, 5.0, 1.0), FingerprintRow("1" * 12, "qwen", 1, 9, 4.0, 4.0)),
    scan=ScanRow(50.0, 2.0, 3),
    last_evicted_age_seconds=70.0,
    scrubbed_blocks=4,
)
SECOND = Snapshot(
    "/mnt/a/ns/team-b",
    state="read_only",
    levels=Levels(5, 50, 1000, 7, 2),
    fingerprints=(FingerprintRow("0" * 12, "", 1, 10, 9.0, None),),
    scan=ScanRow(40.0, 1.0, 1),
    last_evicted_age_seconds=0.0,
    scrubbed_blocks=1,
)


def pool_now(*directories, name="default"):
    report = NodePool(name=name, uid=f"uid-{name}", state=NodePoolState.READY, capacity_bytes=150, mounts=3)
    return PoolNow(report, directories, {})


@pytest.fixture
def state():
    """What the answers are made from; a test may change it."""
    return {"age": 0.0, "trouble": "", "pools": (pool_now(FIRST, SECOND), pool_now(name="empty"))}


@pytest.fixture
def paths(state):
    def now():
        return NodeNow(state["pools"], 2, True, 5.0, {"mounted": 1, "degraded": 2, "refused": 3}, {"success": 4})

    views = Views(now, lambda: AgentStatus(kernel="6.1"), lambda: state["age"], lambda: state["trouble"])
    return NodeAnswers(views).paths


def test_served_metrics_are_those_of_the_tables_with_the_pool_as_first_label(paths):
    served = {family.name: family for family in text_string_to_metric_families(paths["/metrics"]()[2].decode())}
    expected = {metric.name.removesuffix("_total"): metric for metric in SIDECAR_METRICS + NODE_METRICS}
    assert served.keys() == expected.keys()
    for name, metric in expected.items():
        labels = {label for sample in served[name].samples for label in sample.labels}
        assert labels <= {*metric.labels, "pool"}
        assert (served[name].type, served[name].documentation) == (metric.kind.value, metric.help)
    values = {sample.labels["pool"]: sample.value for sample in served["pykvcache_pool_used_bytes"].samples}
    assert values == {"default": 15.0}, "what is unknown has no sample"
    assert {("default", "llama", 30.0), ("default", "qwen", 9.0)} == {
        (sample.labels["pool"], sample.labels["model"], sample.value)
        for sample in served["pykvcache_pool_size_bytes"].samples
    }


def test_directories_are_added_up_to_the_worst_state_and_the_smallest_age():
    now = merged([FIRST, SECOND])
    assert (now.state, now.levels) == ("read_only", Levels(15, 150, 1000, 14, 3))
    assert now.scan == ScanRow(40.0, 2.0, 4)
    assert (now.last_evicted_age_seconds, now.scrubbed_blocks) == (70.0, 5)
    assert now.fingerprints[0] == FingerprintRow("0" * 12, "llama", 3, 30, 9.0, 1.0)


def test_a_fill_level_that_one_directory_does_not_know_is_unknown():
    unknown = Snapshot("/c", levels=Levels(None, 1, 1, 0, 0))
    assert merged([FIRST, unknown]).levels.used_bytes is None


def test_health_is_the_loop_and_readiness_the_volumes(paths, state):
    assert [paths[path]()[0] for path in ("/healthz", "/readyz")] == [200, 200]
    state.update(age=31.0, trouble="kubelet does not know the driver")
    assert [int(paths[path]()[0]) for path in ("/healthz", "/readyz")] == [503, 503]
    assert b"kubelet does not know" in paths["/readyz"]()[2]


def test_the_status_tells_of_every_directory(paths):
    document = json.loads(paths["/status"]()[2])
    assert document["kernel"] == "6.1"
    directories = document["care"]["default"]["directories"]
    assert directories["/mnt/a/ns/team-b"]["state"] == "read_only"
    assert directories["/mnt/a/ns/team-a"]["used_bytes"] == 10
