"""What the API server has told so far, as one immutable picture: the rest of the agent looks at it and never waits.

`Cluster` is written by the threads that watch and read by all others. While the API server is away the last picture
stays; it says of each part whether it was ever told, because nothing known of a pool is not the same as no pool.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pykvcache_contract.api.node import Profile
from pykvcache_contract.api.pool import KVCachePool, StorageType, Volume


@dataclass(frozen=True, slots=True)
class View:
    """The picture at one moment.

    Args:
        pools: by name; None until the first complete list.
        unreadable: uids of pools that this version cannot read: they exist, and that is all.
        labels: of this agent's Node; None until it was read once.
        node_uid: of this agent's Node; empty until it was read once.
        namespaces: labels of each namespace by name; None until the first complete list.
        profiles: what the operator measured on this node.
    """

    pools: Mapping[str, KVCachePool] | None = None
    unreadable: frozenset[str] = frozenset()
    labels: Mapping[str, str] | None = None
    node_uid: str = ""
    namespaces: Mapping[str, Mapping[str, str]] | None = None
    profiles: tuple[Profile, ...] = field(default=())

    @property
    def uids(self) -> frozenset[str] | None:
        """Return the uids of all pools that exist; None until the first complete list."""
        if self.pools is None:
            return None
        return self.unreadable | {pool.metadata.uid for pool in self.pools.values()}

    @property
    def needs_namespaces(self) -> bool:
        """Return whether a pool selects namespaces by their labels, or wants directories for all before they ask."""
        pools = (self.pools or {}).values()
        return any(
            pool.spec.storage.volume is Volume.HOST_PATH
            or (pool.spec.allowed_namespaces is not None and pool.spec.allowed_namespaces.match_labels)
            for pool in pools
            if pool.spec.storage.type is StorageType.NODE_LOCAL
        )


class Cluster:
    """The current picture.

    Args:
        on_change: called after each change, on the thread that made it.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._view = View()
        self.on_change = on_change

    def view(self) -> View:
        """Return the picture; it never changes."""
        return self._view

    def update(self, **parts: Any) -> None:
        """Replace parts of the picture."""
        with self._lock:
            before = self._view
            self._view = replace(before, **parts)
        if self._view != before:
            self.on_change()
