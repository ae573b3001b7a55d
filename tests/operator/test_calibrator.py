"""Plans of calibration are carried out once, whoever asks how often, and room for Jobs goes round."""

import asyncio

import pytest

from pykvcache_operator.calibration import JOBS_MAX
from pykvcache_operator.calibration_job import JobSettings
from pykvcache_operator.calibrator import Calibrator
from pykvcache_operator.client import ApiError
from pykvcache_operator.cluster import Cluster

SETTINGS = JobSettings(namespace="ns", image="image:1")


class JobServer:
    """Keeps Jobs and statuses as the API server would."""

    def __init__(self, now_text) -> None:
        self.created, self.deleted, self.statuses = [], [], []
        self.refused = ""
        self.version, self._now = 100, now_text

    def _stamp(self, body):
        self.version += 1
        name = body["metadata"]["name"]
        stamp = {"uid": f"uid-{name}", "resourceVersion": str(self.version), "creationTimestamp": self._now}
        return {**body, "metadata": {**body["metadata"], **stamp}}

    async def create(self, _path, body):
        self.created.append(body["metadata"]["name"])
        return self._stamp(body)

    async def apply(self, path, body):
        if self.refused and self.refused in path:
            raise ApiError("too large", status=413)
        self.statuses.append(body["status"]["profiles"])
        return self._stamp(body)

    async def delete(self, path, *, uid):
        self.deleted.append((path.rsplit("/", 1)[1], uid))


class Setting:
    """Nodes with pools that are ready and not measured."""

    def __init__(self, world) -> None:
        self.world, self.woken = world, []
        self.cluster, self.server = Cluster(lambda _name: None), JobServer(world.text(0))
        self.calibrator = Calibrator(self.server, self.cluster, SETTINGS, wake=self.woken.append)

    def add(self, pool, nodes):
        head = {"uid": f"uid-{pool}", "resourceVersion": "1"}
        storage = {"type": "NodeLocal", "capacityPerNode": "10Gi"}
        spec = {"storage": storage, "calibration": {"maxConcurrentNodes": 100}}
        self.cluster.pools.put({"metadata": {"name": pool, **head}, "spec": spec})
        for node in nodes:
            self.cluster.nodes.put(
                {"metadata": {"name": node, **head}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            )
            entry = self.world.entry(name=pool, uid=f"uid-{pool}")
            status = {"heartbeatTime": self.world.text(0), "pools": [entry]}
            self.cluster.caches.put({"metadata": {"name": node, **head}, "status": status})

    def end_jobs(self):
        for job in list(self.cluster.jobs.values()):
            self.server.version += 1
            done = {"type": "Complete", "status": "True", "lastTransitionTime": self.world.text(-100)}
            metadata = {**job["metadata"], "resourceVersion": str(self.server.version)}
            self.cluster.jobs.put({**job, "metadata": metadata, "status": {"conditions": [done]}})

    async def calibrate(self, pool):
        return await self.calibrator.calibrate(self.cluster.pools.get(pool).pool, self.world.now)


@pytest.fixture
def setting(world):
    return Setting(world)


def test_asking_again_and_at_once_starts_nothing_twice(setting):
    setting.add("p", ["a", "b"])

    async def ask():
        await asyncio.gather(*(setting.calibrate("p") for _ in range(5)))

    asyncio.run(ask())
    assert len(setting.server.created) == len(set(setting.server.created)) == 2


def test_pools_queue_for_room_and_the_end_of_a_job_wakes_them(setting):
    setting.add("p", [f"n{i}" for i in range(JOBS_MAX)])
    setting.add("q", ["other"])

    async def ask():
        await setting.calibrate("p")
        await setting.calibrate("q")
        assert len(setting.server.created) == JOBS_MAX
        assert setting.woken == []
        job = next(setting.cluster.jobs.values())
        done = {"type": "Complete", "status": "True", "lastTransitionTime": setting.world.text(-100)}
        version = str(setting.server.version + 1)
        metadata = {**job["metadata"], "resourceVersion": version}
        setting.cluster.jobs.put({**job, "metadata": metadata, "status": {"conditions": [done]}})
        await setting.calibrate("p")  # finds no answer: a failure, and the Job goes
        assert setting.server.deleted == [(job["metadata"]["name"], job["metadata"]["uid"])]
        assert setting.server.statuses[-1][0]["state"] == "Failed"
        assert "q" in setting.woken
        await setting.calibrate("q")
        assert len(setting.server.created) == JOBS_MAX + 1

    asyncio.run(ask())


def test_a_node_whose_status_cannot_be_written_keeps_no_other_back(setting):
    setting.add("p", ["a", "b"])

    async def ask():
        await setting.calibrate("p")
        setting.end_jobs()
        setting.server.refused = "/a/"
        with pytest.raises(ApiError, match="too large"):
            await setting.calibrate("p")

    asyncio.run(ask())
    assert [[profile["state"] for profile in written] for written in setting.server.statuses] == [["Failed"]]
    assert len(setting.server.deleted) == 1, "what is not written is not deleted"


def test_pools_that_are_gone_do_not_stand_in_the_queue(setting):
    setting.add("p", [f"n{i}" for i in range(JOBS_MAX)])
    gone = [f"gone{number}" for number in range(JOBS_MAX)]
    for name in (*gone, "q"):
        setting.add(name, [f"of-{name}"])

    async def ask():
        await setting.calibrate("p")
        for name in (*gone, "q"):
            await setting.calibrate(name)
        for name in gone:
            await setting.calibrator.forget(name)
        setting.end_jobs()
        await setting.calibrate("p")

    asyncio.run(ask())
    assert set(setting.woken) - {"p"} == {"q"}


def test_what_is_known_of_a_pool_that_is_gone_goes(setting, world):
    setting.add("p", ["a"])
    profiles = [{"pool": name, "poolUID": "u", "state": "Measured"} for name in ("gone", "p")]
    status = {"heartbeatTime": world.text(0), "profiles": profiles}
    setting.cluster.caches.put({"metadata": {"name": "a", "uid": "uid-p", "resourceVersion": "5"}, "status": status})
    asyncio.run(setting.calibrator.forget("gone"))
    assert [[profile["pool"] for profile in written] for written in setting.server.statuses] == [["p"]]
