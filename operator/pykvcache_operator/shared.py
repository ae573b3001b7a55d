"""SharedFilesystem pools: claims in namespaces, found or made. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pykvcache_contract.api.pool import CLAIMS_MAX, ClaimSize, KVCachePool, PoolStatus
from pykvcache_contract.api.selection import admits
from pykvcache_contract.names import CLAIM_PREFIX, CONDITION_DEGRADED, CONDITION_READY
from pykvcache_operator.conditions import Finding
from pykvcache_operator.resources import Claim, Observation

NAMES_MAX = 5
"""Namespaces that a message names."""


@dataclass(frozen=True, slots=True)
class Finds:
    """All that follows from the claims."""

    status: PoolStatus
    findings: tuple[Finding, ...]
    make_claims: tuple[str, ...] = ()
    enlarge_claims: tuple[Claim, ...] = ()


def claim_name(pool: KVCachePool) -> str:
    """Return the name of the pool's claim in each namespace."""
    return pool.spec.storage.claim_name or CLAIM_PREFIX + pool.name


def needs_namespaces(pool: KVCachePool) -> bool:
    """Say whether namespaces must be known: to make claims in them, or because labels decide."""
    allowed = pool.spec.allowed_namespaces
    return bool(pool.spec.storage.storage_class_name) or bool(allowed and allowed.match_labels)


def look(seen: Observation) -> Finds:
    """Sum up what the claims say."""
    if seen.claims_problem:
        refusal = Finding(
            CONDITION_READY,
            False,
            "ClaimsUnreadable",
            f"{seen.claims_problem}. Let the operator handle claims: value operator.claims.enabled of the chart",
        )
        return Finds(PoolStatus(), (refusal, _degraded([], is_ready=False)))
    labels = {namespace.name: namespace.labels for namespace in seen.namespaces}
    mine = [claim for claim in seen.claims if claim.name == claim_name(seen.pool)]
    claims = [claim for claim in mine if admits(seen.pool, claim.namespace, labels.get(claim.namespace, {}))]
    if seen.pool.spec.storage.storage_class_name:
        return _look_at_made(seen, claims)
    return _look_at_existing(seen.pool, claims)


def _look_at_existing(pool: KVCachePool, claims: Sequence[Claim]) -> Finds:
    """The administrator makes the claims; a namespace without one simply does not use the pool, unless it is named."""
    named = pool.spec.allowed_namespaces.names if pool.spec.allowed_namespaces else ()
    missing = sorted(set(named) - {claim.namespace for claim in claims})
    problems = [f"{namespace}: no claim {claim_name(pool)}" for namespace in missing]
    problems += [f"{claim.namespace}: {claim.name} is not Bound" for claim in claims if not claim.is_bound]
    if not claims:
        where = f"in {_some(missing)}" if missing else "in any allowed namespace"
        ready = Finding(
            CONDITION_READY,
            False,
            "ClaimNotFound",
            f"no claim {claim_name(pool)} {where}. Make a ReadWriteMany claim there",
        )
    else:
        ready = _ready(claims, refusal="")
    return Finds(_status(claims), (ready, _degraded(problems, is_ready=bool(ready.holds))))


def _look_at_made(seen: Observation, claims: Sequence[Claim]) -> Finds:
    pool, wanted_bytes = seen.pool, seen.pool.spec.storage.capacity_bytes or 0
    targets = sorted(
        namespace.name
        for namespace in seen.namespaces
        if not namespace.is_terminating and admits(pool, namespace.name, namespace.labels)
    )
    present = {claim.namespace: claim for claim in claims}
    foreign = [claim for claim in claims if claim.pool_uid != pool.metadata.uid]
    ours = [claim for claim in claims if claim.pool_uid == pool.metadata.uid]
    to_make = tuple(namespace for namespace in targets if namespace not in present)
    to_enlarge = tuple(c for c in ours if c.requested_bytes < wanted_bytes and not c.is_terminating)
    problems = [f"{c.namespace}: {c.name} is not this pool's; delete it, or name the pool differently" for c in foreign]
    problems += [f"{claim.namespace}: {claim.name} is not Bound" for claim in ours if not claim.is_bound]
    problems += [seen.claims_refusal] if seen.claims_refusal else []
    if not targets:
        ready = Finding(
            CONDITION_READY,
            False,
            "NoNamespaces",
            "allowedNamespaces admits no namespace that exists; make or label one",
        )
    elif foreign and not ours:
        ready = Finding(CONDITION_READY, False, "ClaimNotOurs", _some(problems))
    else:
        ready = _ready(ours, refusal=seen.claims_refusal)
    return Finds(_status(ours), (ready, _degraded(problems, is_ready=bool(ready.holds))), to_make, to_enlarge)


def _ready(claims: Sequence[Claim], *, refusal: str) -> Finding:
    bound = [claim.namespace for claim in claims if claim.is_bound]
    if bound:
        return Finding(CONDITION_READY, True, "ClaimBound", f"claims are Bound in {_some(sorted(bound))}")
    if refusal:
        return Finding(CONDITION_READY, False, "ClaimRefused", refusal)
    waiting = sorted(claim.namespace for claim in claims)
    return Finding(
        CONDITION_READY,
        False,
        "ClaimPending",
        f"no claim is Bound yet ({_some(waiting) or 'being made'}): `kubectl describe pvc` tells why; some storage "
        "classes wait for the first pod",
    )


def _degraded(problems: Sequence[str], *, is_ready: bool) -> Finding:
    if is_ready and problems:
        return Finding(CONDITION_DEGRADED, True, "ClaimsIncomplete", _some(sorted(problems)))
    return Finding(CONDITION_DEGRADED, False, "NotDegraded", "no claim is in question" if is_ready else "see Ready")


def _status(claims: Sequence[Claim]) -> PoolStatus:
    usable = sorted((claim for claim in claims if not claim.is_terminating), key=lambda claim: claim.namespace)
    return PoolStatus(
        capacity_bytes=sum(claim.capacity_bytes for claim in claims if claim.is_bound),
        claims=tuple(_size_of(claim) for claim in usable[:CLAIMS_MAX]),
    )


def _size_of(claim: Claim) -> ClaimSize:
    size_bytes = claim.capacity_bytes if claim.is_bound else claim.requested_bytes
    return ClaimSize(namespace=claim.namespace, capacity_bytes=size_bytes)


def _some(texts: Sequence[str]) -> str:
    rest = len(texts) - NAMES_MAX
    return ", ".join(texts[:NAMES_MAX]) + (f" and {rest} more" if rest > 0 else "")
