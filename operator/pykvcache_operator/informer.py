"""A list kept up to date: what the API server holds of one kind, in memory, with a note when anything was last heard.

One task per informer: list, then watch from there on; list again when the server forgot the version (410), wait with
growing, jittered pauses when it refuses. A stream that is silent for `silence_seconds`, longer than the server keeps
it open, is dropped and opened again. List answers, events, bookmarks and the proper end of a stream count as heard:
they come from the server. So do its words that we may not read this kind, or that there is none: no restart changes
them. A proxy that accepts connections and passes nothing on is found out by `heard_age`.

Objects are reduced by `trim` at once: a cluster's Nodes whole would take hundreds of megabytes.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator.client import Api, ApiError, Document

logger = logging.getLogger(__name__)

PAUSE_SECONDS_MIN = 0.2
PAUSE_SECONDS_MAX = 30.0
Item = TypeVar("Item")
Key = tuple[str, str]
"""(namespace or "", name)."""
Changed = Callable[[Key, Item | None, Item | None], None]


@dataclass(frozen=True, slots=True)
class Read(Generic[Item]):
    """What is kept of one object; no item where `problem` says why it is not understood."""

    key: Key
    uid: str
    version: int
    item: Item | None
    problem: str = ""


class Store(Generic[Item]):
    """Objects by key, and what changed told to `changed(key, before, after)`.

    Args:
        trim: makes the item of an object; equal items are no change.
    """

    def __init__(self, trim: Callable[[Document], Item], changed: Changed[Item]) -> None:
        self._trim, self._changed = trim, changed
        self._items: dict[Key, Item] = {}
        self._versions: dict[Key, tuple[str, int]] = {}
        self._unread: dict[Key, str] = {}

    def get(self, name: str, namespace: str = "") -> Item | None:
        return self._items.get((namespace, name))

    def values(self) -> Iterator[Item]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def read(self, document: Document) -> Read[Item]:
        """Reduce an object to what `take` needs of it."""
        metadata = document["metadata"]
        key, version = key_of(document), int(metadata["resourceVersion"])
        try:
            return Read(key, metadata["uid"], version, self._trim(document))
        except ConfigurationError as error:
            return Read(key, metadata["uid"], version, None, str(error))

    def put(self, document: Document) -> None:
        """Take an object as it is now; one older than what is here (a late event) is passed over."""
        self._take(self.read(document))

    def _take(self, read: Read[Item]) -> None:
        _, known_version = self._versions.get(read.key, ("", -1))
        if read.version <= known_version:
            return
        if read.item is None:
            logger.warning("left out, because this version does not understand it: %s: %s", read.key[1], read.problem)
            self._unread[read.key] = read.uid
            self._drop(read.key)
            return
        self._unread.pop(read.key, None)
        before, after = self._items.get(read.key), read.item
        self._items[read.key], self._versions[read.key] = after, (read.uid, read.version)
        if before != after:
            self._changed(read.key, before, after)

    def remove(self, document: Document) -> None:
        """Take it that this object is gone, unless another one has its name by now."""
        key, uid = key_of(document), document["metadata"]["uid"]
        if self._unread.get(key) == uid:
            self._forget_unread(key)
        if self._versions.get(key, ("", 0))[0] == uid:
            self._drop(key)

    def renew(self, document: Document) -> None:
        """Take the answer to a write of ours, unless the object is gone by now: answers may come late."""
        if self._versions.get(key_of(document), ("", 0))[0] == document["metadata"]["uid"]:
            self.put(document)

    def replace(self, documents: list[Document], version: str) -> None:
        """Take these objects as all there were at a version; what is here and newer than the list stays."""
        self.take([self.read(document) for document in documents], version)

    def take(self, reads: Iterable[Read[Item]], version: str) -> None:
        """Do as `replace` does, with objects that `read` has reduced."""
        reads = list(reads)
        present = {read.key for read in reads}
        gone = (key for key, (_, known) in self._versions.items() if key not in present and known <= int(version))
        for key in list(gone):
            self._drop(key)
        for key in self._unread.keys() - present:
            self._forget_unread(key)
        for read in reads:
            self._take(read)

    def is_unread(self, name: str, namespace: str = "") -> bool:
        """Say whether there is an object of this name that was left out; it is not gone."""
        return (namespace, name) in self._unread

    def _forget_unread(self, key: Key) -> None:
        del self._unread[key]
        self._changed(key, None, None)

    def _drop(self, key: Key) -> None:
        before = self._items.pop(key, None)
        self._versions.pop(key, None)
        if before is not None:
            self._changed(key, before, None)


def key_of(document: Document) -> Key:
    """Return the key of an object."""
    metadata = document["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Informer(Generic[Item]):
    """Keeps one store like the API server's list at `path`.

    Args:
        name: the resource, for logs and metrics.
        query: selectors of the list and the watch.
        server_seconds: how long the server may keep one stream open.
        silence_seconds: how long a stream may say nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        api: Api,
        store: Store[Item],
        *,
        name: str,
        path: str,
        query: Mapping[str, str] | None = None,
        server_seconds: float,
        silence_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.store, self.name = store, name
        self._api, self._path, self._query = api, path, dict(query or {})
        self._server_seconds, self._silence_seconds, self._clock = server_seconds, silence_seconds, clock
        self._heard, self._version = clock(), ""
        self.synced = asyncio.Event()
        """Set when the first list was taken."""
        self.problem = ""
        """Why the last attempt failed; "" while all is well."""
        self.is_refused = False
        """Whether it failed because we may not read this kind, or because there is none."""

    @property
    def heard_age(self) -> float:
        """Seconds since the server last told anything."""
        return self._clock() - self._heard

    async def run(self) -> None:
        """Follow the server until cancelled."""
        pause = PAUSE_SECONDS_MIN
        while True:
            heard = self._heard
            try:
                if not self._version:
                    await self._list()
                await self._follow()
                self._hear(self._version)
                is_well = True
            except ApiError as error:
                # A server that told something is a good one, unless it lists and will not let us watch: lists are dear.
                is_well = self._heard != heard and (error.is_expired or not error.status)
                self._complain(error)
            pause = PAUSE_SECONDS_MIN if is_well else min(pause * 2, PAUSE_SECONDS_MAX)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # so that replicas and kinds spread out

    async def _list(self) -> None:
        reads: list[Read[Item]] = []
        version = ""
        async for page in self._api.pages(self._path, self._query):
            reads += map(self.store.read, page["items"])  # at once: all pods of a cluster whole take a gigabyte
            version = page["metadata"]["resourceVersion"]
        self.store.take(reads, version)
        self._hear(version)
        self.synced.set()

    async def _follow(self) -> None:
        """Take the events of one stream from where the last one ended."""
        query = {**self._query, "resourceVersion": self._version, "timeoutSeconds": str(int(self._server_seconds))}
        async for kind, document in self._api.watch(self._path, query=query, silence_seconds=self._silence_seconds):
            self._hear(document["metadata"]["resourceVersion"])
            if kind == "DELETED":
                self.store.remove(document)
            elif kind != "BOOKMARK":
                self.store.put(document)

    def _hear(self, version: str) -> None:
        self._heard, self._version = self._clock(), version
        self.problem, self.is_refused = "", False

    def _complain(self, error: ApiError) -> None:
        if error.status:  # the server answered, and refused: what we knew may be wrong
            self._version = ""
        self.is_refused = error.is_forbidden or error.is_missing
        if self.is_refused:
            self._heard = self._clock()
        if error.is_expired:
            return
        if str(error) != self.problem:
            logger.warning("cannot follow %s, trying again: %s", self.name, error)
        self.problem = str(error)
