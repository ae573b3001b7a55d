"""What is decided for pools on nodes; every node's state, and what it does to the pool."""

from datetime import timedelta

import pytest

from pykvcache_operator.resources import NodeView, PodCounts, PodsView, Severity

GIB = 2**30
LABEL = {"pykvcache.io/pool.p": "ready"}


def test_a_ready_pool_sums_up_its_nodes(world, conditions):
    views = [world.view("a", world.entry()), world.view("b", world.entry(usedBytes=2 * GIB))]
    decision = world.decide(world.pool(), *views)
    status = decision.status
    assert (status.nodes_ready, status.nodes_desired, status.nodes) == (2, 2, "2/2")
    assert (status.capacity_bytes, status.used_bytes) == (20 * GIB, 3 * GIB)
    assert conditions(decision) == {
        "Ready": ("True", "Ready"),
        "NodesReady": ("True", "AllNodesReady"),
        "Degraded": ("False", "NotDegraded"),
        "CapacityOK": ("True", "CapacityOK"),
        "IOUringAvailable": ("True", "Available"),
        "Calibrated": ("False", "Measuring"),
    }
    assert decision.label_nodes == ("a", "b")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"is_ready": False}, "NodeNotReady"),
        ({"beat_s": None}, "NoNodeAgent"),
        ({"beat_s": -301}, "NodeAgentSilent"),
        ({"entry": None}, "NotPrepared"),
        ({"entry": {"uid": "of-an-older-p"}}, "NotPrepared"),
        ({"entry": {"state": "NotReady", "reason": "DiskFull", "message": "why"}}, "DiskFull"),
        ({"entry": {"state": "NotReady", "reason": "no word!"}}, "Error"),
        ({"entry": {"state": "Deleting", "reason": "NotPrepared"}}, "NotPrepared"),
    ],
)
def test_one_node_that_fails_degrades_the_pool_and_no_more(world, conditions, state, reason):
    fields = state.pop("entry", {})
    entries = [] if fields is None else [world.entry(**fields)]
    views = [world.view("a", world.entry(), labels=LABEL), world.view("b", *entries, labels=LABEL, **state)]
    decision = world.decide(world.pool(), *views)
    found = conditions(decision)
    assert found["Ready"] == ("True", "Ready")
    assert found["NodesReady"] == ("False", reason)
    assert found["Degraded"] == ("True", reason)
    (failing,) = decision.status.failing_nodes
    assert (failing.name, failing.reason) == ("b", reason)
    assert failing.message
    assert (decision.label_nodes, decision.unlabel_nodes) == ((), ("b",))


@pytest.mark.parametrize(
    ("needed", "ready", "expected"),
    [(0, 0, "True"), (0, 1, "True"), (1, 0, "False"), (1, 1, "True"), (2, 1, "False"), (2, 2, "True")],
)
def test_ready_needs_as_many_nodes_as_declared(world, conditions, needed, ready, expected):
    views = [world.view(f"n{i}", *([world.entry()] if i < ready else [])) for i in range(3)]
    decision = world.decide(world.pool(minReadyNodes=needed), *views)
    assert conditions(decision)["Ready"][0] == expected
    assert conditions(decision)["Degraded"][0] == expected  # broken altogether is not degraded


def test_a_pool_that_matches_no_node_says_what_to_change(world, conditions):
    decision = world.decide(world.pool(nodeSelector={"disk": "fast"}), world.view("a", world.entry()))
    assert conditions(decision)["Ready"] == ("False", "NoNodes")
    assert "nodeSelector" in decision.status.conditions[0].message
    assert decision.status.nodes_desired == 0


def test_nodes_that_are_only_preparing_are_no_failure_yet(world, conditions):
    decision = world.decide(world.pool(), world.view("a"))
    assert conditions(decision)["Ready"] == ("False", "Preparing")
    assert decision.notices == ()


def test_fewer_nodes_than_needed_that_all_work_need_another_declaration(world, conditions):
    decision = world.decide(world.pool(minReadyNodes=2), world.view("a", world.entry()))
    assert conditions(decision)["Ready"] == ("False", "NotEnoughNodes")
    assert "lower minReadyNodes" in decision.status.conditions[0].message


def test_a_disk_selector_leaves_out_nodes_without_such_a_disk(world):
    item = world.pool(diskSelector={"minSize": "2000Gi"})
    decision = world.decide(item, world.view("a"), world.view("b", disk_bytes=4000 * GIB), world.view("c", beat_s=None))
    assert decision.status.nodes_desired == 1


def test_a_node_that_was_deleted_no_longer_counts(world):
    alive, gone = world.view("a", world.entry()), world.view("b", world.entry())
    decision = world.decide(world.pool(), alive, NodeView("b", None, gone.cache))
    assert decision.status.nodes == "1/1"
    assert decision.unlabel_nodes == ()


def test_at_most_ten_failing_nodes_are_listed(world):
    decision = world.decide(world.pool(), *(world.view(f"n{i:02}") for i in range(14)))
    assert [node.name for node in decision.status.failing_nodes] == [f"n{i:02}" for i in range(10)]
    assert "11 more" in next(c.message for c in decision.status.conditions if c.type == "NodesReady")


def test_two_pools_may_not_be_promised_more_than_their_disk_has(world, conditions):
    mine, other = world.entry(capacityBytes=60 * GIB), world.entry(name="q", uid="uid-q", capacityBytes=30 * GIB)
    for free, expected in ((10 * GIB, "True"), (11 * GIB, "False")):
        view = world.view("a", mine, other, disk_bytes=100 * GIB)
        decision = world.decide(world.pool(), view, min_free_bytes={"p": GIB, "q": free})
        assert conditions(decision)["CapacityOK"][0] == expected
    assert conditions(decision)["Ready"][0] == "True"
    message = next(c.message for c in decision.status.conditions if c.type == "CapacityOK")
    assert "a: /mnt/a has 100.0 GiB, but 90.0 GiB are promised (p, q) and 11.0 GiB shall stay free" in message
    assert "capacityPerNode" in message


@pytest.mark.parametrize("other", [{"path": "/mnt/b/q"}, {"state": "Deleting"}, {"path": ""}])
def test_a_pool_elsewhere_or_on_its_way_out_takes_no_room(world, conditions, other):
    second = world.entry(**{"name": "q", "uid": "uid-q", "capacityBytes": 90 * GIB, **other})
    disks = [{"mountPath": path, "type": "NVMe", "sizeBytes": 100 * GIB} for path in ("/mnt/a", "/mnt/b", "/")]
    decision = world.decide(world.pool(), world.view("a", world.entry(capacityBytes=60 * GIB), second, disks=disks))
    assert conditions(decision)["CapacityOK"][0] == "True"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (["Available", "Available"], ("True", "Available")),
        (["Available", "BlockedBySysctl"], ("False", "BlockedBySysctl")),
        ([None, None], ("Unknown", "NotReported")),
        ([None, "Available"], ("True", "Available")),
    ],
)
def test_io_uring_is_told_from_the_ready_nodes(world, conditions, reports, expected):
    views = [world.view(f"n{i}", world.entry(), ioUring=report) for i, report in enumerate(reports)]
    assert conditions(world.decide(world.pool(), *views))["IOUringAvailable"] == expected


def profile(world, **fields):
    measured = {"state": "Measured", "measuredAt": world.text(-60), "readBytesPerSecond": 3 * GIB}
    return [{"pool": "p", "poolUID": "uid-of-p", **measured, **fields}]


def test_calibration_is_reported_and_never_decides_readiness(world, conditions):
    measured = world.view("a", world.entry(), profiles=profile(world))
    slower = world.view("b", world.entry(), profiles=profile(world, readBytesPerSecond=GIB))
    decision = world.decide(world.pool(), measured, slower)
    assert conditions(decision)["Calibrated"] == ("True", "Calibrated")
    assert (decision.status.nodes_calibrated, decision.status.read) == (2, "1.0 GiB/s")
    assert decision.status.read_bytes_per_second.highest == 3 * GIB
    failed = profile(world, state="Failed", measuredAt=None, reason="DeadlineExceeded", message="took too long")
    decision = world.decide(world.pool(), measured, world.view("b", world.entry(), profiles=failed))
    assert conditions(decision)["Calibrated"] == ("False", "DeadlineExceeded")
    assert conditions(decision)["Ready"][0] == "True"
    assert conditions(decision)["Degraded"][0] == "False"


def test_profiles_of_an_older_pool_of_that_name_do_not_count(world):
    old = world.view("a", world.entry(), profiles=profile(world, poolUID="older"))
    assert world.decide(world.pool(), old).status.nodes_calibrated == 0


def test_without_calibration_there_is_no_such_condition(world, conditions):
    decision = world.decide(world.pool(calibration={"enabled": False}), world.view("a", world.entry()))
    assert "Calibrated" not in conditions(decision)


@pytest.mark.parametrize(
    ("path", "expected"), [("/mnt/nvme/a", "True"), ("/mnt", "True"), ("/mntx", "False"), ("/etc", "False")]
)
def test_a_host_path_must_be_under_an_allowed_prefix(world, conditions, path, expected):
    storage = {"type": "NodeLocal", "capacityPerNode": "10Gi", "volume": "HostPath", "path": path}
    decision = world.decide(world.pool(storage=storage), world.view("a", world.entry()), allowed_host_paths=("/mnt",))
    assert conditions(decision)["Ready"][0] == expected
    if expected == "False":
        assert conditions(decision)["Ready"][1] == "PathNotAllowed"


def test_the_pool_is_looked_at_again_when_an_agent_may_have_fallen_silent(world):
    views = [world.view("a", world.entry(), beat_s=-100), world.view("b", world.entry(), beat_s=-10)]
    decision = world.decide(world.pool(), *views)
    assert decision.again_seconds == 201
    world.now += timedelta(seconds=decision.again_seconds)
    assert world.decide(world.pool(), *views).status.nodes_ready == 1


def test_a_new_pool_gets_the_finalizer_and_an_old_one_keeps_it(world):
    assert world.decide(world.pool(finalizers=()), world.view("a")).add_finalizer
    assert not world.decide(world.pool(finalizers=("other/x", "pykvcache.io/cleanup")), world.view("a")).add_finalizer


def test_the_same_state_gives_the_same_status_later(world):
    views = [world.view("a", world.entry(), beat_s=0), world.view("b", beat_s=0)]
    first = world.decide(world.pool(), *views)
    world.now += timedelta(seconds=60)
    again = world.decide(world.after(first), *views)
    assert again.status == first.status
    assert again.notices == ()


def test_conditions_say_which_spec_they_are_about_and_keep_their_time(world):
    views = [world.view("a", world.entry(), beat_s=0)]
    first = world.decide(world.pool(), *views)
    world.now += timedelta(seconds=60)
    again = world.decide(world.after(first, generation=2), *views)
    assert again.status.observed_generation == 2
    assert {condition.observed_generation for condition in again.status.conditions} == {2}
    times = [condition.last_transition_time for condition in first.status.conditions]
    assert [condition.last_transition_time for condition in again.status.conditions] == times


def test_events_tell_transitions_for_the_worse_and_for_the_better(world):
    ready = world.decide(world.pool(), world.view("a", world.entry()))
    assert [(n.severity, n.reason) for n in ready.notices] == [(Severity.NORMAL, "Ready")]
    lost = world.decide(world.after(ready), world.view("a", world.entry(), is_ready=False))
    assert [(n.severity, n.reason) for n in lost.notices] == [(Severity.WARNING, "NotEnoughNodes")]
    assert "NodeNotReady" in lost.notices[0].note
    again = world.decide(world.after(lost), world.view("a", world.entry()))
    assert [(n.severity, n.reason) for n in again.notices] == [(Severity.NORMAL, "Ready")]


def test_another_reason_for_the_same_bad_state_is_news(world):
    good = world.view("a", world.entry())
    first = world.decide(world.pool(), good, world.view("b", is_ready=False))
    other = world.decide(world.after(first), good, world.view("b", beat_s=None))
    assert [notice.reason for notice in other.notices] == ["NoNodeAgent"]


@pytest.mark.parametrize("beat_s", [301, 10**9, 251632439999])
def test_a_node_agent_with_a_clock_in_the_future_is_as_good_as_silent(world, conditions, beat_s):
    """Nobody would notice its end; and a time at the end of all calendars would end the decision itself."""
    decision = world.decide(world.pool(), world.view("a", world.entry(), beat_s=beat_s))
    assert decision.status.failing_nodes[0].reason == "NodeAgentSilent"
    assert "the node's clock" in decision.status.failing_nodes[0].message
    assert decision.again_seconds is None


def test_what_nodes_claim_to_have_can_always_be_written(world):
    huge = world.entry(capacityBytes=2**63 - 1, usedBytes=2**63 - 1)
    status = world.decide(world.pool(), world.view("a", huge), world.view("b", huge)).status
    assert (status.capacity_bytes, status.used_bytes) == (2**63 - 1, 2**63 - 1)


# ---- pods that are labelled for it ----


def view_of_pods(problem="", **counts):
    return PodsView(PodCounts(**counts), problem)


NODE_LOCAL = {"type": "NodeLocal", "capacityPerNode": "10Gi"}
SHARED = {"type": "SharedFilesystem", "claimName": "c"}
EPHEMERAL = {"type": "Ephemeral", "capacity": "1Gi"}


@pytest.mark.parametrize("storage", [NODE_LOCAL, SHARED, EPHEMERAL], ids=lambda storage: storage["type"])
def test_pods_are_counted_whatever_the_storage(world, conditions, storage):
    pods = view_of_pods(injected=3, skipped=2, missed=1, missed_pods=("team/x",))
    decision = world.decide(world.pool(storage=storage), pods=pods)
    status = decision.status
    assert (status.injected_pods, status.skipped_pods, status.missed_pods, status.pods) == (3, 2, 1, "3/6")
    assert conditions(decision)["InjectionHealthy"] == ("False", "MissedPods")


def test_an_operator_that_does_not_follow_pods_says_nothing_of_them(world, conditions):
    before = world.after(world.decide(world.pool(), pods=view_of_pods(injected=3)))
    decision = world.decide(before)
    assert "InjectionHealthy" not in conditions(decision)
    assert (decision.status.injected_pods, decision.status.pods) == (0, "")


def test_while_pods_are_read_for_the_first_time_what_was_known_stays(world):
    first = world.decide(world.pool(), pods=view_of_pods(injected=3, missed=1, missed_pods=("team/x",)))
    second = world.decide(world.after(first), pods=view_of_pods(problem=None))
    assert second.status == first.status
    assert second.notices == ()


def test_pods_that_may_not_be_read_leave_the_condition_open(world, conditions):
    decision = world.decide(world.pool(), pods=view_of_pods(problem="list pods: 403"))
    assert conditions(decision)["InjectionHealthy"] == ("Unknown", "PodsUnreadable")
    assert "PodsUnreadable" not in [notice.reason for notice in decision.notices]


def test_missed_pods_are_an_event_on_the_pool_and_so_is_their_end(world):
    healthy = world.after(world.decide(world.pool(), pods=view_of_pods(injected=1)))
    missed = world.decide(healthy, pods=view_of_pods(injected=1, missed=1, missed_pods=("team/x",)))
    assert [(n.severity, n.reason) for n in missed.notices] == [(Severity.WARNING, "MissedPods")]
    more = world.decide(world.after(missed), pods=view_of_pods(missed=2, missed_pods=("team/x", "team/y")))
    assert more.notices == ()
    well = world.decide(world.after(more), pods=view_of_pods(injected=3))
    assert [(n.severity, n.reason) for n in well.notices] == [(Severity.NORMAL, "InjectionHealthy")]


def test_the_first_look_at_pods_that_are_well_is_no_event(world):
    before = world.after(world.decide(world.pool()))
    assert world.decide(before, pods=view_of_pods(injected=5)).notices == ()
