"""What the webhook knows of the cluster: pools and namespaces, kept in memory by two watches.

An answer is given from memory, so a slow API server does not slow the webhook, and while it is away what was known last
holds. A pool that was made a moment before the pod may not have been told yet: a name that nobody knows is waited for,
a short time. Pools that this version cannot read are known as such; they are not missing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator import paths
from pykvcache_operator.client import Api, Document
from pykvcache_operator.informer import Informer, Item, Key, Store
from pykvcache_operator.resources import NamespaceFacts, namespace_facts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A pool of another version; why it cannot be read."""

    message: str


class Known:
    """Pools and namespaces by name.

    Args:
        watch_seconds: how long the API server may keep one watch open.
        silence_seconds: how long a watch may say nothing.
        clock: monotonic seconds.
    """

    def __init__(self, api: Api, *, watch_seconds: float, silence_seconds: float, clock: Callable[[], float]) -> None:
        self.pools: dict[str, KVCachePool] = {}
        self.unreadable: dict[str, str] = {}
        """Why, by the pool's name."""
        self.namespaces: dict[str, NamespaceFacts] = {}
        self._news = asyncio.Event()
        pools: Store[KVCachePool | Unreadable] = Store(_pool, self._pool_changed)
        namespaces: Store[NamespaceFacts] = Store(namespace_facts, self._namespace_changed)

        def informer(name: str, store: Store[Item], path: str) -> Informer[Item]:
            seconds = {"server_seconds": watch_seconds, "silence_seconds": silence_seconds}
            return Informer(api, store, name=name, path=path, query=None, **seconds, clock=clock)

        self.informers: tuple[Informer[Any], ...] = (
            informer("kvcachepools", pools, paths.POOLS),
            informer("namespaces", namespaces, paths.NAMESPACES),
        )
        """To be run by the owner until the end."""

    @property
    def is_read(self) -> bool:
        """Whether all pools and namespaces were read once."""
        return all(informer.synced.is_set() for informer in self.informers)

    @property
    def problem(self) -> str:
        """What is missing until `is_read`; "" from then on, however long the API server is away."""
        if self.is_read:
            return ""
        told = "; ".join(informer.problem for informer in self.informers if informer.problem)
        return f"reading pools and namespaces: {told or 'no answer yet'}"

    def heard(self, now: float) -> Iterator[tuple[str, float]]:
        """Yield each kind, and when the API server last told anything about it; `now` and the answer are Unix time."""
        for informer in self.informers:
            yield informer.name, now - informer.heard_age

    async def wait_for(self, *, pool: str, namespace: str, seconds: float) -> None:
        """Wait until pool and namespace are known, but no longer than this; `is_read` and the mappings tell then."""
        if self._knows(pool, namespace):
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_known(pool, namespace), seconds)

    async def _until_known(self, pool: str, namespace: str) -> None:
        while not self._knows(pool, namespace):
            self._news.clear()
            await self._news.wait()

    def _knows(self, pool: str, namespace: str) -> bool:
        return self.is_read and namespace in self.namespaces and (pool in self.pools or pool in self.unreadable)

    def _pool_changed(
        self, key: Key, _before: KVCachePool | Unreadable | None, after: KVCachePool | Unreadable | None
    ) -> None:
        name = key[1]
        self.pools.pop(name, None)
        self.unreadable.pop(name, None)
        if isinstance(after, KVCachePool):
            self.pools[name] = after
        elif after is not None:
            self.unreadable[name] = after.message
        self._news.set()

    def _namespace_changed(self, key: Key, _before: NamespaceFacts | None, after: NamespaceFacts | None) -> None:
        self.namespaces.pop(key[1], None)
        if after is not None:
            self.namespaces[key[1]] = after
        self._news.set()


def _pool(document: Document) -> KVCachePool | Unreadable:
    try:
        return KVCachePool.parse(document)
    except ConfigurationError as error:
        logger.warning("cannot read pool %s, pods go without it: %s", document["metadata"]["name"], error)
        return Unreadable(str(error))
