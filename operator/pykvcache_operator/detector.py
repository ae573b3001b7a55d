"""Follows the labelled pods of all namespaces and tells about those that go without the cache.

What changes wakes the pod's pool: at once when the first of its pods went past the webhook, else after some seconds,
for pods come and go by the thousand. Events are posted on the pods themselves, one for each, by one task and slowly:
when a webhook is away during a roll-out, metrics and the pool's condition tell of all pods, Events of the first few
hundred.

Nothing is remembered about Events: their names are made of the pod's uid, and the API server refuses a second one.
Event loop's thread only.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timezone

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.metrics import (
    INJECTED_PODS,
    MISSED_PODS,
    POD_EVENT_RESULTS,
    POD_EVENTS,
    SKIPPED_PODS,
    UNKNOWN_POOL,
    Metric,
)
from pykvcache_contract.names import POOL_NAME_LABEL
from pykvcache_operator import build, paths
from pykvcache_operator.client import Api, ApiError
from pykvcache_operator.informer import Key, Store
from pykvcache_operator.pods import PodFacts, Roster, notice, pod_facts
from pykvcache_operator.resources import Notice, PodCounts

logger = logging.getLogger(__name__)

QUERY = {"labelSelector": POOL_NAME_LABEL, "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
"""Of the list and the watch of pods; finished ones may be many, and nobody asks whether they have the cache."""
URGENT_SECONDS = 0.1
CALM_SECONDS = 5.0
"""How long a pool waits for more news about its pods."""
EVENTS_AT_ONCE = 30
EVENT_PAUSE_SECONDS = 1.0
"""Between Events beyond those at once: sixty a minute."""
EVENTS_WAITING_MAX = 200
TRIES_MAX = 5
Wake = Callable[[str, float], None]
"""Called with what a label names, which need not be a pool, and the seconds after which it should be looked at."""


class Detector:
    """The labelled pods of the cluster.

    Args:
        instance: this process, for Events.
        clock: monotonic seconds.
    """

    def __init__(self, api: Api, *, wake: Wake, instance: str, clock: Callable[[], float]) -> None:
        self._api, self._wake, self._instance = api, wake, instance
        self.store: Store[PodFacts] = Store(pod_facts, self._changed)
        """For an informer with `QUERY` to fill."""
        self._roster = Roster()
        self._waiting: asyncio.Queue[tuple[PodFacts, Notice]] = asyncio.Queue(EVENTS_WAITING_MAX)
        self._allowance = _Allowance(clock)
        self._results = Counter(dict.fromkeys(POD_EVENT_RESULTS, 0))
        self._refusal = 0

    def counts(self, pool: str) -> PodCounts:
        """Return the pods of a pool."""
        return self._roster.counts(pool)

    async def run(self) -> None:
        """Post Events until cancelled."""
        while True:
            pod, told = await self._waiting.get()
            if self._is_current(pod):
                await asyncio.sleep(self._allowance.take())
                self._results[await self._post(pod, told)] += 1

    def samples(self, pools: Collection[str]) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        """Yield the series about pods; `pools` are those that exist."""
        numbers = dict.fromkeys((*pools, UNKNOWN_POOL), (0, 0))
        for label, injected, missed in self._roster.numbers():
            pool = label if label in pools else UNKNOWN_POOL
            numbers[pool] = (numbers[pool][0] + injected, numbers[pool][1] + missed)
        for pool, (injected, missed) in numbers.items():
            yield INJECTED_PODS, (pool,), float(injected)
            yield MISSED_PODS, (pool,), float(missed)
        for reason in SkipReason:
            yield SKIPPED_PODS, (reason.word,), float(self._roster.skipped[reason.word])
        for result, count in self._results.items():
            yield POD_EVENTS, (result,), float(count)

    def _changed(self, _key: Key, before: PodFacts | None, after: PodFacts | None) -> None:
        missed = self._roster.missed(after.pool) if after else 0
        self._roster.change(before, after)
        if before is not None:
            self._wake(before.pool, CALM_SECONDS)
        if after is not None:
            is_first = not missed and self._roster.missed(after.pool)
            self._wake(after.pool, URGENT_SECONDS if is_first else CALM_SECONDS)
        told = notice(before, after, datetime.now(timezone.utc))
        if after is not None and told is not None:
            self._queue(after, told)

    def _queue(self, pod: PodFacts, told: Notice) -> None:
        try:
            self._waiting.put_nowait((pod, told))
        except asyncio.QueueFull:
            self._results["dropped"] += 1

    def _is_current(self, pod: PodFacts) -> bool:
        """Say whether a pod is still as it was when its Event began to wait."""
        return self.store.get(pod.name, pod.namespace) == pod

    async def _post(self, pod: PodFacts, told: Notice) -> str:
        """Post an Event; return what became of it, one of `POD_EVENT_RESULTS`."""
        body = build.pod_event(pod, told, instance=self._instance, now=datetime.now(timezone.utc))
        for attempt in range(TRIES_MAX):
            try:
                await self._api.create(paths.events(pod.namespace), body)
                return "posted"
            except ApiError as error:
                if error.is_conflict:
                    return "known"
                self._complain(error)
                if 400 <= error.status < 500 and error.status != 429:
                    return "failed"  # the namespace goes, or we may not
            await asyncio.sleep(EVENT_PAUSE_SECONDS * 2.0**attempt)
        return "failed"

    def _complain(self, error: ApiError) -> None:
        if error.status != self._refusal:
            logger.warning("could not post an event about a pod, more of these are not logged: %s", error)
        self._refusal = error.status


class _Allowance:
    """So many at once, and then one after each pause."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._free_at = clock, clock() - EVENTS_AT_ONCE * EVENT_PAUSE_SECONDS

    def take(self) -> float:
        """Take one; return how many seconds to wait before it is used."""
        now = self._clock()
        self._free_at = max(self._free_at, now - EVENTS_AT_ONCE * EVENT_PAUSE_SECONDS) + EVENT_PAUSE_SECONDS
        return max(0.0, self._free_at - now)
