"""Pools on shared filesystems: claims that exist, and claims that are made; and pools in scratch space."""

import pytest

GIB = 2**30
EXISTING = {"type": "SharedFilesystem", "claimName": "data"}
MADE = {"type": "SharedFilesystem", "storageClassName": "fast", "capacity": "1Gi"}


def existing(world, *claims, names=()):
    allowed = {"allowedNamespaces": {"names": list(names)}} if names else {}
    return world.decide(world.pool(storage=EXISTING, **allowed), claims=claims)


def test_one_bound_claim_makes_it_ready(world, conditions):
    claims = [world.claim("x", name="data", pool_uid=""), world.claim("y", name="data", pool_uid="", is_bound=False)]
    decision = existing(world, *claims)
    assert conditions(decision) == {"Ready": ("True", "ClaimBound"), "Degraded": ("True", "ClaimsIncomplete")}
    assert (decision.status.capacity_bytes, decision.make_claims) == (GIB, ())


def test_no_claim_and_no_bound_claim_are_told_apart(world, conditions):
    assert conditions(existing(world))["Ready"] == ("False", "ClaimNotFound")
    waiting = existing(world, world.claim("x", name="data", is_bound=False))
    assert conditions(waiting)["Ready"] == ("False", "ClaimPending")
    assert "x" in waiting.status.conditions[0].message


def test_only_allowed_namespaces_count_and_those_without_a_claim_are_named(world, conditions):
    decision = existing(world, world.claim("x", name="data"), world.claim("z", name="data"), names=["x", "y"])
    assert conditions(decision)["Degraded"] == ("True", "ClaimsIncomplete")
    assert decision.status.conditions[1].message == "y: no claim data"
    assert decision.status.capacity_bytes == GIB


def test_the_status_lists_claims_by_which_pods_may_get_the_pool_with_their_sizes(world):
    unbound = world.claim("x", name="data", is_bound=False, requested=2 * GIB)
    leaving = world.claim("z", name="data", is_terminating=True)
    decision = existing(world, world.claim("y", name="data"), leaving, unbound)
    listed = [(claim.namespace, claim.capacity_bytes) for claim in decision.status.claims]
    assert listed == [("x", 2 * GIB), ("y", GIB)]


def test_claims_that_cannot_be_read_say_which_value_allows_it(world, conditions):
    decision = world.decide(world.pool(storage=EXISTING), claims_problem="list: 403 forbidden")
    assert conditions(decision)["Ready"] == ("False", "ClaimsUnreadable")
    assert "operator.claims.enabled" in decision.status.conditions[0].message


def made(world, *claims, namespaces, allowed, storage=MADE):
    item = world.pool(storage=storage, allowedNamespaces=allowed)
    return world.decide(item, claims=claims, namespaces=tuple(namespaces))


def test_claims_are_made_where_namespaces_are_allowed_exist_and_stay(world):
    namespaces = [
        world.namespace("a", team="x"),
        world.namespace("b"),
        world.namespace("c", team="x", is_terminating=True),
        world.namespace("d", team="x"),
        world.namespace("e"),
    ]
    decision = made(
        world,
        world.claim("d"),
        namespaces=namespaces,
        allowed={"names": ["b", "missing"], "matchLabels": {"team": "x"}},
    )
    assert decision.make_claims == ("a", "b")
    assert decision.enlarge_claims == ()


def test_a_larger_capacity_enlarges_claims_and_a_foreign_claim_is_not_touched(world, conditions):
    namespaces = [world.namespace("a"), world.namespace("b")]
    foreign = world.claim("b", pool_uid="")
    decision = made(
        world,
        world.claim("a"),
        foreign,
        namespaces=namespaces,
        allowed={"names": ["a", "b"]},
        storage={**MADE, "capacity": "2Gi"},
    )
    assert [claim.namespace for claim in decision.enlarge_claims] == ["a"]
    assert decision.make_claims == ()
    assert conditions(decision)["Degraded"] == ("True", "ClaimsIncomplete")
    assert "b: pykvcache-p is not this pool's" in decision.status.conditions[1].message


@pytest.mark.parametrize(
    ("claims", "namespaces", "expected"),
    [
        ([], [], "NoNamespaces"),
        ([], ["a"], "ClaimPending"),
        ([{"is_bound": False}], ["a"], "ClaimPending"),
        ([{"pool_uid": "other"}], ["a"], "ClaimNotOurs"),
        ([{}], ["a"], "ClaimBound"),
    ],
)
def test_readiness_follows_the_claims_made(world, conditions, claims, namespaces, expected):
    found = [world.claim("a", **fields) for fields in claims]
    decision = made(world, *found, namespaces=map(world.namespace, namespaces), allowed={"names": ["a"]})
    assert conditions(decision)["Ready"][1] == expected


def test_scratch_space_is_always_ready(world, conditions):
    decision = world.decide(world.pool(storage={"type": "Ephemeral", "capacity": "5Gi"}))
    assert conditions(decision) == {"Ready": ("True", "Ready"), "Degraded": ("False", "NotDegraded")}
    assert "5.0 GiB" in decision.status.conditions[0].message


def test_a_claim_that_is_refused_says_why_until_it_is_made(world, conditions):
    item = world.pool(storage=MADE, allowedNamespaces={"names": ["x", "y"]})
    spaces = (world.namespace("x"), world.namespace("y"))
    refusal = "create pvc: 403 exceeded quota; 1 claims could not be written, trying again"
    decision = world.decide(item, namespaces=spaces, claims_refusal=refusal)
    assert conditions(decision)["Ready"] == ("False", "ClaimRefused")
    assert [(notice.reason, notice.note) for notice in decision.notices] == [("ClaimRefused", refusal)]
    item = world.after(decision, storage=MADE, allowedNamespaces={"names": ["x", "y"]})
    assert world.decide(item, namespaces=spaces, claims_refusal=refusal).notices == ()
    partly = world.decide(item, world.view("a"), claims=(world.claim("x"),), namespaces=spaces, claims_refusal=refusal)
    assert conditions(partly)["Ready"] == ("True", "ClaimBound")
    assert conditions(partly)["Degraded"] == ("True", "ClaimsIncomplete")
    assert "exceeded quota" in partly.status.conditions[1].message
