"""A cluster as the operator sees it, built in memory."""

import asyncio
import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from pykvcache_contract.api.node import KVCacheNode
from pykvcache_contract.names import FINALIZER, POOL_NAME_LABEL, POOL_VOLUME
from pykvcache_operator.client import Api
from pykvcache_operator.decide import decide
from pykvcache_operator.resources import (
    Claim,
    NamespaceFacts,
    NodeFacts,
    NodeView,
    Observation,
    pool_item,
)

GIB = 2**30
UID = "uid-of-p"


class World:
    """Makes objects as the API server would give them; `now` is the time of decisions."""

    now = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)

    def pool(self, *, status=None, finalizers=(FINALIZER,), deleted_s=None, annotations=None, generation=1, **spec):
        """Return a PoolItem; `deleted_s` is how many seconds ago its deletion was asked for."""
        storage = spec.pop("storage", {"type": "NodeLocal", "capacityPerNode": "10Gi"})
        metadata = {
            "name": "p",
            "uid": UID,
            "generation": generation,
            "resourceVersion": "7",
            "finalizers": list(finalizers),
            "annotations": annotations or {},
        }
        if deleted_s is not None:
            metadata["deletionTimestamp"] = self.text(-deleted_s)
        return pool_item({"metadata": metadata, "spec": {"storage": storage, **spec}, "status": status or {}})

    def text(self, seconds):
        """Return the time so many seconds from now, as in the API."""
        return (self.now + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def entry(self, *, name="p", uid=UID, state="Ready", **fields):
        """Return a pool's entry in a KVCacheNode."""
        ready = {"path": f"/mnt/a/pykvcache/{name}", "capacityBytes": 10 * GIB, "usedBytes": GIB}
        return {"name": name, "uid": uid, "state": state, **ready, **fields}

    def view(self, name, *entries, labels=None, is_ready=True, beat_s=-10, disk_bytes=1000 * GIB, **more):
        """Return a node as a pool sees it; `beat_s=None`: no agent ever reported."""
        facts = NodeFacts(name, f"uid-{name}", is_ready, labels or {})
        if beat_s is None:
            return NodeView(name, facts, None)
        status = {
            "ioUring": "Available",
            "heartbeatTime": self.text(beat_s),
            "disks": [{"mountPath": "/mnt/a", "type": "NVMe", "sizeBytes": disk_bytes}],
            "pools": list(entries),
            **more,
        }
        return NodeView(name, facts, KVCacheNode.parse({"metadata": {"name": name}, "status": status}))

    def claim(self, namespace, *, name="pykvcache-p", pool_uid=UID, is_bound=True, requested=GIB, **more):
        """Return a claim."""
        return Claim(
            namespace=namespace,
            name=name,
            uid=f"uid-{namespace}",
            pool_uid=pool_uid,
            is_bound=is_bound,
            is_terminating=more.get("is_terminating", False),
            requested_bytes=requested,
            capacity_bytes=requested if is_bound else 0,
        )

    def namespace(self, name, *, is_terminating=False, **labels):
        """Return a namespace."""
        return NamespaceFacts(name, labels, is_terminating)

    def decide(self, item, *views, **seen):
        """Return the decision for a pool in this world."""
        return decide(Observation(item=item, nodes=views, **seen), self.now)

    def after(self, decision, **changes):
        """Return the pool as it is when the decision was carried out."""
        item = self.pool()
        status = item.pool.status_document(decision.status)["status"]
        return self.pool(status=status, **changes)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def conditions():
    """Reads the conditions of a decision as {type: (status, reason)}."""
    return lambda decision: {c.type: (c.status.value, c.reason) for c in decision.status.conditions}


class FakeServer:
    """As much of an API server as an informer and a lease see: one collection, and scripted streams.

    Args:
        streams: what each watch does, in turn: a list of events to send, then "end", "hang" or a status to refuse with.
        raw: what every watch sends instead.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.version = 10
        self.streams: list[list] = []
        self.requests: list[tuple[str, dict]] = []
        self.refusals: list[int] = []
        self.raw = b""
        self.changed = asyncio.Event()

    def put(self, name, **spec):
        self.version += 1
        metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.objects[name] = {"metadata": metadata, "spec": spec}
        return self.objects[name]

    async def start(self):
        """Serve; return the official client's configuration for it."""
        application = web.Application()
        application.router.add_route("GET", "/things", self._collection)
        application.router.add_route("*", "/{path:.*}", self._object)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return SimpleNamespace(host=f"http://127.0.0.1:{self._runner.addresses[0][1]}")

    async def stop(self):
        await self._runner.cleanup()

    async def _collection(self, request):
        self.requests.append((request.path, dict(request.query)))
        self.changed.set()
        if self.refusals:
            code = self.refusals.pop(0)
            return web.json_response({"code": code, "message": f"refused {code}", "reason": "Test"}, status=code)
        if request.query.get("watch") == "true":
            return await self._watch(request)
        items = list(self.objects.values())
        start, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        token = str(start + limit) if start + limit < len(items) else ""
        metadata = {"resourceVersion": str(self.version), "continue": token}
        return web.json_response({"metadata": metadata, "items": items[start : start + limit]})

    async def _watch(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        if self.raw:
            await response.write(self.raw)
            return response
        script = self.streams.pop(0) if self.streams else ["hang"]
        for step in script:
            if step == "hang":
                await asyncio.Event().wait()
            if step != "end":
                await response.write(json.dumps(step).encode() + b"\n")
        return response

    async def _object(self, request):
        name, body = request.path.rsplit("/", 1)[1], await request.read()
        document = json.loads(body) if body else {}
        self.requests.append((request.method, document))
        if request.method == "GET":
            found = self.objects.get(name)
            return web.json_response(found or {"code": 404}, status=200 if found else 404)
        current = self.objects.get(document["metadata"]["name"])
        stale = current and document["metadata"].get("resourceVersion") != current["metadata"]["resourceVersion"]
        if stale or (request.method == "POST" and current):
            return web.json_response({"code": 409}, status=409)
        return web.json_response(self.put(document["metadata"]["name"], **document["spec"]))


@pytest.fixture
def fake_server():
    return FakeServer()


@pytest.fixture
def with_api(fake_server):
    """Runs a coroutine function with a client of the fake server."""

    def run(test):
        async def main():
            where = await fake_server.start()
            configuration = kubernetes_client.Configuration(host=where.host)
            api = Api(configuration)
            try:
                await asyncio.wait_for(test(api), 60)
            finally:
                await api.close()
                await fake_server.stop()

        asyncio.run(main())

    return run


@pytest.fixture
def make_pod():
    """Makes labelled pods as the API server would give them; with what injection adds, but for its annotation."""

    def make(
        *,
        namespace="team",
        name="vllm-0",
        uid="uid-1",
        pool="p",
        labels=None,
        annotations=None,
        volumes=(POOL_VOLUME,),
        phase="Running",
        created="2026-01-31T11:59:50Z",
        version=1,
        **metadata,
    ):
        metadata |= {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
        metadata |= {"creationTimestamp": created, "labels": {POOL_NAME_LABEL: pool, **(labels or {})}}
        if annotations is not None:
            metadata["annotations"] = annotations
        spec = {"containers": [{"name": "vllm"}], "volumes": [{"name": volume} for volume in volumes]}
        return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}

    return make
