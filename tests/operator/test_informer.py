"""A list is kept up to date through ends, refusals, silence and forgotten versions of its watch."""

import asyncio
import time

import pytest

from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator import informer as module
from pykvcache_operator.client import ApiError
from pykvcache_operator.informer import Informer, Store


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS_MIN", 0.001)
    monkeypatch.setattr(module, "PAUSE_SECONDS_MAX", 0.002)


class Changes(list):
    """What a store told, and a way to wait for more."""

    def __init__(self):
        self.came = asyncio.Event()

    def __call__(self, key, before, after):
        self.append((key[1], before, after))
        self.came.set()

    async def until(self, condition):
        while not condition():
            self.came.clear()
            await self.came.wait()


def follow(api, changes, *, silence_seconds=5.0):
    store = Store(lambda document: document["spec"].get("x"), changes)
    started = Informer(
        api,
        store,
        name="things",
        path="/things",
        server_seconds=60,
        silence_seconds=silence_seconds,
        clock=time.monotonic,
    )
    return started, asyncio.ensure_future(started.run())


async def end(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def event(kind, document):
    return {"type": kind, "object": document}


def bookmark(version):
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


def test_events_follow_the_list_and_unchanged_items_are_no_news(fake_server, with_api):
    async def test(api):
        first = fake_server.put("a", x=1)
        same = {"metadata": {**first["metadata"], "resourceVersion": "20"}, "spec": {"x": 1, "y": 9}}
        other = {"metadata": {**first["metadata"], "resourceVersion": "21"}, "spec": {"x": 2}}
        fake_server.streams = [[event("MODIFIED", same), event("MODIFIED", other), event("DELETED", other), "hang"]]
        changes = Changes()
        _, task = follow(api, changes)
        await changes.until(lambda: len(changes) == 3)
        assert changes == [("a", None, 1), ("a", 1, 2), ("a", 2, None)]
        assert fake_server.requests[1][1]["resourceVersion"] == "11"
        await end(task)

    with_api(test)


def test_long_lists_come_in_pages(fake_server, with_api, monkeypatch):
    monkeypatch.setattr("pykvcache_operator.client.PAGE_OBJECTS", 2)

    async def test(api):
        for number in range(5):
            fake_server.put(f"n{number}", x=number)
        changes = Changes()
        informer, task = follow(api, changes)
        await informer.synced.wait()
        assert len(informer.store) == 5
        assert [query["limit"] for _, query in fake_server.requests[:3]] == ["2", "2", "2"]
        await end(task)

    with_api(test)


def test_objects_are_reduced_page_by_page(fake_server, with_api, monkeypatch):
    """A cluster's pods take a gigabyte as long as they are whole."""
    monkeypatch.setattr("pykvcache_operator.client.PAGE_OBJECTS", 2)

    async def test(api):
        for number in range(5):
            fake_server.put(f"n{number}")
        store = Store(lambda _document: len(fake_server.requests), Changes())
        options = {"name": "things", "path": "/things", "server_seconds": 60, "silence_seconds": 5}
        informer = Informer(api, store, clock=time.monotonic, **options)
        task = asyncio.ensure_future(informer.run())
        await informer.synced.wait()
        assert list(store.values()) == [1, 1, 2, 2, 3]
        await end(task)

    with_api(test)


def test_a_stream_that_ends_goes_on_from_its_last_bookmark(fake_server, with_api):
    async def test(api):
        fake_server.streams = [[bookmark(55), "end"]]
        _, task = follow(api, Changes())
        while len(fake_server.requests) < 3:
            fake_server.changed.clear()
            await fake_server.changed.wait()
        assert [query.get("resourceVersion") for _, query in fake_server.requests[:3]] == [None, "10", "55"]
        await end(task)

    with_api(test)


def test_a_forgotten_version_means_to_list_again_and_tells_what_is_gone(fake_server, with_api):
    async def test(api):
        fake_server.put("a", x=1)
        gone = event("ERROR", {"code": 410, "message": "too old", "metadata": {}})
        fake_server.streams = [[gone], ["hang"]]
        changes = Changes()
        informer, task = follow(api, changes)
        await informer.synced.wait()
        del fake_server.objects["a"]
        fake_server.put("b", x=2)
        await changes.until(lambda: len(changes) >= 3)
        assert changes[1:] == [("a", 1, None), ("b", None, 2)]
        assert informer.problem == ""
        await end(task)

    with_api(test)


@pytest.mark.slow
def test_a_silent_stream_is_opened_again_and_its_age_tells(fake_server, with_api):
    async def test(api):
        informer, task = follow(api, Changes(), silence_seconds=0.05)
        await informer.synced.wait()
        listed = time.monotonic()
        while sum(query.get("watch") == "true" for _, query in fake_server.requests) < 3:
            fake_server.changed.clear()
            await fake_server.changed.wait()
        since_listed = time.monotonic() - listed
        assert informer.heard_age >= since_listed  # opening a stream is not news
        assert sum("watch" not in query for _, query in fake_server.requests) == 1  # nor a reason to list again
        await end(task)

    with_api(test)


def test_a_refusal_is_told_and_tried_again(fake_server, with_api, caplog):
    async def test(api):
        fake_server.refusals = [403, 403]
        fake_server.put("a", x=1)
        informer, task = follow(api, Changes())
        await informer.synced.wait()
        assert informer.problem == ""
        assert caplog.text.count("refused 403") == 1
        await end(task)

    with_api(test)


@pytest.mark.parametrize(("status", "is_refused"), [(403, True), (404, True), (500, False)])
def test_what_we_may_not_read_is_an_answer_and_no_silence(fake_server, with_api, status, is_refused):
    """Else /healthz says no for ever, and the kubelet restarts a process that does all it may."""

    async def test(api):
        fake_server.refusals = [status] * 1000
        now = [0.0]
        store = Store(lambda document: document, Changes())
        seconds = {"server_seconds": 60, "silence_seconds": 5}
        informer = Informer(api, store, name="things", path="/things", **seconds, clock=lambda: now[0])
        now[0] = 1000.0
        task = asyncio.ensure_future(informer.run())
        while len(fake_server.requests) < 3:
            fake_server.changed.clear()
            await fake_server.changed.wait()
        assert (informer.heard_age, informer.is_refused) == (0.0 if is_refused else 1000.0, is_refused)
        assert not informer.synced.is_set()
        await end(task)

    with_api(test)


def test_a_server_that_lists_but_lets_nobody_watch_is_asked_less_and_less(fake_server, with_api, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(module, "PAUSE_SECONDS_MAX", 8.0)
    monkeypatch.setattr("pykvcache_operator.informer.random.uniform", lambda _low, _high: 1.0)

    async def test(api):
        async def refuse(*_args, **_more):
            raise ApiError("watch: 403", status=403)
            yield

        monkeypatch.setattr(api, "watch", refuse)
        monkeypatch.setattr(module.asyncio, "sleep", sleep)
        _, task = follow(api, Changes())
        while len(pauses) < 5:
            await real_sleep(0.001)
        await end(task)
        assert pauses[:5] == [0.002, 0.004, 0.008, 0.016, 0.032]

    with_api(test)


def test_a_stream_of_something_else_is_opened_again(fake_server, with_api):
    async def test(api):
        fake_server.put("a", x=1)
        fake_server.raw = b"<html>a proxy's greeting</html>\n"
        informer, task = follow(api, Changes())
        while sum(query.get("watch") == "true" for _, query in fake_server.requests) < 3:
            fake_server.changed.clear()
            await fake_server.changed.wait()
        assert "JSONDecodeError" in informer.problem
        await end(task)

    with_api(test)


def test_an_object_that_cannot_be_read_is_left_out(fake_server, caplog):
    def trim(document):
        if document["spec"]["x"] == "bad":
            raise ConfigurationError("spec.x is bad")
        return document["spec"]["x"]

    changes = []
    store = Store(trim, lambda *change: changes.append(change))
    good = fake_server.put("a", x=1)
    store.put(good)
    store.put(fake_server.put("a", x="bad"))
    assert [change[2] for change in changes] == [1, None]
    assert "spec.x is bad" in caplog.text


def test_an_object_that_cannot_be_read_is_not_gone_until_it_is(fake_server):
    def trim(document):
        if document["spec"]["x"] == "bad":
            raise ConfigurationError("spec.x is bad")
        return document["spec"]["x"]

    changes = []
    store = Store(trim, lambda *change: changes.append(change))
    first, second = fake_server.put("a", x="bad"), fake_server.put("b", x="bad")
    for document in (first, second):
        store.put(document)
    assert store.is_unread("a")
    store.remove(first)
    store.replace([], str(fake_server.version))
    assert [store.is_unread(name) for name in ("a", "b")] == [False, False]
    assert [key[1] for key, _, _ in changes] == ["a", "b"], "now its traces may go"
    store.put(fake_server.put("a", x="bad"))
    store.put(fake_server.put("a", x=1))
    assert not store.is_unread("a")


def test_a_late_event_does_not_undo_what_an_answer_told(fake_server):
    changes = []
    store = Store(lambda document: document["spec"]["x"], lambda *change: changes.append(change))
    old = fake_server.put("a", x=1)
    new = fake_server.put("a", x=2)
    store.put(new)
    store.put(old)
    assert store.get("a") == 2
    store.remove({**old, "metadata": {**old["metadata"], "uid": "another"}})
    assert store.get("a") == 2
    store.remove(old)
    assert store.get("a") is None


def test_a_list_that_was_long_on_its_way_does_not_undo_what_came_after_it(fake_server):
    """A pool made while all pools are listed would be taken for gone, and what it has on nodes removed."""
    changes = []
    store = Store(lambda document: document["spec"]["x"], lambda *change: changes.append(change))
    old = fake_server.put("old", x=1)
    gone = fake_server.put("gone", x=2)
    version = str(fake_server.version)
    store.put(old)
    store.put(gone)
    store.put(fake_server.put("new", x=3))
    store.put(fake_server.put("old", x=4))
    store.replace([old], version)
    assert [store.get(name) for name in ("old", "gone", "new")] == [4, None, 3]
    assert changes[-1] == (("", "gone"), 2, None)


def test_a_late_event_of_the_predecessor_does_not_undo_its_successor(fake_server):
    store = Store(lambda document: document["spec"]["x"], lambda *_change: None)
    old = fake_server.put("a", x=1)
    new = fake_server.put("a", x=2)
    store.put({**new, "metadata": {**new["metadata"], "uid": "another"}})
    store.put(old)
    store.remove(old)
    assert store.get("a") == 2


def test_the_late_answer_to_a_write_brings_nothing_back(fake_server):
    store = Store(lambda document: document["spec"]["x"], lambda *_change: None)
    first = fake_server.put("a", x=1)
    store.put(first)
    store.renew(fake_server.put("a", x=2))
    assert store.get("a") == 2
    answer = fake_server.put("a", x=3)
    store.remove(first)
    store.renew(answer)
    assert store.get("a") is None
