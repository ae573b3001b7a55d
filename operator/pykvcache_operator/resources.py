"""What the parts of a reconcile hand to each other: the cluster as seen, and what is to be done about it.

Plain frozen values; the functions that make them from API objects are pure. Only what a decision needs is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pykvcache_contract.api.node import KVCacheNode
from pykvcache_contract.api.pool import KVCachePool, PoolStatus
from pykvcache_contract.api.quantities import parse_quantity

POOL_UID_LABEL = "pykvcache.io/pool-uid"
"""On claims and Jobs made for a pool."""


@dataclass(frozen=True, slots=True)
class PoolItem:
    """A pool, and its status exactly as the server has it."""

    pool: KVCachePool
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A Node: where it is reachable, its kubelet reports Ready."""

    name: str
    uid: str
    is_ready: bool
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """A Namespace."""

    name: str
    labels: Mapping[str, str]
    is_terminating: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim; `pool_uid` is "" where the operator did not make it."""

    namespace: str
    name: str
    uid: str
    pool_uid: str
    is_bound: bool
    is_terminating: bool
    requested_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as a pool sees it: the Node (None: deleted) and what its agent wrote (None: nothing, or `is_unread`)."""

    name: str
    node: NodeFacts | None
    cache: KVCacheNode | None
    is_unread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCounts:
    """The labelled pods of a pool by what became of them, and the first few that go without, as people read them."""

    injected: int = 0
    skipped: int = 0
    missed: int = 0
    skipped_pods: tuple[str, ...] = ()
    missed_pods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodsView:
    """Labelled pods as far as they are known; `problem`: why they cannot be read, None while they are read first."""

    counts: PodCounts
    problem: str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The cluster as one pool sees it, at one moment.

    Args:
        nodes: those that match the pool's nodeSelector, have its label, or say that they hold it.
        min_free_bytes: storage.minFree of every NodeLocal pool, by name.
        namespaces: all; empty for pools that need to know none.
        claims: those that the pool names or that were made for it.
        claims_problem: why claims cannot be read, "" if they can or none are needed.
        claims_refusal: why a claim could not be written last time, "" if all could.
        allowed_host_paths: prefixes under which volume HostPath is allowed.
        is_calibrating: whether this operator measures disks at all.
        pods: None: this operator does not follow pods.
    """

    item: PoolItem
    nodes: tuple[NodeView, ...] = ()
    min_free_bytes: Mapping[str, int] = field(default_factory=dict)
    namespaces: tuple[NamespaceFacts, ...] = ()
    claims: tuple[Claim, ...] = ()
    claims_problem: str = ""
    claims_refusal: str = ""
    allowed_host_paths: tuple[str, ...] = ()
    is_calibrating: bool = True
    pods: PodsView | None = None

    @property
    def pool(self) -> KVCachePool:
        return self.item.pool


class Severity(Enum):
    """Types of Kubernetes Events."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Notice:
    """An Event to post on the pool."""

    severity: Severity
    reason: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done for one pool; the order of the fields is the order of doing.

    Args:
        add_finalizer: before anything else exists for the pool.
        label_nodes, unlabel_nodes: names of nodes that get or lose the pool's label.
        make_claims: namespaces in which the pool's claim is to be made.
        drop_claims: claims to delete.
        status: None leaves it as it is.
        remove_finalizer: last of all; the pool is gone then.
        again_seconds: when to look again without news; None: only with news.
    """

    add_finalizer: bool = False
    label_nodes: tuple[str, ...] = ()
    unlabel_nodes: tuple[str, ...] = ()
    make_claims: tuple[str, ...] = ()
    enlarge_claims: tuple[Claim, ...] = ()
    drop_claims: tuple[Claim, ...] = ()
    status: PoolStatus | None = None
    notices: tuple[Notice, ...] = ()
    remove_finalizer: bool = False
    again_seconds: float | None = None


# ---- from API objects ----


def pool_item(document: Mapping[str, Any]) -> PoolItem:
    """Return a pool from its API object.

    Raises:
        ConfigurationError: the object is not one that this version understands.
    """
    return PoolItem(KVCachePool.parse(document), document.get("status") or {})


def node_facts(document: Mapping[str, Any]) -> NodeFacts:
    """Return what is needed of a Node."""
    metadata, conditions = document["metadata"], document.get("status", {}).get("conditions") or ()
    is_ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
    return NodeFacts(metadata["name"], metadata["uid"], is_ready, metadata.get("labels") or {})


def namespace_facts(document: Mapping[str, Any]) -> NamespaceFacts:
    """Return what is needed of a Namespace."""
    metadata = document["metadata"]
    return NamespaceFacts(metadata["name"], metadata.get("labels") or {}, "deletionTimestamp" in metadata)


def claim(document: Mapping[str, Any]) -> Claim:
    """Return what is needed of a PersistentVolumeClaim."""
    metadata, status = document["metadata"], document.get("status") or {}
    requests = document["spec"].get("resources", {}).get("requests") or {}
    return Claim(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        (metadata.get("labels") or {}).get(POOL_UID_LABEL, ""),
        status.get("phase") == "Bound",
        "deletionTimestamp" in metadata,
        _size(requests.get("storage", 0)),
        _size((status.get("capacity") or {}).get("storage", 0)),
    )


def _size(quantity: str | int) -> int:
    """Return a quantity in bytes; 0 for the odd ones that people write (`1e9`, `500m`) and we never do."""
    try:
        return parse_quantity(quantity)
    except ValueError:
        return 0
