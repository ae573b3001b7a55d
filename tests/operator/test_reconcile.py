"""What becomes of a decision: written if it is news, and calibration only where the pool may be used."""

import asyncio
import time

import pytest

from pykvcache_operator.cluster import Cluster
from pykvcache_operator.exporter import Metrics
from pykvcache_operator.reconcile import Reconciler


class Writer:
    refusals: dict[str, str] = {}  # noqa: RUF012 - empty, and nobody writes it

    def __init__(self) -> None:
        self.labelled = []

    async def apply(self, pool, decision, now):
        pass

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


def make_reconciler(cluster, calibrator, writer=None):
    return Reconciler(
        cluster,
        writer or Writer(),
        calibrator,
        settings=Settings(),
        metrics=Metrics(),
        claims_problem=lambda _pool: "",
        pods=lambda _name: None,
        clock=time.monotonic,
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
