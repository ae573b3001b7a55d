"""Why a labelled pod goes without the cache, as far as the pod as a whole, its pool and its namespace decide.

Each check raises Skip with a message that says what to change.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_contract.api.objects import Condition, ConditionStatus
from pykvcache_contract.api.pool import CLAIMS_MAX, FAILING_NODES_MAX, KVCachePool, StorageType
from pykvcache_contract.api.selection import admits
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    CONDITION_READY,
    REASON_PATH_NOT_ALLOWED,
)
from pykvcache_operator.injection.outcome import Skip
from pykvcache_operator.injection.pod import mapping, metadata_of, shown
from pykvcache_operator.injection.volumes import uses_host_path
from pykvcache_operator.resources import NamespaceFacts
from pykvcache_operator.shared import claim_name

MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""On what the kubelet shows of a pod that it starts from a file; changing that changes nothing."""
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"
NO_AGENT = "NoNodeAgent"
"""Reason of a node without a node agent, in status.failingNodes."""
_WITHOUT_HOST_PATH = ("baseline", "restricted")
_PENDING = "ClaimPending"
"""Of a claim that is being made or bound: with some storage classes that happens when the first pod uses it."""


def check_pod(pod: Mapping[str, Any]) -> None:
    """Raise Skip for a pod in which the connector cannot run, or that is none."""
    spec = pod["spec"]
    if (
        mapping(spec, "os").get("name") == "windows"
        or mapping(spec, "nodeSelector").get("kubernetes.io/os") == "windows"
    ):
        raise Skip(SkipReason.UNSUPPORTED_POD, "It is a Windows pod; vLLM and the cache need Linux. Remove the label.")
    if MIRROR_ANNOTATION in metadata_of(pod, "annotations"):
        raise Skip(
            SkipReason.UNSUPPORTED_POD,
            "It is a static pod, which the kubelet starts from a file. Change that file by `pykvcache inject -f`.",
        )


def find_pool(name: str, pools: Mapping[str, KVCachePool]) -> KVCachePool:
    """Return the pool that the label names.

    Raises:
        Skip: there is none, or it is being deleted.
    """
    pool = pools.get(name)
    if pool is None:
        raise Skip(
            SkipReason.POOL_NOT_FOUND,
            f"There is no KVCachePool {shown(name)}. `kubectl get kvcachepools` lists those that exist; correct the "
            "label, or make the pool and then the pod again.",
        )
    if pool.metadata.deletion_timestamp is not None:
        raise Skip(SkipReason.POOL_DELETED, f"KVCachePool {name} is being deleted. Choose another one by the label.")
    return pool


def check_namespace(pool: KVCachePool, namespace: NamespaceFacts) -> None:
    """Raise Skip unless pods of the namespace may use the pool, and may have the volume that they need for it."""
    if not admits(pool, namespace.name, namespace.labels):
        raise Skip(
            SkipReason.NAMESPACE_NOT_ALLOWED,
            f"KVCachePool {pool.name} does not admit namespace {shown(namespace.name)}. Add it to the pool's "
            "spec.allowedNamespaces, or choose another pool by the label.",
        )
    level = namespace.labels.get(ENFORCE_LABEL)
    if uses_host_path(pool) and level in _WITHOUT_HOST_PATH:
        raise Skip(
            SkipReason.POD_SECURITY,
            f"KVCachePool {pool.name} has volume HostPath, and Pod Security {level} of namespace {namespace.name} "
            "refuses such volumes. Use a pool with volume CSI.",
        )


def check_volume(pool: KVCachePool, namespace: str) -> None:
    """Raise Skip if the pod would wait for the pool's volume, as far as the pool's status tells.

    A NodeLocal pool that is not ready is no reason: what its pods get then is an empty marker directory.

    Args:
        namespace: of the pod; empty: not known.
    """
    ready = next((found for found in pool.status.conditions if found.type == CONDITION_READY), None)
    if pool.spec.storage.type is StorageType.SHARED_FILESYSTEM:
        _check_claim(pool, ready, namespace)
    elif uses_host_path(pool):
        _check_path(pool, ready)
    elif pool.spec.storage.type is StorageType.NODE_LOCAL:
        _check_agents(pool)


def _check_claim(pool: KVCachePool, ready: Condition | None, namespace: str) -> None:
    claims = pool.status.claims
    if ready is None:
        problem = "the operator has not looked at it yet"
    elif ready.status is not ConditionStatus.TRUE and ready.reason != _PENDING:
        problem = ready.message
    elif namespace and 0 < len(claims) < CLAIMS_MAX and all(claim.namespace != namespace for claim in claims):
        problem = f"namespace {shown(namespace)} has no claim {claim_name(pool)}"
    else:
        return
    problem = problem.removesuffix(".")
    raise Skip(
        SkipReason.POOL_NOT_READY,
        f"KVCachePool {pool.name}: {problem}. The pod would wait for its volume; make it again when that is there.",
    )


def _check_path(pool: KVCachePool, ready: Condition | None) -> None:
    refused = ready is not None and ready.status is ConditionStatus.FALSE and ready.reason == REASON_PATH_NOT_ALLOWED
    if pool.spec.storage.path and not refused:
        return
    problem = ready.message if ready is not None and refused else "volume HostPath needs a storage.path"
    raise Skip(SkipReason.POOL_NOT_READY, f"KVCachePool {pool.name} cannot be mounted: {problem.removesuffix('.')}.")


def _check_agents(pool: KVCachePool) -> None:
    """A pod waits for ever for a CSI driver that runs nowhere, so no node agent at all is a reason.

    Of very many nodes the status names the first ones; that none is ready and none of these has an agent will do.
    """
    failing, desired = pool.status.failing_nodes, pool.status.nodes_desired
    is_on_none = 0 < desired and len(failing) == min(desired, FAILING_NODES_MAX) and not pool.status.nodes_ready
    if is_on_none and all(node.reason == NO_AGENT for node in failing):
        raise Skip(
            SkipReason.POOL_NOT_READY,
            f"No node of KVCachePool {pool.name} has a node agent, which serves its volumes. Install it: value "
            "agent.enabled of the chart.",
        )
