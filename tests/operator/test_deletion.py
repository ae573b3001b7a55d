"""A delete waits for pods and for nodes that are there, never for a node that is not, and never for long."""

from datetime import timedelta

import pytest

from pykvcache_operator.resources import NodeView

FORCE = {"pykvcache.io/force-delete": "true"}
LABEL = {"pykvcache.io/pool.p": "ready"}


def test_reachable_nodes_are_waited_for_while_they_erase(world, conditions):
    decision = world.decide(world.pool(deleted_s=1), world.view("a", world.entry(state="Deleting"), labels=LABEL))
    assert not decision.remove_finalizer
    assert conditions(decision)["Deleting"] == ("True", "Erasing")
    assert conditions(decision)["Ready"] == ("False", "Deleting")
    assert decision.unlabel_nodes == ("a",)
    assert decision.again_seconds == 599
    assert [notice.reason for notice in decision.notices] == ["Erasing"]
    assert world.decide(world.after(decision, deleted_s=1), world.view("a", world.entry())).notices == ()


def test_the_pool_goes_when_no_reachable_node_has_it(world):
    decision = world.decide(world.pool(deleted_s=1), world.view("a"), world.view("b", world.entry(uid="newer")))
    assert decision.remove_finalizer
    assert decision.status is None
    assert decision.notices == ()


@pytest.mark.parametrize("state", [{"is_ready": False}, {"beat_s": -301}])
def test_a_node_that_is_lost_is_not_waited_for_but_named(world, state):
    decision = world.decide(world.pool(deleted_s=1), world.view("a", world.entry(mounts=2), **state), world.view("b"))
    assert decision.remove_finalizer
    (notice,) = decision.notices
    assert notice.reason == "ErasedLater"
    assert "agents of a did not say that it is erased" in notice.note


def test_a_node_that_was_deleted_is_not_waited_for(world):
    view = world.view("a", world.entry(mounts=1))
    assert world.decide(world.pool(deleted_s=1), NodeView("a", None, view.cache)).remove_finalizer


@pytest.mark.parametrize(("deleted_s", "gone"), [(599, False), (600, True)])
def test_agents_that_do_not_finish_are_waited_for_ten_minutes(world, deleted_s, gone):
    decision = world.decide(world.pool(deleted_s=deleted_s), world.view("a", world.entry()))
    assert decision.remove_finalizer is gone
    assert [notice.reason for notice in decision.notices] == (["ErasedLater"] if gone else ["Erasing"])


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_pods_that_mount_it_hold_it_however_long(world, conditions, policy):
    item = world.pool(deleted_s=10_000, deletionPolicy=policy)
    decision = world.decide(item, world.view("a", world.entry(mounts=1)))
    assert not decision.remove_finalizer
    assert conditions(decision)["Deleting"] == ("True", "InUse")
    message = decision.status.conditions[-1].message
    assert 'kubectl annotate kvcachepool p pykvcache.io/force-delete="true"' in message


def test_force_takes_it_away_from_pods(world, conditions):
    view = world.view("a", world.entry(mounts=1))
    decision = world.decide(world.pool(deleted_s=1, annotations=FORCE), view)
    assert conditions(decision)["Deleting"] == ("True", "Erasing")
    assert world.decide(world.pool(deleted_s=600, annotations=FORCE), view).remove_finalizer
    refused = world.pool(deleted_s=600, annotations={"pykvcache.io/force-delete": "yes"})
    assert not world.decide(refused, view).remove_finalizer


@pytest.mark.parametrize(("erasing_s", "gone"), [(599, False), (600, True)])
def test_agents_have_their_ten_minutes_from_when_the_last_pod_is_gone(world, conditions, erasing_s, gone):
    """Else a pool that pods held for longer would go before anything is erased."""
    held = world.decide(world.pool(deleted_s=10_000), world.view("a", world.entry(mounts=1)))
    begun = world.decide(world.after(held, deleted_s=10_000), world.view("a", world.entry()))
    assert conditions(begun)["Deleting"] == ("True", "Erasing")
    assert begun.again_seconds == 600
    later = world.after(begun, deleted_s=10_000)
    world.now += timedelta(seconds=erasing_s)
    assert world.decide(later, world.view("a", world.entry())).remove_finalizer is gone


def test_a_clock_that_was_wrong_prolongs_nothing(world):
    begun = world.decide(world.pool(deleted_s=-9000), world.view("a", world.entry()))
    assert begun.again_seconds == 600
    item = world.after(begun, deleted_s=700)
    world.now -= timedelta(seconds=50)
    assert world.decide(item, world.view("a", world.entry())).remove_finalizer


def test_what_is_retained_is_not_waited_for(world):
    decision = world.decide(world.pool(deleted_s=1, deletionPolicy="Retain"), world.view("a", world.entry()))
    assert decision.remove_finalizer
    assert decision.notices == ()


def test_a_pool_that_others_hold_is_left_alone(world):
    item = world.pool(deleted_s=1, finalizers=("other/x",))
    decision = world.decide(item, world.view("a", world.entry(), labels=LABEL))
    assert (decision.status, decision.remove_finalizer, decision.unlabel_nodes) == (None, False, ("a",))


def test_other_conditions_stay_as_they_were(world, conditions):
    ready = world.decide(world.pool(), world.view("a", world.entry()))
    decision = world.decide(world.after(ready, deleted_s=1), world.view("a", world.entry()))
    found = conditions(decision)
    assert list(found) == ["Ready", *list(conditions(ready))[1:], "Deleting"]
    assert found["IOUringAvailable"] == ("True", "Available")
    assert decision.status.capacity_bytes == ready.status.capacity_bytes


SHARED = {"type": "SharedFilesystem", "storageClassName": "fast", "capacity": "1Gi"}
ALLOWED = {"names": ["x", "y"]}


@pytest.mark.parametrize(("policy", "dropped"), [("Delete", ["x"]), ("Retain", [])])
def test_claims_made_for_it_go_unless_retained(world, policy, dropped):
    item = world.pool(deleted_s=1, storage=SHARED, allowedNamespaces=ALLOWED, deletionPolicy=policy)
    claims = (
        world.claim("x"),
        world.claim("y", pool_uid="another"),
        world.claim("z", is_terminating=True),
    )
    decision = world.decide(item, claims=claims)
    assert [claim.namespace for claim in decision.drop_claims] == dropped
    assert decision.remove_finalizer


@pytest.mark.parametrize(("deleted_s", "gone"), [(599, False), (600, True)])
def test_claims_that_cannot_be_read_are_waited_for_and_then_named(world, conditions, deleted_s, gone):
    """Else they would stay for ever, and nobody would know of them."""
    item = world.pool(deleted_s=deleted_s, storage=SHARED, allowedNamespaces=ALLOWED)
    decision = world.decide(item, claims_problem="list claims: 403")
    assert decision.remove_finalizer is gone
    if gone:
        (notice,) = decision.notices
        assert "kubectl delete pvc -A -l pykvcache.io/pool-uid=uid-of-p" in notice.note
    else:
        assert conditions(decision)["Deleting"] == ("True", "ClaimsUnreadable")
        assert decision.again_seconds == 1


@pytest.mark.parametrize(
    "spec",
    [
        {"storage": SHARED, "allowedNamespaces": ALLOWED, "deletionPolicy": "Retain"},
        {"storage": {"type": "SharedFilesystem", "claimName": "theirs"}},
    ],
)
def test_claims_that_stay_need_not_be_read(world, spec):
    decision = world.decide(world.pool(deleted_s=1, **spec), claims_problem="list claims: 403")
    assert decision.remove_finalizer
    assert decision.notices == ()
