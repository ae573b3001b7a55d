"""The policy of calibration, state by state."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from pykvcache_contract.api.node import (
    AgentStatus,
    Disk,
    KVCacheNode,
    NodePool,
    NodePoolState,
    OperatorStatus,
    Profile,
    ProfilePoint,
    ProfileState,
)
from pykvcache_contract.api.objects import Metadata
from pykvcache_contract.api.pool import Calibration, KVCachePool, PoolSpec, Storage, StorageType
from pykvcache_contract.calibration import CalibrationRefusal, StorageCalibration, encode_calibration
from pykvcache_contract.names import RECALIBRATE_ANNOTATION
from pykvcache_operator.calibration import (
    HUNG,
    RESULT_WAIT,
    CalibrationPlan,
    DeleteJob,
    ForgetProfile,
    RecordProfile,
    backoff,
    plan,
    profile_key,
)
from pykvcache_operator.calibration_job import (
    ATTEMPT_MAX,
    CalibrationJob,
    JobSettings,
    JobState,
    StartJob,
    build_job,
    read_job,
)

NOW = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)
UID = "uid-of-nvme"
DAY = timedelta(days=1)
POINT = ProfilePoint(
    block_bytes=4 << 20, depth=16, readers=1, read_bytes_per_second=3_000_000_000, latency_microseconds=900
)


def make_pool(*, uid: str = UID, annotations: dict[str, str] | None = None, **calibration: object) -> KVCachePool:
    storage = Storage(type=StorageType.NODE_LOCAL, capacity_per_node_bytes=800 << 30)
    metadata = Metadata(name="nvme", uid=uid, annotations=annotations or {})
    return KVCachePool(metadata=metadata, spec=PoolSpec(storage=storage, calibration=Calibration(**calibration)))


def make_node(
    name: str = "n1",
    *,
    profile: Profile | None = None,
    annotations: dict[str, str] | None = None,
    kernel: str = "6.8.0",
    **entry: object,
) -> KVCacheNode:
    fields = {"uid": UID, "state": NodePoolState.READY, "path": "/mnt/nvme0/pykvcache/nvme", "disk_model": "ACME 9000"}
    pool = NodePool(name="nvme", **(fields | {"filesystem": "xfs", "engine": "uring", "direct_io": True} | entry))
    disks = (Disk(mount_path="/", size_bytes=50), Disk(mount_path="/mnt/nvme0", size_bytes=1000))
    return KVCacheNode(
        metadata=Metadata(name=name, annotations=annotations or {}),
        agent=AgentStatus(kernel=kernel, disks=disks, pools=(pool,)),
        operator=OperatorStatus(profiles=(profile,) if profile else ()),
    )


def key_of(node: KVCacheNode) -> str:
    return profile_key(node, node.agent.pools[0])


KEY = key_of(make_node())


def measured(*, age: timedelta = DAY, read: int = 3_000_000_000, **fields: object) -> Profile:
    profile = Profile(
        pool="nvme",
        pool_uid=UID,
        state=ProfileState.MEASURED,
        key=KEY,
        measured_at=NOW - age,
        read_bytes_per_second=read,
        write_bytes_per_second=1_000_000_000,
        engine="uring",
        points=(POINT,),
    )
    return replace(profile, **fields)


def failed(failures: int, *, ago: timedelta, **fields: object) -> Profile:
    facts = {"measured_at": None, "failures": failures, "reason": "Crashed", "message": "no"}
    return measured(
        state=ProfileState.FAILED, read=0, **(facts | {"next_attempt": NOW - ago + backoff(failures)} | fields)
    )


def said(*, read: int = 3_000_000_000, contended: bool | None = False) -> str:
    point = replace(POINT, read_bytes_per_second=read)
    texts = {"engine": "uring", "filesystem": "xfs", "kernel": "6.8.0", "disk_model": "ACME 9000"}
    figures = {"points": (point,), "read_bytes_per_second": read, "write_bytes_per_second": 1_000_000_000}
    run = {"buffered": False, "complete": True, "seconds": 15.0, "bytes": 1 << 32}
    return encode_calibration(StorageCalibration(**texts, **figures, **run, contended=contended))


def make_job(node: str = "n1", **fields: object) -> CalibrationJob:
    defaults = {"name": f"job-{node}", "pool_uid": UID, "node": node, "key": KEY, "attempt": 1, "short": False}
    return CalibrationJob(**(defaults | {"created": NOW - timedelta(seconds=30)} | fields))


def ended(node: str = "n1", *, message: str | None = None, exit_code: int = 0, **fields: object) -> CalibrationJob:
    state = JobState.SUCCEEDED if exit_code == 0 else JobState.FAILED
    end = {"state": state, "finished": NOW - timedelta(seconds=5), "exit_code": exit_code}
    return make_job(node, **(end | {"message": said() if message is None else message} | fields))


def decide(
    *nodes: KVCacheNode,
    pool: KVCachePool | None = None,
    jobs: tuple[CalibrationJob, ...] = (),
    now: datetime = NOW,
    **options: object,
) -> CalibrationPlan:
    arguments = {"nodes": nodes, "reachable": [node.name for node in nodes], "jobs": jobs, "now": now} | options
    made = plan(pool or make_pool(), **arguments)
    assert made == plan(pool or make_pool(), **arguments), "the same inputs give the same actions"
    return made


def started(made: CalibrationPlan) -> list[str]:
    return [action.node for action in made.actions if isinstance(action, StartJob)]


def recorded(made: CalibrationPlan) -> Profile:
    (profile,) = (action.profile for action in made.actions if isinstance(action, RecordProfile))
    return profile


# ---- who is measured, and when ----


def test_a_ready_node_without_a_profile_is_measured():
    made = decide(make_node())
    assert made.actions == (StartJob(node="n1", key=KEY, attempt=1, short=False),)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (make_node(state=NodePoolState.NOT_READY), "not ready"),
        (make_node(state=NodePoolState.DELETING), "deleting"),
        (make_node(uid="another"), "another pool of that name"),
        (make_node(profile=measured()), "measured a day ago"),
        (make_node(profile=failed(3, ago=timedelta(seconds=239))), "its back-off lasts 240 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_starts(node, why):
    assert started(decide(node)) == [], why


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (make_node(profile=measured(age=34 * DAY)), "older than maxAge and its jitter"),
        (make_node(profile=failed(3, ago=timedelta(seconds=240))), "its back-off is over"),
        (make_node(profile=measured(state=ProfileState.RUNNING, measured_at=None)), "its Job was lost"),
        (make_node(profile=measured(key="other")), "another disk"),
        (make_node(profile=measured(pool_uid="former")), "another pool"),
        (make_node(profile=measured(), kernel="6.9.0"), "another kernel"),
        (make_node(profile=measured(), generation=2), "a blank disk was prepared anew"),
        (make_node(profile=measured(), engine="threads"), "another engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_starts(node, why):
    assert started(decide(node)) == ["n1"], why


def test_a_profile_of_another_disk_is_forgotten_with_its_failures():
    made = decide(make_node(profile=failed(9, ago=timedelta(0), key="other")))
    assert made.actions[0] == ForgetProfile("n1")
    assert made.actions[1].attempt == 1


def test_a_profile_is_kept_while_the_pool_is_not_ready_there():
    assert decide(make_node(profile=measured(key="other"), state=NodePoolState.NOT_READY)).actions == ()


def test_a_node_that_is_not_reachable_waits():
    assert started(decide(make_node("n1"), make_node("n2"), reachable=["n2"])) == ["n2"]


def test_age_is_spread_by_a_tenth_and_the_same_every_time():
    names = [f"n{index}" for index in range(50)]
    ends = [decide(make_node(name, profile=measured(age=timedelta(0)))).look_again - NOW for name in names]
    assert all(27 * DAY <= end <= 33 * DAY for end in ends)
    assert max(ends) - min(ends) > 4 * DAY
    due = NOW + ends[0]
    assert started(decide(make_node("n0", profile=measured(age=timedelta(0))), now=due)) == ["n0"]
    early = due - timedelta(seconds=1)
    assert started(decide(make_node("n0", profile=measured(age=timedelta(0))), now=early)) == []


def test_a_max_age_of_centuries_never_comes():
    assert decide(make_node(profile=measured()), pool=make_pool(max_age_seconds=2**53)) == CalibrationPlan((), None)


@pytest.mark.parametrize("on_pool", [True, False])
def test_the_annotation_repeats_a_measurement_that_is_older(on_pool):
    def starts(asked: str, profile: Profile) -> bool:
        annotations = {RECALIBRATE_ANNOTATION: asked}
        node = make_node(profile=profile, annotations=None if on_pool else annotations)
        return started(decide(node, pool=make_pool(annotations=annotations if on_pool else None))) == ["n1"]

    assert starts("2026-12-01T11:00:00Z", measured())
    assert starts("2026-12-01T12:00:00+01:00", measured())
    assert not starts("2026-11-30T11:59:59Z", measured())
    assert not starts("2026-12-01T12:00:01Z", measured()), "not before its time"
    pool = make_pool(annotations={RECALIBRATE_ANNOTATION: "2026-12-01T12:30:00Z"})
    assert decide(make_node(profile=measured()), pool=pool).look_again == NOW + timedelta(minutes=30)
    # It does not undo the back-off of attempts that were made after it.
    assert not starts("2026-12-01T11:59:00Z", failed(5, ago=timedelta(seconds=10)))
    assert starts("2026-12-01T11:59:59Z", failed(5, ago=timedelta(seconds=10)))


@pytest.mark.parametrize(
    "text", ["", "now", "yes", "2026-13-01T00:00:00Z", "9" * 300, "0001-01-01T00:00:00+23:59", "∞"]
)
def test_an_annotation_that_is_no_time_asks_for_nothing(text):
    annotations = {RECALIBRATE_ANNOTATION: text}
    node = make_node(profile=measured(), annotations=annotations)
    assert decide(node, pool=make_pool(annotations=annotations)).actions == ()


def test_nodes_never_measured_come_before_retries_and_those_before_old_ones():
    nodes = [
        make_node("a", profile=measured(age=99 * DAY)),
        make_node("b", profile=failed(1, ago=DAY)),
        make_node("c"),
        make_node("d"),
    ]
    assert started(decide(*nodes, pool=make_pool(max_concurrent_nodes=9))) == ["c", "d", "b", "a"]


# ---- limits ----


def test_a_pool_measures_on_as_many_nodes_as_it_says():
    nodes = [make_node(f"n{index}") for index in range(5)]
    assert started(decide(*nodes)) == ["n0"]
    assert started(decide(*nodes, pool=make_pool(max_concurrent_nodes=3))) == ["n0", "n1", "n2"]
    running = (make_job("n0"), make_job("n1"))
    assert started(decide(*nodes, pool=make_pool(max_concurrent_nodes=3), jobs=running)) == ["n2"]


def test_the_cluster_has_a_limit_over_all_pools():
    nodes = [make_node(f"n{index}") for index in range(9)]
    others = tuple(make_job(f"m{index}", pool_uid="other") for index in range(3))
    pool = make_pool(max_concurrent_nodes=9)
    assert len(started(decide(*nodes, pool=pool, jobs=others))) == 2
    assert started(decide(*nodes, pool=pool, jobs=others, jobs_max=3)) == []
    done = tuple(replace(job, state=JobState.FAILED, finished=NOW) for job in others)
    assert len(started(decide(*nodes, pool=pool, jobs=done))) == 5


def test_a_node_measures_for_one_pool_at_a_time():
    other = make_job("n1", name="other", pool_uid="other")
    assert started(decide(make_node("n1"), make_node("n2"), jobs=(other,))) == ["n2"]


@pytest.mark.parametrize("job", [make_job(), ended(), make_job(is_deleting=True)], ids=["active", "ended", "going"])
def test_nothing_starts_while_a_job_is_there(job):
    assert started(decide(make_node(), jobs=(job,))) == []


# ---- what becomes of a Job ----


def test_a_first_job_is_seen_as_running_and_a_later_one_keeps_the_figures():
    profile = recorded(decide(make_node(), jobs=(make_job(),)))
    assert (profile.state, profile.key, profile.measured_at) == (ProfileState.RUNNING, KEY, None)
    assert decide(make_node(profile=measured(age=99 * DAY)), jobs=(make_job(),)).actions == ()


def test_a_measurement_is_recorded_before_its_job_is_deleted():
    made = decide(make_node(), jobs=(ended(message=said(read=7)),))
    assert [type(action) for action in made.actions] == [RecordProfile, DeleteJob]
    profile = recorded(made)
    assert profile.state is ProfileState.MEASURED
    assert profile.measured_at == NOW - timedelta(seconds=5)
    assert (profile.read_bytes_per_second, profile.points[0].read_bytes_per_second) == (7, 7)
    assert (profile.failures, profile.next_attempt, profile.reason) == (0, None, "")


def test_what_is_recorded_already_is_not_recorded_again():
    for job in (
        ended(),
        ended(exit_code=1, message="Traceback\nValueError: x", attempt=3),
        ended(message=said(contended=True)),
    ):
        profile = recorded(decide(make_node(), jobs=(job,)))
        assert decide(make_node(profile=profile), jobs=(job,)).actions == (DeleteJob(job.name),)


@pytest.mark.parametrize("known", [measured(age=timedelta(0)), failed(2, ago=timedelta(0))], ids=["measured", "failed"])
def test_a_job_that_ended_before_what_is_known_changes_nothing(known):
    assert decide(make_node(profile=known), jobs=(ended(),)).actions == (DeleteJob("job-n1"),)


def test_a_failure_is_counted_and_waits_longer_each_time():
    for attempt, seconds in ((1, 60), (2, 120), (3, 240), (12, 21600)):
        job = ended(exit_code=1, message="Traceback\nValueError: x", attempt=attempt)
        profile = recorded(
            decide(make_node(profile=failed(attempt - 1, ago=DAY) if attempt > 1 else None), jobs=(job,))
        )
        assert profile.state is ProfileState.FAILED
        assert profile.failures == attempt
        assert profile.next_attempt == job.finished + timedelta(seconds=seconds)
        assert (profile.reason, profile.message) == ("Crashed", "it exited with 1: ValueError: x")


@pytest.mark.parametrize("time", [datetime.min, datetime.max])
def test_times_that_cannot_be_make_no_difference_to_other_nodes(time):
    """A node's status may say anything."""
    odd = failed(3, ago=DAY, next_attempt=time.replace(tzinfo=timezone.utc), measured_at=None)
    asked = make_pool(annotations={RECALIBRATE_ANNOTATION: "2026-12-01T11:00:00Z"})
    made = decide(make_node("odd", profile=odd), make_node("plain"), pool=asked, jobs=(ended("odd"),))
    assert "plain" in started(made)


@pytest.mark.parametrize("failures", [ATTEMPT_MAX - 1, ATTEMPT_MAX, 2**63 - 1])
def test_a_job_is_recognized_however_many_failures_a_node_claims(failures):
    made = decide(make_node(profile=failed(failures, ago=DAY)))
    (start,) = (action for action in made.actions if isinstance(action, StartJob))
    head = {"uid": "u", "creationTimestamp": "2026-12-01T12:00:00Z"}
    body = build_job(make_pool(), start, JobSettings(namespace="ns", image="image:1"))
    seen = read_job({**body, "metadata": {**body["metadata"], **head}}, [])
    assert seen is not None
    assert seen.attempt == ATTEMPT_MAX


def test_a_failure_keeps_the_figures_of_the_same_disk():
    profile = recorded(decide(make_node(profile=measured()), jobs=(ended(exit_code=1, message="x"),)))
    assert profile.state is ProfileState.FAILED
    assert profile.read_bytes_per_second == 3_000_000_000
    assert profile.measured_at == NOW - DAY


def test_a_refusal_of_the_disk_is_told_in_its_own_words():
    message = encode_calibration(CalibrationRefusal("/pool cannot be written: mount it read-write", retry=False))
    profile = recorded(decide(make_node(), jobs=(ended(exit_code=42, message=message),)))
    assert (profile.reason, profile.message) == ("Unsupported", "/pool cannot be written: mount it read-write")


def test_a_job_that_ended_before_its_pod_is_seen_waits_a_minute():
    job = replace(ended(), message=None, exit_code=None)
    made = decide(make_node(), jobs=(job,))
    assert made == CalibrationPlan((), job.finished + RESULT_WAIT)
    profile = recorded(decide(make_node(), jobs=(job,), now=job.finished + RESULT_WAIT))
    assert profile.reason == "NoResult"


def test_a_job_past_its_deadline_has_no_pod_to_wait_for():
    job = make_job(state=JobState.FAILED, finished=NOW, job_reason="DeadlineExceeded")
    profile = recorded(decide(make_node(), jobs=(job,)))
    assert profile.reason == "DeadlineExceeded"
    assert "kubectl get events -A | grep job-n1" in profile.message


def test_a_job_that_hangs_is_a_failure_and_deleted():
    job = make_job(created=NOW - HUNG)
    made = decide(make_node(), jobs=(job,))
    assert recorded(made).reason == "Hung"
    assert made.actions[-1] == DeleteJob("job-n1")
    again = decide(make_node(profile=recorded(made)), jobs=(job,), now=NOW + DAY)
    assert again.actions == (DeleteJob("job-n1"),), "the failure is not counted twice"
    young = make_job(created=NOW - HUNG + timedelta(seconds=1))
    assert decide(make_node(), jobs=(young,)).look_again == NOW + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("nodes", "pool", "why"),
    [
        ((), make_pool(), "its node is gone"),
        ((make_node(uid="another"),), make_pool(), "another pool there"),
        ((make_node(kernel="6.9.0"),), make_pool(), "it measures what is no more"),
        ((make_node(),), make_pool(enabled=False), "calibration is switched off"),
    ],
)
def test_a_job_that_nobody_wants_is_deleted(nodes, pool, why):
    assert decide(*nodes, pool=pool, jobs=(make_job(),)).actions == (DeleteJob("job-n1"),), why


def test_a_pool_that_is_being_deleted_starts_nothing_and_deletes_its_jobs():
    pool = make_pool()
    pool = replace(pool, metadata=replace(pool.metadata, deletion_timestamp=NOW))
    assert decide(make_node("n1"), make_node("n2"), pool=pool, jobs=(make_job("n1"),)).actions == (DeleteJob("job-n1"),)


def test_jobs_of_other_pools_are_left_alone():
    assert decide(make_node(profile=measured()), jobs=(ended(pool_uid="other"),)).actions == ()


# ---- others on the disk ----


def test_a_disturbed_measurement_is_used_repeated_and_at_last_accepted():
    first = recorded(decide(make_node(), jobs=(ended(message=said(read=90, contended=True)),)))
    assert (first.state, first.contended, first.reason) == (ProfileState.MEASURED, True, "Contended")
    assert first.next_attempt == NOW - timedelta(seconds=5) + backoff(1)
    made = decide(make_node(profile=first), now=NOW + timedelta(minutes=2))
    assert made.actions[0].attempt == 2
    # The slower second one does not replace the first one's figures.
    job = ended(message=said(read=70, contended=True), attempt=2)
    second = recorded(decide(make_node(profile=first), jobs=(job,)))
    assert (second.read_bytes_per_second, second.failures) == (90, 2)
    job = ended(message=said(read=80, contended=True), attempt=3, finished=NOW)
    third = recorded(decide(make_node(profile=second), jobs=(job,)))
    assert (third.read_bytes_per_second, third.contended) == (90, True)
    assert (third.failures, third.next_attempt, third.reason) == (0, None, "")
    assert decide(make_node(profile=third), jobs=(job,)).actions == (DeleteJob(job.name),)
    assert started(decide(make_node(profile=third))) == []


@pytest.mark.parametrize("contended", [False, None], ids=["undisturbed", "not visible"])
def test_an_undisturbed_measurement_replaces_disturbed_ones_even_if_it_is_slower(contended):
    first = recorded(decide(make_node(), jobs=(ended(message=said(read=90, contended=True)),)))
    job = ended(message=said(read=50, contended=contended), attempt=2)
    profile = recorded(decide(make_node(profile=first), jobs=(job,)))
    assert (profile.read_bytes_per_second, profile.contended, profile.failures) == (50, False, 0)


# ---- classes of nodes ----

TWO = (make_node("a", profile=measured(read=1000)), make_node("b", profile=measured(read=1100)))


def short_run(read: int, **fields: object) -> CalibrationJob:
    return ended("n1", message=said(read=read, **fields), short=True)


def test_the_third_node_of_a_class_only_compares_itself():
    (start,) = decide(*TWO, make_node()).actions
    assert start.short
    (start,) = decide(TWO[0], make_node()).actions
    assert not start.short


@pytest.mark.parametrize(
    "different",
    [
        {"disk_model": "OTHER"},
        {"disk_model": ""},
        {"filesystem": "ext4"},
        {"engine": "threads"},
        {"path": "/elsewhere"},
    ],
    ids=str,
)
def test_nodes_with_other_disks_are_no_class(different):
    (start,) = decide(*TWO, make_node(**different)).actions
    assert not start.short


@pytest.mark.parametrize(
    "other", [measured(contended=True), measured(reason="Inherited"), measured(reason="ShortRun"), failed(1, ago=DAY)]
)
def test_only_full_undisturbed_measurements_make_a_class(other):
    nodes = (TWO[0], make_node("b", profile=replace(other, next_attempt=NOW + DAY)), make_node())
    (start,) = decide(*nodes).actions
    assert not start.short


@pytest.mark.parametrize("read", [800, 1000, 1200])
def test_a_short_run_that_agrees_inherits_the_curve(read):
    profile = recorded(decide(*TWO, make_node(), jobs=(short_run(read, contended=True),)))
    assert (profile.state, profile.reason) == (ProfileState.MEASURED, "Inherited")
    assert (profile.read_bytes_per_second, profile.points) == (1000, TWO[0].operator.profiles[0].points)
    assert (profile.contended, profile.next_attempt, profile.failures) == (False, None, 0)
    assert started(decide(*TWO, make_node(profile=profile))) == []


@pytest.mark.parametrize("read", [799, 1201])
def test_a_short_run_that_differs_is_followed_by_a_full_one(read):
    profile = recorded(decide(*TWO, make_node(), jobs=(short_run(read),)))
    assert (profile.read_bytes_per_second, profile.reason) == (read, "ShortRun")
    (start,) = decide(*TWO, make_node(profile=profile)).actions
    assert not start.short
    full = recorded(decide(*TWO, make_node(profile=profile), jobs=(ended(message=said(read=read)),)))
    assert (full.read_bytes_per_second, full.reason) == (read, "")


def test_a_short_run_that_differs_because_others_used_the_disk_is_repeated():
    profile = recorded(decide(*TWO, make_node(), jobs=(short_run(500, contended=True),)))
    assert profile.reason == "Contended"


def test_a_short_run_whose_class_is_gone_is_followed_by_a_full_one():
    assert recorded(decide(make_node(), jobs=(short_run(1000),))).reason == "ShortRun"


def test_a_measurement_that_was_asked_for_is_a_full_one():
    node = make_node(profile=measured(), annotations={RECALIBRATE_ANNOTATION: "2026-12-01T11:00:00Z"})
    (start,) = decide(*TWO, node).actions
    assert not start.short
