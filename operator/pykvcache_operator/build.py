"""The objects and patches that the operator writes, as JSON. Pure."""

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from pykvcache_contract.api.fields import api_fields, to_dict
from pykvcache_contract.api.node import PROFILES_MAX, KVCacheNode, OperatorStatus, Profile
from pykvcache_contract.api.pool import KVCachePool, PoolStatus
from pykvcache_contract.api.selection import node_label
from pykvcache_contract.names import (
    API_GROUP,
    API_VERSION,
    CONDITION_INJECTION_HEALTHY,
    FINALIZER,
    OPERATOR_FIELD_MANAGER,
    POOL_KIND,
    POOL_LABEL_READY,
    POOL_NAME_LABEL,
)
from pykvcache_operator.pods import PodFacts
from pykvcache_operator.resources import POOL_UID_LABEL, Notice
from pykvcache_operator.shared import claim_name

EVENT_NAMESPACE = "default"
"""Where Events about cluster-scoped objects belong."""
EVENT_NOTE_BYTES_MAX = 1024
"""In UTF-8: the API server says characters, counts bytes, and refuses what is longer."""
Document = dict[str, Any]
_QUIET_FIELDS = ("usedBytes", "used", "injectedPods", "skippedPods", "missedPods", "pods")


def finalizer(pool: KVCachePool) -> Document:
    """Return the apply that keeps a pool until it is cleaned up; the uid keeps it from making a pool."""
    metadata = {"name": pool.name, "uid": pool.metadata.uid, "finalizers": [FINALIZER]}
    return {"apiVersion": f"{API_GROUP}/{API_VERSION}", "kind": POOL_KIND, "metadata": metadata}


def without_finalizer(pool: KVCachePool) -> Document:
    """Return the merge that lets a pool go, unless somebody changed it meanwhile; other finalizers stay."""
    others = [name for name in pool.metadata.finalizers if name != FINALIZER]
    metadata = {
        "uid": pool.metadata.uid,
        "resourceVersion": pool.metadata.resource_version,
        "finalizers": others,
    }
    return {"metadata": metadata}


def node_labels(pool_name: str, *, is_ready: bool) -> Document:
    """Return the merge that sets or removes a pool's label on a node, and touches nothing else of it."""
    return {"metadata": {"labels": {node_label(pool_name): POOL_LABEL_READY if is_ready else None}}}


def claim(pool: KVCachePool, namespace: str) -> Document:
    """Return a pool's claim in a namespace.

    It has no owner reference: with deletionPolicy Retain it must outlive the pool.
    """
    storage = pool.spec.storage
    labels = {
        POOL_NAME_LABEL: pool.name,
        POOL_UID_LABEL: pool.metadata.uid,
        "app.kubernetes.io/managed-by": OPERATOR_FIELD_MANAGER,
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name(pool), "namespace": namespace, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage.storage_class_name,
            **_requests(pool),
        },
    }


def larger_claim(pool: KVCachePool) -> Document:
    """Return the merge that makes a claim as large as the pool wants it now."""
    return {"spec": _requests(pool)}


def _requests(pool: KVCachePool) -> Document:
    return {"resources": {"requests": {"storage": str(pool.spec.storage.capacity_bytes)}}}


def event(pool: KVCachePool, notice: Notice, *, instance: str, now: datetime) -> Document:
    """Return an Event about a pool."""
    regarding = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": POOL_KIND,
        "name": pool.name,
        "uid": pool.metadata.uid,
        "resourceVersion": pool.metadata.resource_version,
    }
    metadata = {"generateName": f"{pool.name}-", "namespace": EVENT_NAMESPACE}
    return _event(notice, metadata, regarding, instance=instance, now=now)


def pod_event(pod: PodFacts, notice: Notice, *, instance: str, now: datetime) -> Document:
    """Return an Event about a pod.

    Its name is the same whoever posts it and whenever: the API server refuses a second one, and nobody has to remember
    which pods were told about.
    """
    regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
    metadata = {"name": f"pykvcache.{pod.uid}.{notice.reason.lower()}", "namespace": pod.namespace}
    return _event(notice, metadata, regarding, instance=instance, now=now)


def _event(notice: Notice, metadata: Document, regarding: Document, *, instance: str, now: datetime) -> Document:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": metadata,
        "eventTime": now.astimezone(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "type": notice.severity.value,
        "reason": notice.reason,
        "note": _clipped(notice.note),
        "action": "Reconcile",
        "reportingController": f"{API_GROUP}/operator",
        "reportingInstance": instance[:128],
        "regarding": regarding,
    }


def _clipped(note: str) -> str:
    encoded = note.encode(errors="replace")
    if len(encoded) <= EVENT_NOTE_BYTES_MAX:
        return note
    return encoded[: EVENT_NOTE_BYTES_MAX - len("…".encode())].decode(errors="ignore") + "…"


def profiles(cache: KVCacheNode, pool_name: str, profile: Profile | None) -> Document:
    """Return the apply of all profiles of a node, with that of one pool changed, or left out; of too many the first."""
    kept = [known for known in cache.operator.profiles if known.pool != pool_name][: PROFILES_MAX - 1]
    ordered = sorted([*kept, *([profile] if profile else [])], key=lambda known: known.pool)
    return cache.status_document(OperatorStatus(profiles=tuple(ordered)))


def status_differs(current: Mapping[str, Any], wanted: PoolStatus) -> bool:
    """Say whether the server's status of a pool is not the wanted one."""
    document = to_dict(wanted)
    return any(current.get(field.name) != document.get(field.name) for field in api_fields(PoolStatus))


def is_quiet(current: Mapping[str, Any], wanted: PoolStatus) -> bool:
    """Say whether nothing differs but what changes all the time and nobody waits for.

    Pods come and go by the thousand, so of them only the first that went past the webhook is news.
    """
    document = to_dict(wanted)
    is_first_missed = _misses_pods(document) and not _misses_pods(current)
    return _loud(current) == _loud(document) and not is_first_missed


def _loud(status: Mapping[str, Any]) -> Document:
    """Return what somebody may wait for."""
    fields = {field.name: status.get(field.name) for field in api_fields(PoolStatus) if field.name not in _QUIET_FIELDS}
    conditions = [c for c in status.get("conditions") or () if c["type"] != CONDITION_INJECTION_HEALTHY]
    return {**fields, "conditions": conditions}


def _misses_pods(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or ()
    return any(c["type"] == CONDITION_INJECTION_HEALTHY and c["status"] == "False" for c in conditions)
