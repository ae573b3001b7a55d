"""From what is seen of a pool to what is to be done: the whole policy of the operator, without any I/O.

Pure: the same observation and time give the same decision, so it may be repeated at will. A delete never waits for a
node that is not reachable, and for no node longer than `ERASE_SECONDS`, not counted while pods mount the pool; only
those on reachable nodes hold it, until the annotation `pykvcache.io/force-delete: "true"`.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from pykvcache_contract.api.pool import DeletionPolicy, KVCachePool, PoolStatus, StorageType
from pykvcache_contract.api.selection import node_label
from pykvcache_contract.names import (
    CONDITION_DEGRADED,
    CONDITION_DELETING,
    CONDITION_INJECTION_HEALTHY,
    CONDITION_READY,
    FINALIZER,
    FORCE_DELETE_ANNOTATION,
)
from pykvcache_contract.units import format_size
from pykvcache_operator import node_local, pods, shared
from pykvcache_operator.conditions import Finding, kept, merged, notices
from pykvcache_operator.resources import POOL_UID_LABEL, Decision, NodeView, Notice, Observation, Severity

ERASE_SECONDS = 600
"""How long a deletion waits for node agents that are there and do not finish, or for claims that cannot be read."""
NAMES_MAX = 5
REASON_IN_USE = "InUse"


def decide(seen: Observation, now: datetime) -> Decision:
    """Return what is to be done for a pool that exists."""
    if seen.pool.metadata.deletion_timestamp is not None:
        return _delete(seen, now)
    kind = seen.pool.spec.storage.type
    if kind is StorageType.NODE_LOCAL:
        nodes = node_local.look(seen, now)
        decision = _report(seen, nodes.status, nodes.findings, now)
        return replace(
            decision,
            label_nodes=nodes.label_nodes,
            unlabel_nodes=nodes.unlabel_nodes,
            again_seconds=nodes.again_seconds,
        )
    if kind is StorageType.SHARED_FILESYSTEM:
        claims = shared.look(seen)
        decision = _report(seen, claims.status, claims.findings, now)
        return replace(decision, make_claims=claims.make_claims, enlarge_claims=claims.enlarge_claims)
    return _report(seen, *_ephemeral(seen.pool), now)


def _ephemeral(pool: KVCachePool) -> tuple[PoolStatus, tuple[Finding, ...]]:
    size = format_size(pool.spec.storage.capacity_bytes or 0)
    ready = Finding(CONDITION_READY, True, "Ready", f"each pod gets its own scratch space of at most {size}")
    return PoolStatus(), (ready, Finding(CONDITION_DEGRADED, False, "NotDegraded", "nothing to fail"))


def _report(seen: Observation, status: PoolStatus, findings: Sequence[Finding], now: datetime) -> Decision:
    """Return the decision that brings a status up to date, and keeps the pool until it is cleaned up."""
    pool = seen.pool
    generation, known = pool.metadata.generation, pool.status.conditions
    conditions = merged(known, (*findings, *_injection(seen)), generation=generation, now=now)
    return Decision(
        add_finalizer=FINALIZER not in pool.metadata.finalizers,
        status=replace(_with_pods(seen, status), observed_generation=generation, conditions=conditions),
        notices=notices(known, conditions),
    )


def _injection(seen: Observation) -> tuple[Finding, ...]:
    """Say whether the webhook saw every pod; while pods are read for the first time, what was known before."""
    if seen.pods is None:
        return ()
    if seen.pods.problem is None:
        return kept(seen.pool.status.conditions, CONDITION_INJECTION_HEALTHY)
    return (pods.finding(seen.pool.name, seen.pods.counts, problem=seen.pods.problem),)


def _with_pods(seen: Observation, status: PoolStatus) -> PoolStatus:
    """Return a status with the numbers of pods, from before as long as nothing newer is known."""
    if seen.pods is None:
        return status
    if seen.pods.problem is None:
        known = seen.pool.status
        numbers = (known.injected_pods, known.skipped_pods, known.missed_pods)
    else:
        counts = seen.pods.counts
        numbers = (counts.injected, counts.skipped, counts.missed)
    return replace(status, injected_pods=numbers[0], skipped_pods=numbers[1], missed_pods=numbers[2])


def _delete(seen: Observation, now: datetime) -> Decision:
    pool = seen.pool
    label = node_label(pool.name)
    unlabel = tuple(view.name for view in seen.nodes if view.node is not None and label in view.node.labels)
    if FINALIZER not in pool.metadata.finalizers:
        return Decision(unlabel_nodes=unlabel)  # others hold it; our part is done
    holders = [view for view in seen.nodes if _holds(view, pool)]
    reachable = [view for view in holders if _is_reachable(view, now)]
    in_use = [view for view in reachable if _mounts(view, pool)]
    if in_use and pool.metadata.annotations.get(FORCE_DELETE_ANNOTATION) != "true":
        return _stay(seen, _in_use(in_use, pool), now, unlabel=unlabel)
    retain = pool.spec.deletion_policy is DeletionPolicy.RETAIN
    left_seconds = _left_seconds(pool, now)
    if reachable and left_seconds > 0 and not retain:
        return replace(_stay(seen, _erasing(reachable), now, unlabel=unlabel), again_seconds=left_seconds)
    are_claims_hidden = bool(seen.claims_problem and pool.spec.storage.storage_class_name) and not retain
    if are_claims_hidden and left_seconds > 0:
        return replace(_stay(seen, _hidden(seen), now, unlabel=unlabel), again_seconds=left_seconds)
    made = () if retain else tuple(c for c in seen.claims if c.pool_uid == pool.metadata.uid and not c.is_terminating)
    left_behind = _left_behind(holders) + (_left_claims(seen) if are_claims_hidden else ())
    return Decision(
        unlabel_nodes=unlabel,
        drop_claims=made,
        remove_finalizer=True,
        notices=() if retain else left_behind,
    )


def _stay(seen: Observation, deleting: Finding, now: datetime, *, unlabel: tuple[str, ...]) -> Decision:
    """Return the decision that keeps a pool whose deletion waits; what was known of it stays in its status."""
    pool = seen.pool
    ready = Finding(CONDITION_READY, False, "Deleting", "the pool is being deleted")
    # Another reason begins anew: the time says since when agents are waited for, see `_left_seconds`.
    known = [c for c in pool.status.conditions if c.type != CONDITION_DELETING or c.reason == deleting.reason]
    changed = merged(known, (ready, deleting), generation=pool.metadata.generation, now=now)
    others = [c for c in pool.status.conditions if c.type not in (CONDITION_READY, CONDITION_DELETING)]
    conditions = (changed[0], *others, changed[1])
    told = [condition for condition in conditions if condition.type == CONDITION_DELETING]
    return Decision(
        unlabel_nodes=unlabel,
        status=replace(pool.status, observed_generation=pool.metadata.generation, conditions=conditions),
        notices=notices(pool.status.conditions, told),
        again_seconds=float(ERASE_SECONDS),
    )


def _holds(view: NodeView, pool: KVCachePool) -> bool:
    """Say whether a node still has something of the pool, as far as its agent said."""
    return view.cache is not None and any(entry.uid == pool.metadata.uid for entry in view.cache.agent.pools)


def _is_reachable(view: NodeView, now: datetime) -> bool:
    """Say whether a node can be expected to do its part now."""
    is_there = view.node is not None and view.node.is_ready and view.cache is not None
    return is_there and view.cache is not None and not node_local.is_silent(view.cache, now)


def _mounts(view: NodeView, pool: KVCachePool) -> bool:
    entries = view.cache.agent.pools if view.cache else ()
    return any(entry.mounts > 0 for entry in entries if entry.uid == pool.metadata.uid)


def _left_seconds(pool: KVCachePool, now: datetime) -> float:
    """Return how long node agents have left, from when the deletion was asked for or the last pod went."""
    deleting = next((c for c in pool.status.conditions if c.type == CONDITION_DELETING), None)
    if deleting is not None and deleting.reason == REASON_IN_USE:
        return ERASE_SECONDS
    times = (pool.metadata.deletion_timestamp, deleting and deleting.last_transition_time)
    began = max((time for time in times if time and time <= now), default=now)  # clocks differ, and are put right
    return (began + timedelta(seconds=ERASE_SECONDS) - now).total_seconds()


def _in_use(views: Sequence[NodeView], pool: KVCachePool) -> Finding:
    return Finding(
        CONDITION_DELETING,
        True,
        REASON_IN_USE,
        f"pods mount it on {_names(views)}. Delete those pods, or take the blocks away from them: kubectl annotate "
        f'kvcachepool {pool.name} {FORCE_DELETE_ANNOTATION}="true"',
    )


def _erasing(views: Sequence[NodeView]) -> Finding:
    return Finding(CONDITION_DELETING, True, "Erasing", f"node agents erase it on {_names(views)}")


def _hidden(seen: Observation) -> Finding:
    return Finding(
        CONDITION_DELETING,
        True,
        "ClaimsUnreadable",
        f"its claims cannot be found, to delete them: {seen.claims_problem}. Let the operator handle claims: value "
        "operator.claims.enabled of the chart",
    )


def _left_claims(seen: Observation) -> tuple[Notice, ...]:
    """Say how to delete the claims that could not be read."""
    note = f"deleted; delete the claims made for it: kubectl delete pvc -A -l {POOL_UID_LABEL}={seen.pool.metadata.uid}"
    return (Notice(Severity.WARNING, "ClaimsLeft", note),)


def _left_behind(holders: Sequence[NodeView]) -> tuple[Notice, ...]:
    """Name the nodes that still had the pool when it went."""
    if not holders:
        return ()
    note = f"deleted; agents of {_names(holders)} did not say that it is erased; they will when they are there again"
    return (Notice(Severity.WARNING, "ErasedLater", note),)


def _names(views: Sequence[NodeView]) -> str:
    names = sorted(view.name for view in views)
    rest = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {rest} more" if rest > 0 else "")
