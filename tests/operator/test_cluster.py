"""A change wakes the pools whose decision may differ, and no others."""

import pytest

from pykvcache_operator.cluster import Cluster
from pykvcache_operator.decide import decide
from pykvcache_operator.observe import labelled_nodes, observe

GIB = 2**30
OPTIONS = {"claims_problem": "", "claims_refusal": "", "allowed_host_paths": (), "is_calibrating": True, "pods": None}


class Told:
    """A cluster with pools p (nodes disk=fast) and q (all nodes), and the names it woke."""

    def __init__(self, world):
        self.world, self.woken, self.version = world, [], 100
        self.cluster = Cluster(self.woken.append)
        self.put_pool("p", {"disk": "fast"})
        self.put_pool("q", {})
        self.put_node("a", {"disk": "fast"})
        self.put_cache("a", [world.entry(), world.entry(name="q", uid="uid-q")])
        self.woken.clear()

    def document(self, name, **parts):
        self.version += 1
        metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version), "generation": 1}
        metadata |= parts.pop("metadata", {})
        return {"metadata": metadata, **parts}

    def put_pool(self, name, selector, *, status=None, **metadata):
        storage = {"type": "NodeLocal", "capacityPerNode": "10Gi"}
        metadata = {"uid": "uid-of-p"} | metadata if name == "p" else metadata
        spec = {"storage": storage, "nodeSelector": selector}
        self.cluster.pools.put(self.document(name, spec=spec, status=status or {}, metadata=metadata))

    def put_node(self, name, labels, *, ready="True"):
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        self.cluster.nodes.put(self.document(name, metadata={"labels": labels}, status=status))

    def put_cache(self, name, entries, *, beat_s=-10, disks=None, **status):
        disks = disks or [{"mountPath": "/mnt/a", "type": "NVMe", "sizeBytes": 1000 * GIB}]
        status |= {"heartbeatTime": self.world.text(beat_s), "disks": disks, "pools": entries}
        self.cluster.caches.put(self.document(name, status=status))

    def news(self):
        woken, self.woken[:] = sorted(set(self.woken)), []
        return woken


@pytest.fixture
def told(world):
    return Told(world)


def entries(world, **fields):
    return [world.entry(**fields), world.entry(name="q", uid="uid-q")]


def test_a_heartbeat_wakes_nobody(told, world):
    told.put_cache("a", entries(world), beat_s=50)
    assert told.news() == []


def test_an_agent_that_is_back_wakes_its_pools(told, world):
    told.put_cache("a", entries(world), beat_s=400)
    assert told.news() == ["p", "q"]
    told.put_cache("a", entries(world), beat_s=0)  # its clock was put right
    assert told.news() == ["p", "q"]


def test_a_pool_that_changed_on_a_node_wakes_that_pool(told, world):
    told.put_cache("a", entries(world, state="NotReady"))
    assert told.news() == ["p"]
    told.put_cache("a", entries(world, state="NotReady", usedBytes=2 * GIB))
    assert told.news() == ["p"]


def test_room_that_moves_on_a_disk_wakes_all_pools_of_the_node(told, world):
    told.put_cache("a", entries(world, capacityBytes=20 * GIB))
    assert told.news() == ["p", "q"]


def test_a_new_disk_wakes_pools_that_could_use_it(told, world):
    told.put_cache("a", entries(world), disks=[{"mountPath": "/mnt/b", "type": "SSD", "sizeBytes": GIB}])
    assert told.news() == ["p", "q"]


def test_a_profile_wakes_its_pool(told, world):
    profile = {"pool": "q", "poolUID": "uid-q", "state": "Measured"}
    told.put_cache("a", entries(world), profiles=[profile])
    assert told.news() == ["q"]


def test_a_node_wakes_the_pools_that_select_it_before_or_after(told):
    told.put_node("b", {"disk": "slow"})
    assert told.news() == ["q"]
    told.put_node("b", {"disk": "fast"})
    assert told.news() == ["p", "q"]
    told.put_node("b", {"disk": "fast"}, ready="False")
    assert told.news() == ["p", "q"]
    told.put_node("b", {"disk": "slow"}, ready="False")
    assert told.news() == ["p", "q"]


def test_our_own_label_wakes_only_its_pool(told):
    told.put_node("a", {"disk": "fast", "pykvcache.io/pool.p": "ready"})
    assert told.news() == ["p"]


def test_our_own_status_wakes_nobody_but_a_declaration_does(told):
    told.put_pool("p", {"disk": "fast"}, status={"nodesReady": 1})
    assert told.news() == []
    told.put_pool("p", {"disk": "slow"})
    assert told.news() == ["p"]
    told.put_pool("p", {"disk": "slow"}, annotations={"pykvcache.io/recalibrate": "2026-01-01T00:00:00Z"})
    assert told.news() == ["p"]
    told.put_pool("p", {"disk": "slow"}, deletionTimestamp="2026-01-01T00:00:00Z")
    assert told.news() == ["p"]


def test_pools_that_are_gone_are_concerned_while_they_left_something(told, world):
    told.put_node("a", {"pykvcache.io/pool.torn": "ready"})
    told.put_cache("a", entries(world), profiles=[{"pool": "old", "poolUID": "u", "state": "Failed"}])
    assert told.cluster.concerned() == {"p", "q", "torn", "old"}
    assert labelled_nodes(told.cluster, "torn") == ("a",)


def test_an_agent_that_is_not_understood_is_told_from_none(told, world):
    told.put_cache("a", entries(world), disks=[{"mountPath": "/mnt/a", "type": "Holographic"}])
    item = told.cluster.pools.get("p")
    (failing,) = decide(observe(told.cluster, item, **OPTIONS), world.now).status.failing_nodes
    assert failing.reason == "NodeAgentOfAnotherVersion"


def test_a_pool_sees_nodes_it_selects_nodes_with_its_label_and_nodes_that_hold_it(told, world):
    told.put_node("labelled", {"pykvcache.io/pool.p": "ready"})
    told.put_node("holder", {})
    told.put_cache("holder", entries(world))
    told.put_node("stranger", {})
    told.put_cache("stranger", [world.entry(uid="older")])
    told.put_cache("lost", entries(world))
    item = told.cluster.pools.get("p")
    seen = observe(told.cluster, item, **OPTIONS)
    views = {view.name: (view.node is not None, view.cache is not None) for view in seen.nodes}
    assert views == {"a": (True, True), "holder": (True, True), "labelled": (True, False), "lost": (False, True)}
    assert seen.min_free_bytes == {"p": 10 * GIB, "q": 10 * GIB}
