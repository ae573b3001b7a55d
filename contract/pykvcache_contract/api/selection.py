"""Which nodes, disks and namespaces belong to a pool. The operator and the node agent ask the same functions."""

from collections.abc import Mapping, Sequence

from pykvcache_contract.api.node import Disk
from pykvcache_contract.api.pool import DiskSelector, KVCachePool, Sharing, StorageType
from pykvcache_contract.names import POOL_LABEL_PREFIX


def selects(pool: KVCachePool, labels: Mapping[str, str], disks: Sequence[Disk]) -> bool:
    """Say whether a node with these labels and disks should have the pool.

    Without storage.path and diskSelector a node without any disk should have it too: the node agent then reports
    NoSuitableDisk, and somebody looks.
    """
    if pool.spec.storage.type is not StorageType.NODE_LOCAL or not _matches(pool.spec.node_selector, labels):
        return False
    return bool(pool.spec.storage.path) or pool.spec.disk_selector is None or first_disk(pool, disks) is not None


def first_disk(pool: KVCachePool, disks: Sequence[Disk]) -> Disk | None:
    """Return the disk on which a pool without storage.path goes: the first suitable one in the order given."""
    selector = pool.spec.disk_selector
    return next((disk for disk in disks if selector is None or _suits(selector, disk)), None)


def admits(pool: KVCachePool, namespace: str, labels: Mapping[str, str]) -> bool:
    """Say whether a namespace may mount the pool; without allowedNamespaces each may, but none with sharing Pool."""
    allowed = pool.spec.allowed_namespaces
    if allowed is None or not (allowed.names or allowed.match_labels):
        return pool.spec.sharing is Sharing.NAMESPACE
    return namespace in allowed.names or (bool(allowed.match_labels) and _matches(allowed.match_labels, labels))


def node_label(pool_name: str) -> str:
    """Return the label that nodes have, with the value `ready`, while the pool is ready there."""
    return POOL_LABEL_PREFIX + pool_name


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _suits(selector: DiskSelector, disk: Disk) -> bool:
    return disk.size_bytes >= (selector.min_size_bytes or 0) and (not selector.types or disk.type in selector.types)
