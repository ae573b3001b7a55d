"""The policy of calibration as a whole, in a simulated cluster with any luck and any order."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_contract.api.node import KVCacheNode, OperatorStatus, ProfileState
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.calibration import CalibrationRefusal, encode_calibration
from pykvcache_operator.calibration import CalibrationPlan, DeleteJob, RecordProfile
from pykvcache_operator.calibration_job import CalibrationJob, JobState, StartJob, job_name

from .test_calibration import NOW, UID, decide, ended, make_job, make_node, make_pool, said


@dataclass
class Cluster:
    """Nodes and Jobs that do what a plan says, and end Jobs as luck has it."""

    pool: KVCachePool
    nodes: dict[str, KVCacheNode]
    jobs: dict[str, CalibrationJob] = field(default_factory=dict)
    now: datetime = NOW
    starts: int = 0

    def step(self, jobs_max: int = 5) -> CalibrationPlan:
        made = decide(
            *self.nodes.values(), pool=self.pool, jobs=tuple(self.jobs.values()), now=self.now, jobs_max=jobs_max
        )
        for action in made.actions:
            if isinstance(action, StartJob):
                self.start(action)
            elif isinstance(action, DeleteJob):
                del self.jobs[action.name]
            else:
                profiles = (action.profile,) if isinstance(action, RecordProfile) else ()
                node = self.nodes[action.node]
                self.nodes[action.node] = replace(node, operator=OperatorStatus(profiles=profiles))
        active = [job for job in self.jobs.values() if job.finished is None]
        assert len(active) <= min(jobs_max, self.pool.spec.calibration.max_concurrent_nodes)
        return made

    def start(self, action: StartJob) -> None:
        name = job_name(UID, action)
        assert name not in self.jobs
        assert action.node not in {job.node for job in self.jobs.values()}
        facts = {"node": action.node, "key": action.key, "attempt": action.attempt, "short": action.short}
        self.jobs[name] = CalibrationJob(name=name, pool_uid=UID, created=self.now, **facts)
        self.starts += 1

    def end(self, luck: Callable[[], CalibrationJob]) -> None:
        for name, job in self.jobs.items():
            if job.finished is None:
                end = luck()
                fields = ("state", "job_reason", "message", "exit_code", "container_reason")
                self.jobs[name] = replace(job, finished=self.now, **{each: getattr(end, each) for each in fields})


def lucks() -> st.SearchStrategy[CalibrationJob]:
    refused = encode_calibration(CalibrationRefusal("no", retry=True))
    return st.one_of(
        st.builds(
            lambda read, contended: ended(message=said(read=read, contended=contended)),
            st.integers(1, 10**12),
            st.sampled_from([True, False, None]),
        ),
        st.builds(lambda text, code: ended(message=text, exit_code=code), st.text(max_size=50), st.integers(0, 255)),
        st.just(ended(exit_code=42, message=refused)),
        st.just(ended(exit_code=137, message="", container_reason="OOMKilled")),
        st.just(make_job(state=JobState.FAILED, job_reason="DeadlineExceeded")),
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_with_any_luck_limits_hold_and_every_node_is_measured_once_luck_returns(data):
    count, at_a_time = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    jobs_max = data.draw(st.integers(1, 4))
    cluster = Cluster(
        make_pool(max_concurrent_nodes=at_a_time), {f"n{index}": make_node(f"n{index}") for index in range(count)}
    )
    for _ in range(data.draw(st.integers(0, 12))):
        cluster.step(jobs_max)
        if data.draw(st.booleans()):
            cluster.end(lambda: data.draw(lucks()))
        cluster.now += timedelta(seconds=data.draw(st.integers(0, 7200)))
        name = data.draw(st.sampled_from(sorted(cluster.nodes)))
        if data.draw(st.integers(0, 9)) == 0:
            node = cluster.nodes[name]
            cluster.nodes[name] = replace(node, agent=make_node(kernel=data.draw(st.sampled_from("ab"))).agent)
    for _ in range(6 * count + 6):
        cluster.now += timedelta(hours=7)
        cluster.step(jobs_max)
        cluster.end(ended)
    cluster.step(jobs_max)
    profiles = [node.profile("nvme") for node in cluster.nodes.values()]
    assert all(profile is not None and profile.state is ProfileState.MEASURED for profile in profiles)
    assert all(profile.next_attempt is None for profile in profiles)
    assert cluster.jobs == {}
    assert cluster.step(jobs_max).actions == (), "no work when nothing changes"


def test_twenty_equal_nodes_take_two_full_runs_and_eighteen_short_ones():
    cluster = Cluster(make_pool(), {f"n{index:02}": make_node(f"n{index:02}") for index in range(20)})
    shorts = []
    for _ in range(60):
        made = cluster.step()
        shorts += [action.short for action in made.actions if isinstance(action, StartJob)]
        cluster.end(ended)
        cluster.now += timedelta(seconds=20)
    assert shorts == [False] * 2 + [True] * 18
    assert {node.profile("nvme").reason for node in cluster.nodes.values()} == {"", "Inherited"}


def test_a_node_that_always_fails_is_tried_less_and_less():
    cluster = Cluster(make_pool(), {"n1": make_node()})
    for _ in range(24 * 60):
        cluster.step()
        cluster.end(lambda: ended(exit_code=1, message="no"))
        cluster.now += timedelta(minutes=1)
    assert 9 <= cluster.starts <= 13, "1 min to 6 h over a day"
