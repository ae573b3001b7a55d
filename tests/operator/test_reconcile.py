"""What becomes of a decision: written if it is news, and calibration only where the pool may be used."""

import asyncio
import time

import pytest

from pykvcache_operator.cluster import Cluster
from pykvcache_operator.exporter import Metrics
from pykvcache_operator.reconcile import QUIET_SECONDS, Reconciler
from pykvcache_operator.resources import PodCounts, PodsView


class Writer:
    refusals: dict[str, str] = {}  # noqa: RUF012 - empty, and nobody writes it

    def __init__(self) -> None:
        self.labelled, self.decisions = [], []

    async def apply(self, pool, decision, now):
        self.decisions.append(decision)

    async def label(self, pool_name, nodes, *, is_ready):
        self.labelled.append((pool_name, nodes, is_ready))


class Calibrator:
    def __init__(self) -> None:
        self.asked = []

    async def calibrate(self, pool, now):
        self.asked.append(pool.name)

    async def forget(self, name):
        self.asked.append(f"forget {name}")


class Settings:
    allowed_host_paths = ("/mnt",)


def make_reconciler(cluster, calibrator, writer=None, *, pods=lambda _name: None, clock=time.monotonic):
    return Reconciler(
        cluster,
        writer or Writer(),
        calibrator,
        settings=Settings(),
        metrics=Metrics(),
        claims_problem=lambda _pool: "",
        pods=pods,
        clock=clock,
    )


@pytest.mark.parametrize(("path", "asked"), [("/mnt/a", ["p"]), ("/etc", []), ("", [])])
def test_a_host_path_that_is_not_allowed_is_not_measured_either(path, asked):
    """Node agents have a list of their own: what they find ready need not be allowed here."""
    cluster, calibrator = Cluster(lambda _name: None), Calibrator()
    storage = {"type": "NodeLocal", "capacityPerNode": "1Gi", "volume": "HostPath", "path": path}
    head = {"name": "p", "uid": "u", "resourceVersion": "1"}
    cluster.pools.put({"metadata": head, "spec": {"storage": storage}})
    asyncio.run(make_reconciler(cluster, calibrator).reconcile("p"))
    assert calibrator.asked == asked


def test_only_a_pool_that_is_gone_loses_what_it_has_on_nodes():
    """One that a newer version wrote is there; its labels would come and go with the operator's version."""
    cluster, calibrator, writer = Cluster(lambda _name: None), Calibrator(), Writer()
    head = {"name": "p", "uid": "u", "resourceVersion": "1"}
    node = {"name": "a", "uid": "n", "resourceVersion": "1", "labels": {"pykvcache.io/pool.p": "ready"}}
    cluster.nodes.put({"metadata": node})
    cluster.pools.put({"metadata": head, "spec": {"storage": {"type": "FromTheFuture"}}})
    reconciler = make_reconciler(cluster, calibrator, writer)
    asyncio.run(reconciler.reconcile("p"))
    assert (writer.labelled, calibrator.asked) == ([], [])
    cluster.pools.remove({"metadata": head})
    asyncio.run(reconciler.reconcile("p"))
    assert (writer.labelled, calibrator.asked) == ([("p", ("a",), False)], ["forget p"])


def test_pods_that_roll_cost_two_writes_in_half_a_minute_at_most(world):
    """However often the webhook misses one: bad news is written at once, all else waits its turn, Events with it."""
    cluster, writer, counts, now = Cluster(lambda _name: None), Writer(), [PodCounts()], [1000.0]
    reconciler = make_reconciler(
        cluster, Calibrator(), writer, pods=lambda _name: PodsView(counts[0]), clock=lambda: now[0]
    )
    pool, version = world.pool().pool, 7
    storage = {"type": "Ephemeral", "capacity": "1Gi"}
    head = {"name": "p", "uid": "u", "finalizers": ["pykvcache.io/cleanup"]}
    document = {"metadata": {**head, "resourceVersion": "7"}, "spec": {"storage": storage}, "status": {}}
    cluster.pools.put(document)
    for step in range(300):
        missed = int(step % 7 > 3)
        counts[0] = PodCounts(injected=step, missed=missed, missed_pods=("a/b",) * missed)
        asyncio.run(reconciler.reconcile("p"))
        status = writer.decisions[-1].status
        assert status is not None or writer.decisions[-1].notices == ()
        if status is not None:
            version += 1
            metadata = {**document["metadata"], "resourceVersion": str(version)}
            cluster.pools.put({**document, "metadata": metadata, "status": pool.status_document(status)["status"]})
        now[0] += 1.0
    written = [decision for decision in writer.decisions if decision.status is not None]
    assert 10 <= len(written) <= 2 * (300 / QUIET_SECONDS + 1)
    told = [notice.reason for decision in written for notice in decision.notices]
    assert set(told) == {"Ready", "MissedPods", "InjectionHealthy"}
    assert len(told) <= len(written) + 1
