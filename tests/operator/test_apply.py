"""Decisions are carried out in order, and what cannot be written does not keep back the rest."""

import asyncio

import pytest

from pykvcache_operator.apply import Applier
from pykvcache_operator.client import ApiError
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.resources import Decision, Notice, Severity


class RecordingApi:
    """Answers every write with the object as it would be, unless told to refuse its path."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, str]] = []
        self.bodies: list[dict] = []
        self.refusals: dict[str, int] = {}
        self.version = 100

    async def _write(self, verb, path, body):
        self.writes.append((verb, path))
        self.bodies.append(body)
        for part, status in self.refusals.items():
            if part in path:
                raise ApiError(f"{verb} {path}: {status}", status=status)
        self.version += 1
        name, namespace = path.rsplit("/", 1)[1], path.split("/namespaces/")[-1].split("/")[0]
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        storage = {"type": "Ephemeral", "capacity": "1Gi"}
        spec = body.get("spec", {"storage": storage})
        return {**body, "metadata": {**metadata, **body.get("metadata", {})}, "spec": spec}

    async def apply(self, path, body):
        return await self._write("apply", path, body)

    async def merge(self, path, body):
        return await self._write("merge", path, body)

    async def create(self, path, body):
        return await self._write("create", path, body)

    async def delete(self, path, *, uid):
        await self._write("delete", path, {"uid": uid})


@pytest.fixture
def api():
    return RecordingApi()


def carry_out(api, world, item, decision):
    cluster = Cluster(lambda _name: None)
    status = item.pool.status_document(item.pool.status)["status"]
    spec = {"storage": {"type": "NodeLocal", "capacityPerNode": "10Gi"}}
    metadata = {"name": "p", "uid": "uid-of-p", "resourceVersion": "9", "finalizers": ["pykvcache.io/cleanup", "a/b"]}
    cluster.pools.put({"metadata": metadata, "spec": spec, "status": status})
    asyncio.run(Applier(api, cluster, instance="test").apply(item.pool, decision, world.now))
    return cluster


POOL = "/apis/pykvcache.io/v1alpha1/kvcachepools/p"


def test_the_finalizer_comes_first_and_events_last(api, world):
    decision = world.decide(world.pool(finalizers=()), world.view("a", world.entry()))
    carry_out(api, world, world.pool(finalizers=()), decision)
    assert [write for write in api.writes if "events" not in write[1]] == [
        ("apply", POOL),
        ("merge", "/api/v1/nodes/a"),
        ("apply", f"{POOL}/status"),
    ]
    assert api.writes[-1] == ("create", "/apis/events.k8s.io/v1/namespaces/default/events")


def test_a_node_that_is_gone_needs_no_label(api, world):
    api.refusals = {"/nodes/a": 404}
    carry_out(api, world, world.pool(), Decision(label_nodes=("a", "b")))
    assert api.writes == [("merge", "/api/v1/nodes/a"), ("merge", "/api/v1/nodes/b")]


@pytest.mark.parametrize("nodes", ["label_nodes", "unlabel_nodes"])
def test_a_node_that_refuses_its_label_keeps_nothing_else_back(api, world, nodes):
    """A policy of the cluster may: the pool's status would never be written again, and its deletion never end."""
    api.refusals = {"/nodes/a": 403}
    status = world.decide(world.pool(), world.view("a", world.entry())).status
    decision = Decision(**{nodes: ("a", "b")}, status=status, remove_finalizer=True)
    with pytest.raises(ApiError, match="nodes/a: 403"):
        carry_out(api, world, world.pool(), decision)
    assert [path for _, path in api.writes] == ["/api/v1/nodes/a", "/api/v1/nodes/b", f"{POOL}/status", POOL]


def test_a_server_that_does_not_answer_is_not_asked_for_every_node(api, world):
    api.refusals = {"/nodes/": 0}
    with pytest.raises(ApiError):
        carry_out(api, world, world.pool(), Decision(label_nodes=("a", "b")))
    assert api.writes == [("merge", "/api/v1/nodes/a")]


def test_a_refused_claim_is_kept_and_raised_after_all_the_rest(api, world):
    storage = {"type": "SharedFilesystem", "storageClassName": "fast", "capacity": "1Gi"}
    item = world.pool(storage=storage, allowedNamespaces={"names": ["x", "y", "z"]})
    api.refusals = {"/namespaces/x/": 403, "/namespaces/z/": 409}
    status = world.decide(item, namespaces=(world.namespace("x"),)).status
    decision = Decision(make_claims=("x", "y", "z"), drop_claims=(world.claim("w"),), status=status)
    cluster = Cluster(lambda _name: None)
    applier = Applier(api, cluster, instance="test")
    with pytest.raises(ApiError, match="403"):
        asyncio.run(applier.apply(item.pool, decision, world.now))
    assert [verb for verb, _ in api.writes] == ["create", "create", "create", "delete", "apply"]
    assert "403; 1 claims" in applier.refusals["p"]  # z has one already: no failure
    api.refusals = {}
    asyncio.run(applier.apply(item.pool, Decision(make_claims=("x",)), world.now))
    assert applier.refusals == {}


def test_a_pool_is_let_go_in_the_version_that_is_known_last(api, world):
    carry_out(api, world, world.pool(deleted_s=1), Decision(remove_finalizer=True))
    assert api.writes == [("merge", POOL)]
    assert api.bodies[0]["metadata"] == {"uid": "uid-of-p", "resourceVersion": "9", "finalizers": ["a/b"]}


@pytest.mark.parametrize(("status", "raises"), [(404, False), (409, True), (500, True)])
def test_a_pool_that_is_gone_already_needs_no_letting_go(api, world, status, raises):
    api.refusals = {"kvcachepools": status}
    if raises:
        with pytest.raises(ApiError):
            carry_out(api, world, world.pool(deleted_s=1), Decision(remove_finalizer=True))
    else:
        carry_out(api, world, world.pool(deleted_s=1), Decision(remove_finalizer=True))


def test_an_event_that_is_refused_is_lost_and_no_more(api, world, caplog):
    api.refusals = {"events": 403}
    carry_out(api, world, world.pool(), Decision(notices=(Notice(Severity.NORMAL, "Ready", "x"),)))
    assert "could not post the event Ready" in caplog.text
