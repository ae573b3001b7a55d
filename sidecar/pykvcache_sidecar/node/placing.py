"""Where on this node a pool lies: found again, or chosen and prepared.

A pool stays where it was prepared once. Only one that never was, as far as anybody remembers and any disk shows, gets a
place chosen. Blocking; the pool's own thread.
"""

from pykvcache_contract.api.node import Disk
from pykvcache_contract.api.pool import DeletionPolicy, KVCachePool
from pykvcache_contract.api.selection import first_disk
from pykvcache_contract.names import REASON_NO_SUITABLE_DISK, REASON_PATH_NOT_ALLOWED
from pykvcache_sidecar.node.memory import Remembered
from pykvcache_sidecar.node.orders import Surroundings
from pykvcache_sidecar.node.tree import Known, PoolTree, find_trees, prepare
from pykvcache_sidecar.node.tree_file import PoolIdentity, TreeError

ROOT_NAME = "pykvcache"
"""A pool without a path goes below this directory of a disk."""


def prepare_tree(pool: KVCachePool, around: Surroundings) -> PoolTree:
    """Return the pool's tree; make it if it is missing, on a disk that may be taken for it.

    Raises:
        TreeError: there is no place for it, or none now.
    """
    root, remembered = _root(pool, around), around.memory.get(pool.metadata.uid)
    tree = prepare(
        root,
        PoolIdentity(pool.name, pool.metadata.uid, retain=pool.spec.deletion_policy is DeletionPolicy.RETAIN),
        allow_root_filesystem=around.settings.allow_root_filesystem,
        known=None if remembered is None else Known(remembered.generation, remembered.mount_point),
    )
    record = tree.record
    around.memory.note(pool.metadata.uid, Remembered(pool.name, root, record.generation, record.mount_point))
    return tree


def find_tree(uid: str, pool: KVCachePool | None, around: Surroundings) -> PoolTree | None:
    """Return a pool's tree where it is remembered or where its path says; None if it is not there.

    Raises:
        TreeError: the place cannot be read.
    """
    remembered = around.memory.get(uid)
    roots = [] if remembered is None else [remembered.root]
    if pool is not None and pool.spec.storage.path:
        roots.append(pool.spec.storage.path)
    trees = (tree for root in roots for tree in find_trees(root))
    return next((tree for tree in trees if tree.record.identity.uid == uid), None)


def _root(pool: KVCachePool, around: Surroundings) -> str:
    settings, path = around.settings, pool.spec.storage.path
    if path:
        if not settings.allows(path):
            raise TreeError(
                REASON_PATH_NOT_ALLOWED,
                f"{path} is not below {' or '.join(settings.allowed_paths) or 'any path'}, where pools may lie. "
                "Choose such a path, or allow it in the chart (storage.allowedPaths).",
            )
        return path
    remembered = around.memory.get(pool.metadata.uid)
    if remembered is not None:
        return remembered.root
    disk = _disk_with_tree(pool.metadata.uid, around) or first_disk(pool, around.disks())
    if disk is None:
        raise TreeError(
            REASON_NO_SUITABLE_DISK,
            f"no suitable disk is mounted at {', '.join(settings.disk_patterns)}. Mount one there, or give the pool a "
            "path.",
        )
    return f"{disk.mount_path}/{ROOT_NAME}"


def _disk_with_tree(uid: str, around: Surroundings) -> Disk | None:
    for disk in around.disks():
        if any(tree.record.identity.uid == uid for tree in find_trees(f"{disk.mount_path}/{ROOT_NAME}")):
            return disk
    return None
