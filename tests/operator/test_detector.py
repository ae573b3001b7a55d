"""Labelled pods are followed: who is woken, which Events are posted, and how many at most."""

import asyncio
import time
from datetime import datetime, timezone

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.metrics import INJECTED_PODS, MISSED_PODS, POD_EVENTS, SKIPPED_PODS, UNKNOWN_POOL
from pykvcache_contract.names import INJECTED_ANNOTATION, SKIPPED_ANNOTATION
from pykvcache_operator import detector as module
from pykvcache_operator.client import ApiError
from pykvcache_operator.detector import CALM_SECONDS, EVENTS_AT_ONCE, EVENTS_WAITING_MAX, URGENT_SECONDS, Detector

INJECTED = {INJECTED_ANNOTATION: "0.2.0"}


class EventServer:
    """Keeps Events by name as the API server would; `refusals` are the statuses of the next answers."""

    def __init__(self) -> None:
        self.events: dict[str, dict] = {}
        self.refusals: list[int] = []
        self.asked = 0

    async def create(self, path, body):
        self.asked += 1
        if self.refusals:
            raise ApiError("refused", status=self.refusals.pop(0))
        name = f"{path}/{body['metadata']['name']}"
        if name in self.events:
            raise ApiError("it exists", status=409)
        self.events[name] = body
        return body


class Followed:
    """A detector whose pods a test puts in place of the informer."""

    def __init__(self, server) -> None:
        self.woken: list[tuple[str, float]] = []
        self.detector = Detector(
            server, wake=lambda *woken: self.woken.append(woken), instance="i", clock=time.monotonic
        )
        self.store = self.detector.store

    def series(self, metric, *, pools=("p",)):
        return {labels[0]: value for found, labels, value in self.detector.samples(pools) if found is metric}

    def post(self, until):
        """Post Events until a condition holds."""

        async def main():
            posting = asyncio.ensure_future(self.detector.run())
            while not until():  # noqa: ASYNC110 - lets the other task go on, waits for no time
                await asyncio.sleep(0)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)

        asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture
def server():
    return EventServer()


@pytest.fixture
def followed(server):
    return Followed(server)


@pytest.fixture
def pod(make_pod):
    """Makes pods that are new by the clock of this machine."""
    created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return lambda **fields: make_pod(created=created, **fields)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "EVENT_PAUSE_SECONDS", 0.0001)


def test_the_first_missed_pod_wakes_its_pool_at_once_and_others_later(followed, pod):
    for number in range(3):
        followed.store.put(pod(name=f"m{number}"))
    followed.store.put(pod(name="i", annotations=INJECTED))
    assert followed.woken == [("p", URGENT_SECONDS), *[("p", CALM_SECONDS)] * 3]


def test_a_pod_that_moves_to_another_pool_wakes_both(followed, pod):
    followed.store.put(pod(annotations=INJECTED))
    followed.woken.clear()
    followed.store.put(pod(annotations=INJECTED, pool="q", version=2))
    assert followed.woken == [("p", CALM_SECONDS), ("q", CALM_SECONDS)]


def test_what_changes_nothing_wakes_nobody(followed, pod):
    followed.store.put(pod(annotations=INJECTED))
    followed.woken.clear()
    followed.store.put(pod(annotations={**INJECTED, "a/b": "c"}, phase="Pending", version=2))
    assert followed.woken == []


def test_each_pod_without_the_cache_gets_one_event_where_it_is(followed, server, pod):
    followed.store.put(pod(name="missed", uid="u1", namespace="a"))
    followed.store.put(pod(name="skipped", uid="u2", namespace="b", annotations={SKIPPED_ANNOTATION: "PodSecurity: x"}))
    followed.store.put(pod(name="injected", uid="u3", annotations=INJECTED))
    followed.post(lambda: len(server.events) == 2)
    first, second = server.events.values()
    assert first["metadata"] == {"name": "pykvcache.u1.cachenotinjected", "namespace": "a"}
    assert first["regarding"] == {"apiVersion": "v1", "kind": "Pod", "namespace": "a", "name": "missed", "uid": "u1"}
    assert (first["reason"], first["type"]) == ("CacheNotInjected", "Warning")
    assert (second["reason"], second["note"]) == ("CacheSkipped", "PodSecurity: x")
    assert followed.series(POD_EVENTS) == {"posted": 2, "known": 0, "dropped": 0, "failed": 0}


def test_after_a_restart_nothing_is_told_twice(followed, server, pod):
    followed.store.put(pod())
    followed.post(lambda: server.asked == 1)
    restarted = Followed(server)
    restarted.store.put(pod())
    restarted.post(lambda: restarted.series(POD_EVENTS)["known"] == 1)
    assert len(server.events) == 1


def test_a_pod_that_is_gone_before_its_turn_gets_no_event(followed, server, pod):
    gone = pod(name="gone")
    followed.store.put(gone)
    followed.store.remove(gone)
    followed.store.put(pod(name="stays", uid="u2"))
    followed.post(lambda: server.asked)
    assert [event["regarding"]["name"] for event in server.events.values()] == ["stays"]


def test_of_a_thousand_pods_at_once_a_bounded_number_is_told_about_and_all_are_counted(followed, server, pod, quick):
    for number in range(1000):
        followed.store.put(pod(name=f"m{number}", uid=f"u{number}"))
    dropped = 1000 - EVENTS_WAITING_MAX
    assert followed.series(POD_EVENTS)["dropped"] == dropped
    assert followed.series(MISSED_PODS)["p"] == 1000
    followed.post(lambda: followed.series(POD_EVENTS)["posted"] == EVENTS_WAITING_MAX)
    assert server.asked == EVENTS_WAITING_MAX


def test_events_are_posted_one_a_second_after_the_first_few():
    now = [1000.0]
    allowance = module._Allowance(lambda: now[0])
    assert [allowance.take() for _ in range(EVENTS_AT_ONCE + 2)] == [*[0.0] * EVENTS_AT_ONCE, 1.0, 2.0]
    now[0] += 3600
    assert [allowance.take() for _ in range(EVENTS_AT_ONCE + 1)] == [*[0.0] * EVENTS_AT_ONCE, 1.0]


def test_a_server_that_is_busy_is_asked_again(followed, server, pod, quick):
    server.refusals = [0, 503, 429]
    followed.store.put(pod())
    followed.post(lambda: len(server.events) == 1)
    assert server.asked == 4


def test_a_refusal_is_final_and_the_next_pod_is_told_about(followed, server, pod, quick, caplog):
    server.refusals = [403, 403, *[500] * module.TRIES_MAX]
    for number in range(4):
        followed.store.put(pod(name=f"m{number}", uid=f"u{number}"))
    followed.post(lambda: len(server.events) == 1)
    assert followed.series(POD_EVENTS) == {"posted": 1, "known": 0, "dropped": 0, "failed": 3}
    assert caplog.text.count("could not post an event") == 2  # one for each kind of refusal


def test_labels_that_name_no_pool_share_one_series(followed, pod):
    followed.store.put(pod(name="a"))
    followed.store.put(pod(name="b", pool="typo"))
    followed.store.put(pod(name="c", pool="nonsense"))
    followed.store.put(pod(name="d", pool="", annotations={SKIPPED_ANNOTATION: "PoolNotFound: x"}))
    followed.store.put(pod(name="e", annotations=INJECTED))
    assert followed.series(MISSED_PODS, pools=("p", "idle")) == {"p": 1, "idle": 0, UNKNOWN_POOL: 2}
    assert followed.series(INJECTED_PODS) == {"p": 1, UNKNOWN_POOL: 0}
    skipped = followed.series(SKIPPED_PODS)
    assert skipped.pop("PoolNotFound") == 1
    assert skipped == {reason.word: 0 for reason in SkipReason if reason is not SkipReason.POOL_NOT_FOUND}
