"""Pools and namespaces are known from watches; what is not known yet is waited for, a short time."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pykvcache_operator.webhook import known as module
from pykvcache_operator.webhook.known import Known

NEVER = 60.0


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr("pykvcache_operator.informer.PAUSE_SECONDS_MIN", 0.001)
    monkeypatch.setattr("pykvcache_operator.informer.PAUSE_SECONDS_MAX", 0.002)


class Following:
    """A `Known` that follows nothing until it is told to."""

    def __init__(self, api) -> None:
        self.known = Known(api, watch_seconds=60, silence_seconds=5, clock=time.monotonic)
        self.stores = SimpleNamespace(**{informer.name: informer.store for informer in self.known.informers})
        self._version = 0

    def listed(self):
        """Do as if everything was listed, and there was nothing but one namespace."""
        for informer in self.known.informers:
            informer.synced.set()
        self.namespace("team")

    def namespace(self, name):
        self.stores.namespaces.put(self._object(name))

    def pool(self, name, **spec):
        spec = spec or {"storage": {"type": "NodeLocal", "capacityPerNode": "1Gi"}}
        document = self._object(name, spec=spec)
        self.stores.kvcachepools.put(document)
        return document

    def _object(self, name, **more):
        self._version += 1
        return {"metadata": {"name": name, "uid": f"u-{name}", "resourceVersion": str(self._version)}, **more}


@pytest.fixture
def following(with_api):
    """Runs `test(following)`."""

    def run(test):
        async def inside(api):
            await test(Following(api))

        with_api(inside)

    return run


def test_a_pool_that_is_known_is_not_waited_for(following):
    async def test(it):
        it.listed()
        it.pool("p")
        await it.known.wait_for(pool="p", namespace="team", seconds=0)
        assert set(it.known.pools) == {"p"}

    following(test)


@pytest.mark.parametrize("late", ["pool", "namespace"])
def test_what_comes_a_moment_later_is_waited_for(following, late):
    async def test(it):
        it.listed()
        if late == "pool":
            waiting = asyncio.ensure_future(it.known.wait_for(pool="p", namespace="team", seconds=NEVER))
        else:
            it.pool("p")
            waiting = asyncio.ensure_future(it.known.wait_for(pool="p", namespace="new", seconds=NEVER))
        it.pool("other")
        await asyncio.sleep(0)
        assert not waiting.done()
        it.pool("p") if late == "pool" else it.namespace("new")
        await waiting

    following(test)


def test_many_wait_at_once_and_each_gets_its_own(following):
    async def test(it):
        it.listed()
        names = [f"p{number}" for number in range(20)]
        waiting = [
            asyncio.ensure_future(it.known.wait_for(pool=name, namespace="team", seconds=NEVER)) for name in names
        ]
        for name in names:
            it.pool(name)
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    following(test)


def test_a_name_that_never_comes_ends_the_wait(following):
    async def test(it):
        it.listed()
        await it.known.wait_for(pool="absent", namespace="team", seconds=0.01)
        assert "absent" not in it.known.pools

    following(test)


def test_a_pool_of_another_version_is_known_and_cannot_be_read(following, caplog):
    async def test(it):
        it.listed()
        it.pool("p", storage={"type": "Quantum"})
        await it.known.wait_for(pool="p", namespace="team", seconds=0)
        assert "spec.storage.type" in it.known.unreadable["p"]
        assert "p" not in it.known.pools
        it.pool("p")
        assert (set(it.known.pools), it.known.unreadable) == ({"p"}, {})

    following(test)
    assert "cannot read pool p" in caplog.text


def test_what_is_gone_is_forgotten(following):
    async def test(it):
        it.listed()
        good, bad = it.pool("good"), it.pool("bad", storage={})
        for document in (good, bad):
            it.stores.kvcachepools.remove(document)
        assert (it.known.pools, it.known.unreadable) == ({}, {})

    following(test)


def test_until_both_kinds_were_read_it_says_so(fake_server, with_api, monkeypatch):
    monkeypatch.setattr(module.paths, "POOLS", "/things")
    monkeypatch.setattr(module.paths, "NAMESPACES", "/things")

    async def test(api):
        fake_server.refusals = [503] * 100_000
        fake_server.put("team", storage={"type": "NodeLocal", "capacityPerNode": "1Gi"})
        known = Known(api, watch_seconds=60, silence_seconds=5, clock=time.monotonic)
        assert known.problem == "reading pools and namespaces: no answer yet"
        tasks = [asyncio.ensure_future(informer.run()) for informer in known.informers]
        waiting = asyncio.ensure_future(known.wait_for(pool="team", namespace="team", seconds=NEVER))
        while not known.informers[0].problem:
            fake_server.changed.clear()
            await fake_server.changed.wait()
        assert "refused 503" in known.problem
        fake_server.refusals = []
        await waiting
        assert known.problem == ""
        fake_server.refusals = [503] * 100_000
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert known.is_read, "what was read once stays"

    with_api(test)
