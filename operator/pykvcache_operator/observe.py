"""From the stores to what one pool sees. Reads only; the result is a frozen snapshot."""

from pykvcache_contract.api.node import KVCacheNode
from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_contract.api.selection import node_label
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.resources import NodeView, Observation, PodsView, PoolItem
from pykvcache_operator.shared import claim_name, needs_namespaces


def observe(
    cluster: Cluster,
    item: PoolItem,
    *,
    claims_problem: str,
    claims_refusal: str,
    allowed_host_paths: tuple[str, ...],
    is_calibrating: bool,
    pods: PodsView | None,
) -> Observation:
    """Return the cluster as a pool sees it now; the other arguments are told as they are."""
    pool = item.pool
    kind = pool.spec.storage.type
    if kind is StorageType.NODE_LOCAL:
        frees = {other.name: other.spec.storage.min_free_bytes for other in cluster.of_type(StorageType.NODE_LOCAL)}
        return Observation(
            item=item,
            nodes=_nodes(cluster, pool),
            min_free_bytes=frees,
            allowed_host_paths=allowed_host_paths,
            is_calibrating=is_calibrating,
            pods=pods,
        )
    if kind is StorageType.SHARED_FILESYSTEM:
        name, uid = claim_name(pool), pool.metadata.uid
        return Observation(
            item=item,
            namespaces=tuple(cluster.namespaces.values()) if needs_namespaces(pool) else (),
            claims=tuple(claim for claim in cluster.claims.values() if claim.name == name or claim.pool_uid == uid),
            claims_problem=claims_problem,
            claims_refusal=claims_refusal,
            pods=pods,
        )
    return Observation(item=item, pods=pods)


def labelled_nodes(cluster: Cluster, pool_name: str) -> tuple[str, ...]:
    """Return the nodes that have a pool's label."""
    label = node_label(pool_name)
    return tuple(sorted(node.name for node in cluster.nodes.values() if label in node.labels))


def _nodes(cluster: Cluster, pool: KVCachePool) -> tuple[NodeView, ...]:
    label, selector = node_label(pool.name), pool.spec.node_selector.items()
    views = [
        NodeView(node.name, node, cluster.caches.get(node.name), cluster.caches.is_unread(node.name))
        for node in cluster.nodes.values()
        if selector <= node.labels.items() or label in node.labels or _holds(cluster.caches.get(node.name), pool)
    ]
    gone = (cache for cache in cluster.caches.values() if cluster.nodes.get(cache.name) is None)
    views += [NodeView(cache.name, None, cache) for cache in gone if _holds(cache, pool)]
    return tuple(sorted(views, key=lambda view: view.name))


def _holds(cache: KVCacheNode | None, pool: KVCachePool) -> bool:
    return cache is not None and any(entry.uid == pool.metadata.uid for entry in cache.agent.pools)
