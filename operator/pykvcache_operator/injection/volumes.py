"""The volume by which a pod gets its pool, and where it is mounted."""

from collections.abc import Iterator, Mapping
from typing import Any

from pykvcache_contract.api.pool import KVCachePool, Sharing, StorageType, Volume
from pykvcache_contract.api.quantities import format_quantity
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import DRIVER_NAME, POOL_ATTRIBUTE, POOL_PATH, POOL_VOLUME
from pykvcache_operator.injection.outcome import Document, Skip
from pykvcache_operator.injection.pod import mapping
from pykvcache_operator.shared import claim_name

NAMESPACES_DIRECTORY, SHARED_DIRECTORY = "ns", "shared"
"""Where the node agent makes the directories of namespaces, and that of all, in `<storage.path>/<pool>`."""


def pool_volume(pool: KVCachePool, namespace: str) -> Document:
    """Return the pod's volume of the pool.

    Args:
        namespace: of the pod, which only a volume HostPath needs; empty: not known.

    Raises:
        Skip: it is not known, and the directory depends on it.
    """
    return {"name": POOL_VOLUME, **_source(pool, namespace)}


def pool_mount() -> Document:
    """Return the mount of that volume, for vLLM and for the sidecar."""
    return {"name": POOL_VOLUME, "mountPath": POOL_PATH}


def needs_sidecar(pool: KVCachePool) -> bool:
    """Say whether the pod itself must look after its pool; NodeLocal pools are looked after by the node agent."""
    return pool.spec.storage.type is not StorageType.NODE_LOCAL


def uses_host_path(pool: KVCachePool) -> bool:
    """Say whether the pod needs a hostPath volume."""
    storage = pool.spec.storage
    return storage.type is StorageType.NODE_LOCAL and storage.volume is Volume.HOST_PATH


def volume_warnings(pool: KVCachePool, spec: Mapping[str, Any]) -> Iterator[str]:
    """Say what about the pod may not go together with the pool's volume."""
    if spec.get("hostUsers") is False and pool.spec.storage.type is StorageType.SHARED_FILESYSTEM:
        yield (
            "hostUsers: false needs a claim whose filesystem can map users, which NFS cannot: the pod would not start. "
            "Leave hostUsers out, or use a pool of another storage type."
        )
    context = mapping(spec, "securityContext")
    is_slow = context.get("fsGroup") is not None and context.get("fsGroupChangePolicy") != "OnRootMismatch"
    if is_slow and pool.spec.storage.type is StorageType.SHARED_FILESYSTEM:
        yield (
            "fsGroup: many storage drivers then change the group of every file of the pool before a pod starts. "
            "Set securityContext.fsGroupChangePolicy: OnRootMismatch."
        )


def _source(pool: KVCachePool, namespace: str) -> Document:
    storage = pool.spec.storage
    if storage.type is StorageType.EPHEMERAL:
        return {"emptyDir": {"sizeLimit": format_quantity(storage.capacity_bytes or 0)}}
    if storage.type is StorageType.SHARED_FILESYSTEM:
        return {"persistentVolumeClaim": {"claimName": claim_name(pool)}}
    if storage.volume is Volume.HOST_PATH:
        # Not `Directory`: the pod would wait where the pool is not ready. What the kubelet makes in that case is empty
        # and belongs to root, and vLLM, told not to make a pool of it, leaves it alone.
        return {"hostPath": {"path": _directory(pool, namespace), "type": "DirectoryOrCreate"}}
    return {"csi": {"driver": DRIVER_NAME, "volumeAttributes": {POOL_ATTRIBUTE: pool.name}}}


def _directory(pool: KVCachePool, namespace: str) -> str:
    tree = f"{pool.spec.storage.path}/{pool.name}"
    if pool.spec.sharing is Sharing.POOL:
        return f"{tree}/{SHARED_DIRECTORY}"
    if not namespace:
        raise Skip(
            SkipReason.POOL_NOT_READY,
            f"The directory of KVCachePool {pool.name} depends on the namespace. Write metadata.namespace.",
        )
    return f"{tree}/{NAMESPACES_DIRECTORY}/{namespace}"
