"""A node as the agent sees it: disks that are really mounted, an API server that is a picture, care that is real."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pykvcache_contract.api.node import NodePool, NodePoolState
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.memory import Memory
from pykvcache_sidecar.node.orders import Surroundings
from pykvcache_sidecar.node.places import Place
from pykvcache_sidecar.node.pools import PoolManager
from pykvcache_sidecar.node.settings import NodeSettings
from pykvcache_sidecar.node.survey import Survey
from pykvcache_sidecar.node.worker import PoolWorker

OPERATOR_NAMESPACE = "pykvcache-system"


def pool_object(name: str = "default", *, uid: str = "", deleted: bool = False, **spec: Any) -> KVCachePool:
    """Return a NodeLocal pool as the API server would tell it; `storage` adds to what it needs."""
    storage = {"type": "NodeLocal", "capacityPerNode": "4Mi", "minFree": "0", **spec.pop("storage", {})}
    metadata: dict[str, Any] = {"name": name, "uid": uid or f"uid-{name}", "annotations": spec.pop("annotations", {})}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return KVCachePool.parse({"metadata": metadata, "spec": {"storage": storage, **spec}})


def state(report: NodePool | None) -> tuple[NodePoolState, str]:
    """Return what decides of a report that there must be."""
    assert report is not None
    return report.state, report.reason


class NodeUnderTest:
    """The agent's pools without threads of their own: rounds are gone by hand."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        kubelet = root / "kubelet"
        self.settings = replace(
            NodeSettings(
                node_name="node-1",
                kubelet_directory=str(kubelet),
                allowed_paths=(f"{root}/disk", f"{root}/other"),
                allow_root_filesystem=False,
                disk_patterns=(f"{root}/disk*",),
                operator_namespace=OPERATOR_NAMESPACE,
                interval_seconds=0.05,
            ),
            **settings,
        )
        self.started: list[PoolWorker] = []
        self.steady = [1000.0]
        self.living: frozenset[str] | None = None
        self.cluster = Cluster()
        self.begin()

    def begin(self) -> None:
        """Start the agent, or start it again after `end`."""
        self.memory = Memory(self.settings.plugin_directory)
        self.survey = Survey(
            patterns=self.settings.disk_patterns,
            cluster=self.cluster,
            memory=self.memory,
            list_uids=lambda: self.cluster.view().uids if self.living is None else self.living,
        )
        around = Surroundings(self.settings, self.memory, self.survey.disks, monotonic=lambda: self.steady[0])
        self.manager = PoolManager(
            cluster=self.cluster, survey=self.survey, surroundings=around, start=self.started.append
        )

    def tell(self, *pools: KVCachePool, **parts: Any) -> None:
        """Let the API server tell of these pools and no others."""
        named = {pool.name: pool for pool in pools}
        labels = {"labels": self.cluster.view().labels or {}}
        self.cluster.update(**{"pools": named, **labels, **parts})

    def go(self) -> None:
        """Survey the disks, give orders, and let every worker go round."""
        self.survey.look()
        self.manager.round()
        for worker in self.manager.workers():
            worker.round()
        self.manager.round()

    def report(self, name: str = "default") -> NodePool | None:
        """Go round, and return what is told of a pool."""
        self.go()
        return next((report for report in self.manager.reports() if report.name == name), None)

    def place(self, namespace: str = "team-a", *, pool: str = "default") -> Place:
        """Let a pod ask, while the workers go round."""

        def ask() -> Place:
            return self.manager.place(pool=pool, namespace=namespace, pod="pod", service_account="default")

        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(ask)
            while not answer.done():
                for worker in self.manager.workers():
                    worker.round()
            return answer.result()

    def end(self) -> None:
        """Stop the agent."""
        for worker in self.started:
            worker.stop()
            worker.close(10.0)
        self.started = []


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., NodeUnderTest]]:
    """Return a function from settings that differ from the usual to a node."""
    nodes: list[NodeUnderTest] = []

    def make(**settings: Any) -> NodeUnderTest:
        nodes.append(NodeUnderTest(tmp_path, **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        node.end()


@pytest.fixture
def disk(tmp_path: Path, mounts: Any) -> Path:
    """A disk where the agent looks for one."""
    place = tmp_path / "disk"
    mounts.tmpfs(place, size="16m")
    return place


@pytest.fixture
def node(make_node: Callable[..., NodeUnderTest], disk: Path) -> NodeUnderTest:
    """A node with one disk, after its first look."""
    return make_node()
