"""Writing what the agent finds into its node's KVCacheNode: on change, not more often than every few seconds, and once
a minute to show that it lives. Sizes of a pool in use change all the time, on all nodes, and are written more seldom.

One thread. While the API server is away nothing piles up: the next write says how things are then.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from urllib.parse import quote

from pykvcache_contract.api.node import AgentStatus, KVCacheNode
from pykvcache_contract.api.objects import Metadata
from pykvcache_contract.names import API_GROUP, API_VERSION, NODE_KIND
from pykvcache_sidecar.node.api import Api, ApiError
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.watcher import CACHE_NODES_PATH, Pause

logger = logging.getLogger(__name__)

WRITE_SECONDS_MIN = 5.0
SIZES_SECONDS_MIN = 20.0
"""Between two writes that tell of nothing else but sizes."""
HEARTBEAT_SECONDS = 60.0


class StatusWriter:
    """Writes one KVCacheNode.

    Args:
        status: returns what is to be said, without the heartbeat's time.
        clock: Unix time.
        monotonic: seconds that never jump.

    Attributes:
        writes: how many succeeded and failed.
    """

    def __init__(
        self,
        api: Api,
        *,
        cluster: Cluster,
        node_name: str,
        status: Callable[[], AgentStatus],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._node = KVCacheNode(metadata=Metadata(name=node_name))
        self._path = f"{CACHE_NODES_PATH}/{quote(node_name)}"
        self._status = status
        self._clock = clock
        self._monotonic = monotonic
        self._owner_uid = ""
        self._written: AgentStatus | None = None
        self._written_seconds = -HEARTBEAT_SECONDS
        self.writes: Counter[str] = Counter({"success": 0, "error": 0})

    def run(self, stopped: threading.Event) -> None:
        """Write until it is stopped."""
        pause = Pause()
        while not stopped.is_set():
            try:
                self.write_if_due()
            except ApiError as error:
                self.writes["error"] += 1
                if error.is_missing:
                    self._owner_uid = ""  # somebody deleted the object: it is made again
                pause.wait(stopped, f"the node's status could not be written: {error}")
                continue
            except Exception:
                self.writes["error"] += 1
                logger.exception("the node's status could not be written")
                pause.wait(stopped)
                continue
            pause.reset()
            stopped.wait(1.0)

    def write_if_due(self) -> bool:
        """Write if something has changed or the heartbeat is due; return whether anything was written.

        Raises:
            ApiError: refused or no answer.
        """
        owner_uid = self._cluster.view().node_uid
        if not owner_uid:
            return False
        status = self._status()
        age = self._monotonic() - self._written_seconds
        if age < self._pause_seconds(status) and owner_uid == self._owner_uid:
            return False
        if owner_uid != self._owner_uid:
            self._make(owner_uid)
        now = datetime.fromtimestamp(int(self._clock()), timezone.utc)
        body = self._node.status_document(replace(status, heartbeat_time=now))
        self._api.apply(f"{self._path}/status", body)
        self._written, self._written_seconds = status, self._monotonic()
        self.writes["success"] += 1
        return True

    def _pause_seconds(self, status: AgentStatus) -> float:
        """Return how long after the last write this one is due."""
        if self._written == status:
            return HEARTBEAT_SECONDS
        is_size = self._written is not None and _without_sizes(self._written) == _without_sizes(status)
        return SIZES_SECONDS_MIN if is_size else WRITE_SECONDS_MIN

    def _make(self, owner_uid: str) -> None:
        """Make the object, which goes when the Node goes."""
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node.name, "uid": owner_uid}
        self._api.apply(
            self._path,
            {
                "apiVersion": f"{API_GROUP}/{API_VERSION}",
                "kind": NODE_KIND,
                "metadata": {"name": self._node.name, "ownerReferences": [owner]},
            },
        )
        self._owner_uid = owner_uid


def _without_sizes(status: AgentStatus) -> AgentStatus:
    return replace(
        status,
        disks=tuple(replace(disk, free_bytes=0) for disk in status.disks),
        pools=tuple(replace(pool, used_bytes=0) for pool in status.pools),
    )
