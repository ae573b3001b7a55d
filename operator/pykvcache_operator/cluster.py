"""The cluster in memory: a store per kind, and which pools a change concerns.

Stores are filled by informers, by kopf (pools) and by the answers to our own writes, so the next decision sees what the
last one did. A change wakes only pools whose decision may differ; a heartbeat or our own status wakes none. What this
misses, the round over all pools every few minutes finds. Event loop's thread only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pykvcache_contract.api.node import KVCacheNode
from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_contract.names import POOL_LABEL_PREFIX
from pykvcache_operator.calibration_job import NODE_ANNOTATION
from pykvcache_operator.informer import Key, Store
from pykvcache_operator.node_local import SILENT_AFTER
from pykvcache_operator.resources import (
    POOL_UID_LABEL,
    Claim,
    NamespaceFacts,
    NodeFacts,
    PoolItem,
    claim,
    namespace_facts,
    node_facts,
    pool_item,
)
from pykvcache_operator.shared import claim_name, needs_namespaces

Document = dict[str, Any]


class Cluster:
    """All that is known of the cluster.

    Args:
        wake: called with the name of each pool that a change concerns.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self.pools: Store[PoolItem] = Store(pool_item, self._pool_changed)
        self.nodes: Store[NodeFacts] = Store(node_facts, self._node_changed)
        self.caches: Store[KVCacheNode] = Store(KVCacheNode.parse, self._cache_changed)
        self.namespaces: Store[NamespaceFacts] = Store(namespace_facts, self._namespace_changed)
        self.claims: Store[Claim] = Store(claim, self._claim_changed)
        self.jobs: Store[Document] = Store(_without_managed_fields, self._job_changed)
        self.pods: Store[Document] = Store(_without_managed_fields, self._job_changed)
        """Pods of calibration Jobs."""

    def concerned(self) -> set[str]:
        """Return the names of all pools, and of those gone that left labels or profiles on nodes."""
        names = {item.pool.name for item in self.pools.values()}
        for node in self.nodes.values():
            names |= pools_of_labels(node.labels)
        for cache in self.caches.values():
            names |= {profile.pool for profile in cache.operator.profiles}
        return names

    def of_type(self, kind: StorageType) -> list[KVCachePool]:
        """Return the pools of a storage type."""
        return [item.pool for item in self.pools.values() if item.pool.spec.storage.type is kind]

    def _pool_changed(self, key: Key, before: PoolItem | None, after: PoolItem | None) -> None:
        if before is None or after is None or _declared(before.pool) != _declared(after.pool):
            self._wake(key[1])

    def _node_changed(self, _key: Key, before: NodeFacts | None, after: NodeFacts | None) -> None:
        labels = [facts.labels if facts else {} for facts in (before, after)]
        differing = {key for key in {**labels[0], **labels[1]} if labels[0].get(key) != labels[1].get(key)}
        if before and after and before.is_ready is after.is_ready:
            if all(key.startswith(POOL_LABEL_PREFIX) for key in differing):
                self._wake_all(pools_of_labels(dict.fromkeys(differing, "")))
                return
        self._wake_selecting(labels)

    def _cache_changed(self, key: Key, before: KVCacheNode | None, after: KVCacheNode | None) -> None:
        if before is None or after is None or before.agent.disks != after.agent.disks:
            node = self.nodes.get(key[1])
            self._wake_selecting([node.labels] if node else [])
        self._wake_all(concerned_by(before, after))

    def _namespace_changed(self, _key: Key, _before: NamespaceFacts | None, _after: NamespaceFacts | None) -> None:
        self._wake_all(p.name for p in self.of_type(StorageType.SHARED_FILESYSTEM) if needs_namespaces(p))

    def _claim_changed(self, key: Key, before: Claim | None, after: Claim | None) -> None:
        uids = {claim.pool_uid for claim in (before, after) if claim}
        for pool in self.of_type(StorageType.SHARED_FILESYSTEM):
            if claim_name(pool) == key[1] or pool.metadata.uid in uids:
                self._wake(pool.name)

    def _job_changed(self, _key: Key, before: Document | None, after: Document | None) -> None:
        """Wake the pool of a Job or of its pod; when a Job is gone, also the pools that its node may measure now."""
        if before is None:
            return  # what we made
        uid = before["metadata"].get("labels", {}).get(POOL_UID_LABEL, "")
        self._wake_all(pool.name for pool in self.of_type(StorageType.NODE_LOCAL) if pool.metadata.uid == uid)
        cache = self.caches.get(before["metadata"].get("annotations", {}).get(NODE_ANNOTATION, ""))
        if after is None and cache is not None:
            self._wake_all(entry.name for entry in cache.agent.pools)

    def _wake_selecting(self, labels: Iterable[Mapping[str, str]]) -> None:
        """Wake the pools that want, or wanted, a node with these labels."""
        for pool in self.of_type(StorageType.NODE_LOCAL):
            if any(pool.spec.node_selector.items() <= known.items() for known in labels):
                self._wake(pool.name)

    def _wake_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._wake(name)


def pools_of_labels(labels: Mapping[str, str]) -> set[str]:
    """Return the pools that have a label of ours among these."""
    return {key.removeprefix(POOL_LABEL_PREFIX) for key in labels if key.startswith(POOL_LABEL_PREFIX)}


def concerned_by(before: KVCacheNode | None, after: KVCacheNode | None) -> set[str]:
    """Return the pools for which the change of a KVCacheNode may matter."""
    named = [{pool.name: pool for pool in cache.agent.pools} if cache else {} for cache in (before, after)]
    profiles = [{p.pool: p for p in cache.operator.profiles} if cache else {} for cache in (before, after)]
    names = set(named[0]) | set(named[1])
    if before is None or after is None or _is_shared_news(before, after):
        return names
    changed = {name for name in names if named[0].get(name) != named[1].get(name)}
    places = [{(p.name, p.path, p.capacity_bytes) for p in pools.values()} for pools in named]
    if places[0] != places[1]:
        return names  # pools on one disk share its room
    known = set(profiles[0]) | set(profiles[1])
    return changed | {name for name in known if profiles[0].get(name) != profiles[1].get(name)}


def _is_shared_news(before: KVCacheNode, after: KVCacheNode) -> bool:
    """Say whether the node itself changed, or its agent is back."""
    ours, theirs = before.agent, after.agent
    if ours.disks != theirs.disks or ours.io_uring != theirs.io_uring or ours.kernel != theirs.kernel:
        return True
    if before.metadata.annotations != after.metadata.annotations:
        return True
    beats = (ours.heartbeat_time, theirs.heartbeat_time)
    return beats[0] is None or beats[1] is None or abs(beats[1] - beats[0]) > SILENT_AFTER


def _declared(pool: KVCachePool) -> object:
    """Return what people and Kubernetes say about a pool, without what the operator says."""
    return replace(pool.metadata, resource_version=""), pool.spec


def _without_managed_fields(document: Mapping[str, Any]) -> Document:
    """Return an object without its longest and least needed part."""
    metadata = {key: value for key, value in document["metadata"].items() if key != "managedFields"}
    return {**document, "metadata": metadata}
