"""The operator against a real API server; nodes and what their agents write are simulated."""

import json
import re
import uuid
from contextlib import ExitStack, suppress

import pytest

from harness.kubectl import KubectlError, Object
from harness.operators import GIB, Agents, Operators, condition, entry
from harness.proxy import ApiProxy
from harness.waiting import NotYetError, wait_for
from pykvcache_contract.metrics import OPERATOR_METRICS, WEBHOOK_CERTIFICATE_EXPIRY, WEBHOOK_CERTIFICATE_FAILURES

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FORCE = "pykvcache.io/force-delete"


@pytest.fixture
def operators(api_server, crds, namespace, tmp_path):
    with ExitStack() as stack:
        yield Operators(tmp_path, kubeconfig=api_server.kubeconfig, namespace=namespace, stack=stack)


@pytest.fixture
def agents(api_server):
    return Agents(api_server.kubectl)


class Fleet:
    """Nodes and pools of one test; both go with it."""

    def __init__(self, api_server) -> None:
        self._api_server, self.kubectl = api_server, api_server.kubectl
        self.tag = uuid.uuid4().hex[:6]
        self.nodes: list[str] = []
        self.pools: list[str] = []

    def add_nodes(self, count: int) -> list[str]:
        names = [f"n{number}-{self.tag}" for number in range(len(self.nodes), len(self.nodes) + count)]
        for name in names:
            self._api_server.add_node(name, labels={"fleet": self.tag})
        self.nodes += names
        return names

    def make_unreachable(self, node: str) -> None:
        lost = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "made by a test"}
        self.kubectl.patch("node", node, {"status": {"conditions": [lost]}}, subresource="status")

    def add_pool(self, name: str = "p", **spec: object) -> Object:
        """Make a NodeLocal pool on this fleet's nodes, or another one."""
        full = f"{name}-{self.tag}"
        local = {"storage": {"type": "NodeLocal", "capacityPerNode": "10Gi"}, "nodeSelector": {"fleet": self.tag}}
        document = {
            "apiVersion": "pykvcache.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": full},
            "spec": spec if "storage" in spec else {**local, **spec},
        }
        self.pools.append(full)
        self.kubectl.apply(document)
        return self.kubectl.get("kvcachepool", full)

    def wait_for(self, pool: Object, kind: str, status: str, reason: str = "", *, limit_s: float = 120) -> Object:
        def holds(found: Object) -> bool:
            seen = condition(found, kind)
            return seen[0] == status and reason in ("", seen[1])

        what = f"to have {kind}={status} {reason}"
        return self.kubectl.wait_for("kvcachepool", pool["metadata"]["name"], holds, what, limit_s=limit_s)

    def wait_until_gone(self, pool: Object, *, limit_s: float = 120) -> None:
        name = pool["metadata"]["name"]
        wait_for(f"{name} to be gone", lambda: self.kubectl.find("kvcachepool", name) is None, limit_s=limit_s)

    def wait_for_finalizer(self, pool: Object) -> None:
        name = pool["metadata"]["name"]
        has = "to have its finalizer"
        self.kubectl.wait_for("kvcachepool", name, lambda found: found["metadata"].get("finalizers"), has)

    def label_of(self, node: str, pool: Object) -> str | None:
        labels = self.kubectl.get("node", node)["metadata"]["labels"]
        return labels.get(f"pykvcache.io/pool.{pool['metadata']['name']}")

    def events_of(self, pool: Object) -> list[str]:
        found = json.loads(self.kubectl.run("get", "events.v1.events.k8s.io", "-n", "default", "-o", "json"))["items"]
        return [event["reason"] for event in found if event["regarding"]["name"] == pool["metadata"]["name"]]

    def wait_for_events(self, pool: Object, *reasons: str) -> None:
        """Wait until these were told, which is done after the status says so."""

        def are_told() -> bool:
            if missing := set(reasons) - set(told := self.events_of(pool)):
                raise NotYetError(f"{missing} not among {told}")
            return True

        wait_for("the events", are_told)

    def clear(self) -> None:
        for name in self.pools:
            self.kubectl.delete("kvcachepool", name, wait=False)
            patch = json.dumps({"metadata": {"finalizers": None}})
            with suppress(KubectlError):  # it may be gone by now
                self.kubectl.run("patch", "kvcachepool", name, "--type=merge", "-p", patch)
        for name in self.nodes:
            self.kubectl.delete("node", name, wait=False)
            self.kubectl.delete("kvcachenode", name, wait=False)


@pytest.fixture
def fleet(api_server, crds):
    fleet = Fleet(api_server)
    yield fleet
    fleet.clear()


def ready_pool(fleet: Fleet, agents: Agents, *, nodes: int = 1, **spec: object) -> Object:
    """Make a pool that is ready on all of some nodes."""
    pool = fleet.add_pool(**spec)
    for name in fleet.add_nodes(nodes):
        agents.report(name, entry(pool))
    return fleet.wait_for(pool, "Ready", "True")


@pytest.mark.short
def test_a_pool_becomes_ready_with_its_nodes_and_says_what_they_have(operators, agents, fleet):
    operator = operators.start(follow_pods=True).wait_until_active()
    first, second = fleet.add_nodes(2)
    pool = fleet.add_pool()
    fleet.wait_for(pool, "Ready", "False", "NotEnoughNodes")  # no agent has reported
    agents.report(first, entry(pool, usedBytes=3 * GIB))
    found = fleet.wait_for(pool, "Degraded", "True", "NoNodeAgent")
    assert condition(found, "Ready") == ("True", "Ready")
    assert found["status"]["nodes"] == "1/2"
    assert [failing["name"] for failing in found["status"]["failingNodes"]] == [second]
    agents.report(second, entry(pool, usedBytes=2 * GIB))
    found = fleet.wait_for(pool, "NodesReady", "True")
    status = found["status"]
    assert (status["nodesReady"], status["capacityBytes"], status["usedBytes"]) == (2, 20 * GIB, 5 * GIB)
    assert status["observedGeneration"] == found["metadata"]["generation"]
    assert condition(found, "Degraded")[0] == "False"
    assert condition(found, "IOUringAvailable") == ("True", "Available")
    assert (fleet.label_of(first, pool), fleet.label_of(second, pool)) == ("ready", "ready")
    fleet.wait_for_events(pool, "NotEnoughNodes", "Ready", "Recovered")
    columns = fleet.kubectl.run("get", "kvcachepool", pool["metadata"]["name"]).split()
    assert "2/2" in columns
    served = re.findall(r"^# TYPE (\S+)", operator.get("/metrics")[1], flags=re.MULTILINE)
    certificates = {WEBHOOK_CERTIFICATE_EXPIRY, WEBHOOK_CERTIFICATE_FAILURES}  # there is no webhook here
    declared = {metric.name for metric in OPERATOR_METRICS if metric not in certificates}
    assert declared == {name for name in served if not name.endswith("_created")}


@pytest.mark.short
def test_a_node_that_is_lost_loses_its_label_and_degrades_the_pool_only(operators, agents, fleet):
    operators.start().wait_until_active()
    pool = ready_pool(fleet, agents, nodes=2)
    fleet.wait_for(pool, "NodesReady", "True")
    fleet.make_unreachable(fleet.nodes[1])
    found = fleet.wait_for(pool, "Degraded", "True", "NodeNotReady")
    assert condition(found, "Ready")[0] == "True"
    assert fleet.label_of(fleet.nodes[1], pool) is None
    fleet.kubectl.delete("node", fleet.nodes[1])
    found = fleet.wait_for(pool, "Degraded", "False")
    assert found["status"]["nodes"] == "1/1"


def test_a_changed_spec_is_observed(operators, agents, fleet):
    operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    name = pool["metadata"]["name"]
    fleet.kubectl.patch("kvcachepool", name, {"spec": {"minReadyNodes": 2}})
    found = fleet.wait_for(pool, "Ready", "False", "NotEnoughNodes")
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"] == 2
    fleet.kubectl.patch("kvcachepool", name, {"spec": {"minReadyNodes": 0, "nodeSelector": {"fleet": "none"}}})
    found = fleet.wait_for(pool, "Ready", "True")
    assert found["status"]["nodesDesired"] == 0
    assert fleet.label_of(fleet.nodes[0], pool) is None


@pytest.mark.short
def test_a_deleted_pool_goes_when_the_nodes_have_erased_it(operators, agents, fleet):
    operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    fleet.wait_for_finalizer(pool)
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"], wait=False)
    fleet.wait_for(pool, "Deleting", "True", "Erasing")
    assert fleet.label_of(fleet.nodes[0], pool) is None
    agents.report(fleet.nodes[0])
    fleet.wait_until_gone(pool)


def test_a_delete_does_not_wait_for_a_node_that_is_lost(operators, agents, fleet):
    operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    fleet.make_unreachable(fleet.nodes[0])
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"], wait=False)
    fleet.wait_until_gone(pool)
    fleet.wait_for_events(pool, "ErasedLater")


def test_pods_that_mount_a_pool_hold_it_until_force(operators, agents, fleet):
    operators.start().wait_until_active()
    pool = ready_pool(fleet, agents, deletionPolicy="Retain")
    name = pool["metadata"]["name"]
    agents.report(fleet.nodes[0], entry(pool, mounts=1))
    fleet.kubectl.wait_for("kvcachepool", name, lambda found: True, "to be there")
    wait_for("the finalizer", lambda: fleet.kubectl.get("kvcachepool", name)["metadata"].get("finalizers"))
    fleet.kubectl.delete("kvcachepool", name, wait=False)
    fleet.wait_for(pool, "Deleting", "True", "InUse")
    fleet.wait_for_events(pool, "InUse")
    fleet.kubectl.run("annotate", "kvcachepool", name, f"{FORCE}=true")
    fleet.wait_until_gone(pool)  # Retain: nothing to wait for


def test_what_happened_while_no_operator_ran_is_caught_up_with(operators, agents, fleet):
    operator = operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    fleet.wait_for_finalizer(pool)
    operator.ask_to_end()
    assert operator.wait_for_end() == 0
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"], wait=False)
    agents.report(fleet.nodes[0])  # the agents do not need the operator
    other = fleet.add_pool("other")
    agents.report(fleet.nodes[0], entry(other))
    operators.start().wait_until_active()
    fleet.wait_until_gone(pool)
    fleet.wait_for(other, "Ready", "True")
    wait_for("the old label to go", lambda: fleet.label_of(fleet.nodes[0], pool) is None, limit_s=120)


def test_labels_of_a_pool_that_was_torn_away_go(operators, agents, fleet):
    operator = operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    wait_for("the label", lambda: fleet.label_of(fleet.nodes[0], pool) == "ready", limit_s=120)
    fleet.wait_for_finalizer(pool)
    operator.kill()
    fleet.kubectl.patch("kvcachepool", pool["metadata"]["name"], {"metadata": {"finalizers": None}})
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"])
    operators.start().wait_until_active()
    wait_for("the label to go", lambda: fleet.label_of(fleet.nodes[0], pool) is None, limit_s=120)


@pytest.mark.short
def test_of_two_operators_one_works_and_the_other_takes_over(operators, agents, fleet):
    first = operators.start().wait_until_active()
    second = operators.start().wait_until_serving()
    assert second.get("/readyz")[0] == 200  # a standby is ready, or no roll-out would end
    assert second.metric("pykvcache_operator_is_leader") == 0
    pool = ready_pool(fleet, agents)
    assert second.metric("pykvcache_operator_reconcile_total") == 0
    first.ask_to_end()
    assert first.wait_for_end() == 0
    second.wait_until_active()
    fleet.make_unreachable(fleet.nodes[0])
    fleet.wait_for(pool, "Ready", "False", "NotEnoughNodes")


def test_an_operator_that_was_frozen_ends_when_another_one_has_its_lease(operators, agents, fleet):
    first = operators.start().wait_until_active()
    second = operators.start().wait_until_serving()
    first.pause()
    second.wait_until_active()
    first.resume()
    assert first.wait_for_end() == 1
    ready_pool(fleet, agents)


def test_a_restarted_api_server_is_followed_again(operators, agents, fleet, api_server):
    operator = operators.start().wait_until_active()
    pool = ready_pool(fleet, agents)
    api_server.restart_apiserver()
    fleet.make_unreachable(fleet.nodes[0])
    second = fleet.add_pool("second", nodeSelector={"fleet": "none"})
    try:
        fleet.wait_for(pool, "Ready", "False", "NotEnoughNodes", limit_s=120)
    except TimeoutError:
        if "the lease" not in operator.log.read_text():
            raise
        operators.start().wait_until_active()  # it took too long to keep the Lease; Kubernetes starts another
        fleet.wait_for(pool, "Ready", "False", "NotEnoughNodes")
    fleet.wait_for(second, "Ready", "False", "NoNodes")


def test_watches_that_fall_silent_make_it_unhealthy(operators, agents, fleet, api_server, tmp_path):
    proxy = ApiProxy(api_server.server, certificates=api_server.certificates, state=tmp_path)
    try:
        operator = operators.start(kubeconfig=proxy.kubeconfig, watch_seconds=3).wait_until_active()
        ready_pool(fleet, agents)
        heard = "pykvcache_operator_last_watch_event_timestamp_seconds"
        before = operator.metric(heard)
        idle_s = 12 * 3  # longer than silence is suffered, for pools, nodes and KVCacheNodes: their ends tell they live
        wait_for("an idle stretch", lambda: operator.metric(heard) > before + idle_s, limit_s=120)
        assert operator.get("/healthz")[0] == 200
        proxy.stall()
        wait_for("it to be unhealthy", lambda: operator.get("/healthz")[0] == 503, limit_s=120)
        text = operator.get("/healthz")[1]
        assert "told nothing about" in text
        assert operator.metric("pykvcache_operator_is_leader") == 1  # all but the watches works
        proxy.flow()
        wait_for("it to be healthy again", lambda: operator.get("/healthz")[0] == 200, limit_s=120)
    finally:
        proxy.stop()


ANSWER = {
    "formatVersion": 1,
    "engine": "threads",
    "buffered": False,
    "filesystem": "xfs",
    "kernel": "6",
    "diskModel": "",
    "readBytesPerSecond": 3 * GIB,
    "writeBytesPerSecond": GIB,
    "contended": False,
    "complete": True,
    "seconds": 1.0,
    "bytes": GIB,
    "points": [
        {
            "blockBytes": 2**20,
            "depth": 16,
            "readers": 1,
            "readBytesPerSecond": 3 * GIB,
            "latencyMicroseconds": 900,
        }
    ],
}


def test_a_ready_node_is_measured_by_a_job_and_its_answer_is_kept(operators, agents, fleet, namespace):
    operators.start(calibration_image="registry.test/sidecar:1").wait_until_active()
    pool = ready_pool(fleet, agents)
    inside = fleet.kubectl.within(namespace)
    labels = "app.kubernetes.io/component=calibration"
    (job,) = wait_for("the Job", lambda: inside.list("job", selector=labels))
    assert job["metadata"]["ownerReferences"][0]["uid"] == pool["metadata"]["uid"]
    (pod,) = wait_for("its pod", lambda: inside.list("pod", selector=labels))
    ended = {"exitCode": 0, "reason": "Completed", "message": json.dumps(ANSWER), "finishedAt": "2026-01-01T00:00:00Z"}
    container = pod["spec"]["containers"][0]
    state = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
    status = {"phase": "Succeeded", "containerStatuses": [state]}
    inside.patch("pod", pod["metadata"]["name"], {"status": status}, subresource="status")
    found = fleet.wait_for(pool, "Calibrated", "True")
    assert found["status"]["read"] == "3.0 GiB/s"
    assert found["status"]["nodesCalibrated"] == 1
    node = fleet.kubectl.get("kvcachenode", fleet.nodes[0])
    (profile,) = node["status"]["profiles"]
    assert (profile["state"], profile["readBytesPerSecond"]) == ("Measured", 3 * GIB)
    assert node["status"]["pools"], "the agent's part is untouched"
    wait_for("the Job to be deleted", lambda: not inside.list("job", selector=labels))
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"], wait=False)
    agents.report(fleet.nodes[0])
    fleet.wait_until_gone(pool)
    wait_for(
        "its profile to go",
        lambda: not fleet.kubectl.get("kvcachenode", fleet.nodes[0])["status"].get("profiles"),
    )


@pytest.mark.short
def test_nothing_is_written_when_nothing_changes(operators, agents, fleet):
    operator = operators.start(resync_seconds=1).wait_until_active()
    pool = ready_pool(fleet, agents)
    fleet.wait_for(pool, "NodesReady", "True")
    wait_for("it to have told all", lambda: operator.metric("pykvcache_operator_reconcile_waiting") == 0)
    version = fleet.kubectl.get("kvcachepool", pool["metadata"]["name"])["metadata"]["resourceVersion"]
    before = _writes(operator)
    for _ in range(3):
        agents.report(fleet.nodes[0], entry(pool))  # heartbeats
    done = operator.metric("pykvcache_operator_reconcile_total")
    wait_for(
        "five rounds over all pools",
        lambda: operator.metric("pykvcache_operator_reconcile_total") >= done + 5,
        limit_s=120,
    )
    assert _writes(operator) == before
    assert fleet.kubectl.get("kvcachepool", pool["metadata"]["name"])["metadata"]["resourceVersion"] == version


def _writes(operator) -> dict[str, str]:
    """Return how often the operator wrote anything but its Lease, which alone it updates as a whole, by verb."""
    series = r'^pykvcache_operator_api_requests_total\{verb="(\w+)"\} (\S+)$'
    counts = re.findall(series, operator.get("/metrics")[1], flags=re.MULTILINE)
    assert counts
    return {verb: count for verb, count in counts if verb not in {"get", "list", "watch", "update"}}


def test_claims_are_made_in_allowed_namespaces_and_go_with_the_pool(operators, fleet, namespace):
    operators.start().wait_until_active()
    storage = {"type": "SharedFilesystem", "storageClassName": "none-such", "capacity": "1Gi"}
    pool = fleet.add_pool(storage=storage, allowedNamespaces={"names": [namespace]})
    found = fleet.wait_for(pool, "Ready", "False", "ClaimPending")
    inside, claim = fleet.kubectl.within(namespace), f"pykvcache-{pool['metadata']['name']}"
    made = inside.wait_for("pvc", claim, lambda found: True, "to be made")
    assert made["spec"]["accessModes"] == ["ReadWriteMany"]
    inside.patch("pvc", claim, {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}, subresource="status")
    found = fleet.wait_for(pool, "Ready", "True", "ClaimBound")
    assert found["status"]["capacityBytes"] == GIB
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"])
    found = inside.find("pvc", claim)
    assert found is None or "deletionTimestamp" in found["metadata"]


def test_a_claim_in_a_namespace_that_is_deleted_is_no_trouble(operators, fleet, namespace, kubectl):
    operators.start().wait_until_active()
    other = f"{namespace[:50]}-b"
    kubectl.make_namespace(other)
    storage = {"type": "SharedFilesystem", "storageClassName": "none-such", "capacity": "1Gi"}
    pool = fleet.add_pool(storage=storage, allowedNamespaces={"names": [namespace, other]})
    claim = f"pykvcache-{pool['metadata']['name']}"
    kubectl.within(other).wait_for("pvc", claim, lambda found: True, "to be made")
    kubectl.delete("namespace", other)  # waits until it is gone: nothing of ours holds it
    fleet.wait_for(pool, "Ready", "False", "ClaimPending")
    fleet.kubectl.delete("kvcachepool", pool["metadata"]["name"])


def test_a_missing_claim_and_a_scratch_space_say_what_they_are(operators, fleet):
    operators.start().wait_until_active()
    absent = fleet.add_pool("absent", storage={"type": "SharedFilesystem", "claimName": "nobody-made-it"})
    scratch = fleet.add_pool("scratch", storage={"type": "Ephemeral", "capacity": "5Gi"})
    fleet.wait_for(absent, "Ready", "False", "ClaimNotFound")
    fleet.wait_for(scratch, "Ready", "True", "Ready")


def test_a_host_path_outside_the_allowed_prefixes_is_refused(operators, fleet):
    operators.start(allowed_host_path="/mnt").wait_until_active()
    storage = {"type": "NodeLocal", "capacityPerNode": "1Gi", "volume": "HostPath"}
    bad = fleet.add_pool("bad", storage={**storage, "path": "/etc"}, nodeSelector={"fleet": fleet.tag}, minReadyNodes=0)
    good = fleet.add_pool(
        "good", storage={**storage, "path": "/mnt/a"}, nodeSelector={"fleet": fleet.tag}, minReadyNodes=0
    )
    fleet.wait_for(bad, "Ready", "False", "PathNotAllowed")
    fleet.wait_for(good, "Ready", "True")
