"""Keeping the agent's picture of the cluster up to date: one thread for each kind of object.

A watcher lists, then watches from there on; when the server has forgotten the version it lists again; when it does not
answer, the picture stays and the watcher tries again with growing, jittered pauses. `KubernetesSource` says what is
watched and what of it the agent needs.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

from pykvcache_contract.api.node import KVCacheNode
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.names import API_GROUP, API_VERSION, NODE_PLURAL, POOL_PLURAL
from pykvcache_sidecar.node.api import Api, ApiError, Document
from pykvcache_sidecar.node.cluster import Cluster

logger = logging.getLogger(__name__)

API_PATH = f"/apis/{API_GROUP}/{API_VERSION}"
POOLS_PATH = f"{API_PATH}/{POOL_PLURAL}"
CACHE_NODES_PATH = f"{API_PATH}/{NODE_PLURAL}"
NAMESPACES_PATH = "/api/v1/namespaces"
NODE_SECONDS = 60.0
"""How often the agent's Node is read. Its labels change seldom, and a watch would need the right to see all Nodes."""
PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 30.0


class Watcher:
    """Keeps all objects at a path in memory.

    Args:
        tell: called with all objects by name after the first list and after each change.
        heard: called whenever the server said anything.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        *,
        tell: Callable[[Mapping[str, Document]], None],
        heard: Callable[[], None],
        query: Mapping[str, str] | None = None,
    ) -> None:
        self._api = api
        self._path = path
        self._tell = tell
        self._heard = heard
        self._query = query
        self._objects: dict[str, Document] = {}
        self._version = ""

    def run(self, stopped: threading.Event) -> None:
        """Follow until it is stopped."""
        pause = Pause()
        while not stopped.is_set():
            try:
                self._follow(stopped, pause)
                stopped.wait(PAUSE_SECONDS_MIN)  # a server that ends every watch at once is not asked without end
            except ApiError as error:
                if error.status:
                    self._version = ""  # expired, or refused: what was seen last may be long ago
                if not error.is_expired:
                    pause.wait(stopped, f"the API server does not tell of {self._path}: {error}")
            except Exception:
                logger.exception("%s could not be followed", self._path)
                self._version = ""
                pause.wait(stopped)

    def _follow(self, stopped: threading.Event, pause: "Pause") -> None:
        if not self._version:
            items, self._version = self._api.list(self._path, self._query)
            self._objects = {item["metadata"]["name"]: item for item in items}
            self._heard()
            self._tell(dict(self._objects))
        for kind, item in self._api.watch(self._path, version=self._version, query=self._query):
            pause.reset()
            self._heard()
            self._version = item["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            if kind == "DELETED":
                self._objects.pop(item["metadata"]["name"], None)
            else:
                self._objects[item["metadata"]["name"]] = item
            self._tell(dict(self._objects))
            if stopped.is_set():
                return


class Pause:
    """Waits longer after each failure, up to `PAUSE_SECONDS_MAX`; says the first failure of each kind."""

    def __init__(self) -> None:
        self._seconds = PAUSE_SECONDS_MIN
        self._said = ""

    def wait(self, stopped: threading.Event, sentence: str = "") -> None:
        """Wait, unless it is stopped."""
        if sentence != self._said:
            self._said = sentence
            logger.warning("%s", sentence)
        stopped.wait(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(2 * self._seconds, PAUSE_SECONDS_MAX)

    def reset(self) -> None:
        """Begin with short waits again."""
        self._seconds = PAUSE_SECONDS_MIN
        self._said = ""


class KubernetesSource:
    """Fills the picture of the cluster.

    Args:
        node_name: of the Node that this agent is on.
        clock: Unix time.
    """

    def __init__(self, api: Api, cluster: Cluster, *, node_name: str, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._cluster = cluster
        self._node_name = node_name
        self._clock = clock
        self._needs_namespaces = threading.Event()
        self._unread: dict[str, str] = {}
        self.heard_seconds = 0.0
        """Unix time at which the API server was heard last."""

    def start(self, stopped: threading.Event) -> None:
        """Start one thread for each kind."""
        own = {"fieldSelector": f"metadata.name={self._node_name}"}
        pools = Watcher(self._api, POOLS_PATH, tell=self._tell_pools, heard=self._heard)
        profiles = Watcher(self._api, CACHE_NODES_PATH, tell=self._tell_own, heard=self._heard, query=own)
        for run in (pools.run, profiles.run, self._follow_node, self._follow_namespaces):
            threading.Thread(target=run, args=(stopped,), name="pykvcache-watch", daemon=True).start()

    def list_uids(self) -> "frozenset[str] | None":
        """Ask the API server for the uids of all pools that exist now; None if it does not answer."""
        try:
            items, _ = self._api.list(POOLS_PATH)
        except ApiError as error:
            logger.debug("the pools could not be listed: %s", error)
            return None
        return frozenset(item["metadata"]["uid"] for item in items)

    def list_namespaces(self) -> "frozenset[str] | None":
        """Ask the API server for the names of all namespaces that exist now; None if it does not answer sensibly."""
        try:
            items, _ = self._api.list(NAMESPACES_PATH)
        except ApiError as error:
            logger.debug("the namespaces could not be listed: %s", error)
            return None
        return frozenset(item["metadata"]["name"] for item in items) or None  # there are always some

    def _heard(self) -> None:
        self.heard_seconds = self._clock()

    def _tell_pools(self, documents: Mapping[str, Document]) -> None:
        pools, unreadable = {}, {}
        for name, document in documents.items():
            try:
                pools[name] = KVCachePool.parse(document)
            except ConfigurationError as error:
                unreadable[document["metadata"]["uid"]] = f"KVCachePool {name} is left alone: {error}"
        for uid, sentence in unreadable.items():
            if self._unread.get(uid) != sentence:
                logger.error("%s. Is the node agent older than the CRDs?", sentence)
        self._unread = unreadable
        self._cluster.update(pools=pools, unreadable=frozenset(unreadable))
        if self._cluster.view().needs_namespaces:
            self._needs_namespaces.set()

    def _tell_own(self, documents: Mapping[str, Document]) -> None:
        document = documents.get(self._node_name)
        try:
            profiles = () if document is None else KVCacheNode.parse(document).operator.profiles
        except ConfigurationError as error:
            logger.error("the profiles of this node cannot be read: %s", error)
            return
        self._cluster.update(profiles=profiles)

    def _tell_namespaces(self, documents: Mapping[str, Document]) -> None:
        labels = {name: document["metadata"].get("labels", {}) for name, document in documents.items()}
        self._cluster.update(namespaces=labels)

    def _follow_namespaces(self, stopped: threading.Event) -> None:
        while not self._needs_namespaces.wait(1.0):
            if stopped.is_set():
                return
        Watcher(self._api, NAMESPACES_PATH, tell=self._tell_namespaces, heard=self._heard).run(stopped)

    def _follow_node(self, stopped: threading.Event) -> None:
        pause = Pause()
        while not stopped.is_set():
            try:
                metadata = self._api.get(f"/api/v1/nodes/{quote(self._node_name)}")["metadata"]
            except ApiError as error:
                pause.wait(stopped, f"Node {self._node_name} could not be read: {error}")
                continue
            except Exception:
                logger.exception("Node %s could not be read", self._node_name)
                pause.wait(stopped)
                continue
            pause.reset()
            self._heard()
            self._cluster.update(labels=metadata.get("labels", {}), node_uid=metadata["uid"])
            stopped.wait(NODE_SECONDS * random.uniform(0.9, 1.1))
