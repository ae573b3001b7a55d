"""What goes wrong on real nodes: with their disks, with the nodes themselves, with measurements.

Tests change nodes and undo that in any case, so the cluster goes on to serve other modules.
"""

from contextlib import suppress

import pytest

from harness import pools
from harness.chart import AGENT_NAMESPACE, NAMESPACE, Installation
from harness.kubectl import Object
from harness.node import Node
from harness.pools import MARKER, Disk, pod_with_pool, pool_named
from harness.waiting import NotYetError, wait_for

# The first test also builds images and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def nodes(local_cluster):
    """Two nodes; those that other modules use, and one more where there is one only."""
    if len(local_cluster.nodes) < 2:
        local_cluster.add_node()
    return local_cluster.nodes


@pytest.fixture(scope="module")
def installation(local_cluster, nodes, settings):
    chart = Installation(local_cluster, cache=settings.cache)
    try:
        chart.install()
        yield chart
    finally:
        chart.remove()


@pytest.fixture
def add_disk(nodes):
    """Mount a disk on a node; it goes with the test."""
    disks = []

    def add(number: int, *, size: str = "256M") -> Disk:
        disks.append(Disk(nodes[number - 1], "/mnt/pykvcache-e2e", size=size))
        disks[-1].attach()
        return disks[-1]

    yield add
    for disk in disks:
        disk.remove()


@pytest.fixture
def add_pool(installation, add_disk, kubectl):
    """Make a pool, wait until nodes have it, and delete it after the test."""
    made = []

    def add(manifest: Object, *ready: str) -> str:
        name = manifest["metadata"]["name"]
        kubectl.apply(manifest)
        made.append(name)
        for node in ready:
            pools.wait_for_state(kubectl, node, name, "Ready")
        return name

    yield add
    for name in made:
        kubectl.run("delete", "kvcachepool", name, "--ignore-not-found", "--timeout=180s")


@pytest.fixture
def start(local_cluster, kubectl, namespace):
    """Start a pod with a script and a pool; return kubectl for its namespace."""
    inside = kubectl.within(namespace)

    def start(name: str, pool: str, script: str, *, node: str = "node1"):
        inside.apply(pod_with_pool(name, pool=pool, image=local_cluster.busybox, script=script, node=node))
        return inside

    return start


def run(start, name: str, pool: str, script: str) -> str:
    """Run a pod to its successful end, and return what it wrote."""
    inside = start(name, pool, script)
    ended = inside.wait_for_phase(name, "Succeeded", "Failed", limit_s=pools.PATIENCE_S)
    assert ended["status"]["phase"] == "Succeeded", inside.logs(name)
    said = inside.logs(name)
    inside.delete("pod", name)
    return said


def test_while_a_disk_is_not_mounted_pods_run_without_the_pool_or_wait_for_it_and_nothing_is_written_below(
    add_disk, add_pool, nodes, kubectl, start
):
    disk = add_disk(1)
    pool = add_pool(pool_named("degrade"), "node1")
    blocking = add_pool(pool_named("block", storage={"onUnavailable": "Block"}), "node1")
    run(start, "before", pool, "echo kept > /pool/said")
    disk.unmount()
    for name in (pool, blocking):
        told = pools.wait_for_state(kubectl, "node1", name, "NotReady", reason="DiskNotMounted")
        assert disk.point in told["message"]
    pools.wait_for_condition(kubectl, pool, "Ready", "False", reason="NotEnoughNodes")
    said = run(start, "without", pool, f"cat /pool/{MARKER}; ls /pool; ! touch /pool/x 2>/dev/null")
    assert "DiskNotMounted" in said
    assert said.endswith(f"\n{MARKER}\n")
    inside = start("waiting", blocking, "touch /pool/started")
    pools.wait_for_event(inside, "waiting", "DiskNotMounted")
    assert inside.get("pod", "waiting")["status"]["phase"] == "Pending"
    assert nodes[0].sandbox.run("find", disk.point) == f"{disk.point}\n"
    disk.mount()
    for name in (pool, blocking):
        pools.wait_for_state(kubectl, "node1", name, "Ready")
    pools.wait_for_condition(kubectl, pool, "Ready", "True")
    assert run(start, "after", pool, "cat /pool/said") == "kept\n"
    inside.wait_for_phase("waiting", "Succeeded", limit_s=pools.PATIENCE_S)


def test_a_disk_that_is_read_only_or_full_is_told_its_blocks_can_be_read_and_it_goes_on_by_itself(
    add_disk, add_pool, kubectl, start
):
    disk = add_disk(1)
    pool = add_pool(pool_named("hurt"), "node1")
    run(start, "before", pool, "echo kept > /pool/said")
    for reason, hurt, heal in (
        ("DiskReadOnly", lambda: disk.set_read_only(True), lambda: disk.set_read_only(False)),
        ("DiskFull", disk.fill, disk.empty),
    ):
        hurt()
        told = pools.wait_for_state(kubectl, "node1", pool, "NotReady", reason=reason)
        assert disk.point in told["message"]
        pools.wait_for_condition(kubectl, pool, "NodesReady", "False", reason=reason)
        assert run(start, reason.lower(), pool, "cat /pool/said") == "kept\n"
        heal()
        pools.wait_for_state(kubectl, "node1", pool, "Ready")
    assert run(start, "after", pool, "echo more >> /pool/said; cat /pool/said") == "kept\nmore\n"


def test_a_blank_disk_in_place_of_the_pools_is_prepared_anew(add_disk, add_pool, kubectl, start):
    disk = add_disk(1)
    pool = add_pool(pool_named("blank"), "node1")
    run(start, "before", pool, "echo lost > /pool/said")
    before = pools.entry(kubectl, "node1", pool)["generation"]
    disk.unmount()
    pools.wait_for_state(kubectl, "node1", pool, "NotReady", reason="DiskNotMounted")
    disk.format()
    disk.mount()
    after = pools.wait_for_state(kubectl, "node1", pool, "Ready")
    assert after["generation"] == before + 1
    assert run(start, "after", pool, "ls /pool; ! cat /pool/said 2>/dev/null") != ""


@pytest.fixture
def disk_pressure(local_cluster, nodes):
    """The second node's kubelet finds too little room on its own disk: it evicts, and takes critical pods only."""
    node = nodes[1]
    configuration = node.state / "kubelet.yaml"
    text = configuration.read_text()
    assert "nodefs.available: 1%" in text

    def restart(text: str) -> None:
        configuration.write_text(text)
        node.stop_kubelet()
        node.start_kubelet()

    restart(text.replace("nodefs.available: 1%", "nodefs.available: 99%"))
    yield
    restart(text)
    wait_for("the pressure to end", lambda: not has_pressure(local_cluster.kubectl), limit_s=180)
    local_cluster.load(local_cluster.state / "busybox.tar", local_cluster.busybox)  # kubelet has removed what it could


def has_pressure(kubectl) -> bool:
    node = kubectl.get("node", "node2")
    conditions = {row["type"]: row["status"] for row in node["status"]["conditions"]}
    taints = {row["key"] for row in node["spec"].get("taints", [])}
    return conditions["DiskPressure"] == "True" or "node.kubernetes.io/disk-pressure" in taints


def critical(body: Object) -> Object:
    """Return a pod that kubelet keeps under pressure."""
    extra = {"priorityClassName": "system-node-critical", "tolerations": [{"operator": "Exists"}]}
    return {**body, "spec": {**body["spec"], **extra}}


def test_under_disk_pressure_the_agent_stays_and_starts_again_and_the_pool_is_served(
    add_disk, add_pool, start, kubectl, namespace, local_cluster, request
):
    add_disk(2)
    pool = add_pool(pool_named("pressed"), "node2")
    inside = start("victim", pool, "sleep 600", node="node2")
    # Images that a running container needs are not removed.
    for name, image in (("keeps-agents", local_cluster.image("sidecar")), ("keeps-busybox", local_cluster.busybox)):
        inside.apply(critical(pod_with_pool(name, pool=pool, image=image, script="sleep 600", node="node2")))
    for name in ("victim", "keeps-agents", "keeps-busybox"):
        inside.wait_for_phase(name, "Running", limit_s=180)
    agents = kubectl.within(AGENT_NAMESPACE)
    former = agent_on(agents, "node2")
    request.getfixturevalue("disk_pressure")
    wait_for("the pressure", lambda: has_pressure(kubectl), limit_s=180)
    ended = inside.wait_for_phase("victim", "Failed", limit_s=pools.PATIENCE_S)
    assert ended["status"]["reason"] == "Evicted"
    assert agent_on(agents, "node2") == former
    agents.delete("pod", former)
    wait_for("another agent on the node", lambda: agent_on(agents, "node2") != former, limit_s=120)
    pools.wait_for_agents(kubectl)
    pools.wait_for_state(kubectl, "node2", pool, "Ready")
    body = pod_with_pool("late", pool=pool, image=local_cluster.busybox, script="ls /pool", node="node2")
    inside.apply(critical(body))
    inside.wait_for_phase("late", "Succeeded", limit_s=180)
    assert "pool.json" in inside.logs("late")
    assert has_pressure(kubectl)


def agent_on(agents, node: str) -> str:
    """Return the name of the pod of a node's agent."""
    names = [pod["metadata"]["name"] for pod in agents.list("pods") if pod["spec"].get("nodeName") == node]
    if len(names) != 1:
        raise NotYetError(f"agents on {node}: {names}")
    return str(names[0])


class Absence:
    """The second node's: silent is all that keeps it in the cluster, kubelet and node agent; its other pods run on."""

    def __init__(self, node: Node) -> None:
        self._node, self.is_on = node, False

    def begin(self) -> None:
        self._node.stop_kubelet()
        self.is_on = True
        self._node.sandbox.run("pkill", "-KILL", "-f", "pykvcache-sidecar node")  # sees processes of this node only

    def end(self) -> None:
        self._node.start_kubelet()
        self.is_on = False


@pytest.fixture
def absence(local_cluster, nodes):
    absence = Absence(nodes[1])
    yield absence
    if absence.is_on:
        absence.end()
    local_cluster.kubectl.run("wait", "--for=condition=Ready", "node/node2", "--timeout=90s")


@pytest.mark.parametrize("how", ["its kubelet is silent", "its Node is deleted"])
def test_a_deletion_does_not_wait_for_a_lost_node_which_erases_its_part_when_it_is_back(
    how, add_disk, add_pool, start, kubectl, absence
):
    first, second = add_disk(1), add_disk(2)
    pool = add_pool(pool_named("lost"), "node1", "node2")
    inside = start("stranded", pool, "echo kept > /pool/said; sleep 600", node="node2")
    inside.wait_for_phase("stranded", "Running", limit_s=180)
    wait_for("the pod to have written", lambda: any(path.endswith("/said") for path in second.find()))
    absence.begin()
    if how == "its Node is deleted":
        kubectl.delete("node", "node2")
        pools.wait_until_gone(kubectl, "kvcachenode", "node2")
    kubectl.delete("kvcachepool", pool, wait=False)
    pools.wait_until_gone(kubectl, "kvcachepool", pool, limit_s=180)
    assert first.find() == []
    assert any(path.endswith("/said") for path in second.find())
    if how == "its kubelet is silent":
        pools.wait_for_event(kubectl, pool, "node2")
    absence.end()
    wait_for("the agent to be back", lambda: kubectl.get("kvcachenode", "node2"), limit_s=120)
    inside.delete("pod", "stranded")
    wait_for("the pool to be erased there", lambda: not second.find(), limit_s=pools.PATIENCE_S)


def profile_of(kubectl, pool: str) -> Object:
    """Return what the operator tells of a pool's measurement on the first node."""
    rows = kubectl.get("kvcachenode", "node1")["status"].get("profiles", [])
    for row in rows:
        if row["pool"] == pool:
            return dict(row)
    raise NotYetError(f"profiles: {rows}")


def wait_for_profile(kubectl, pool: str, state: str, *, limit_s: float) -> Object:
    """Wait until a measurement is in a state; meanwhile the pool must never stop to be Ready."""

    def probe() -> Object:
        assert pools.entry(kubectl, "node1", pool)["state"] == "Ready"
        profile = profile_of(kubectl, pool)
        if profile["state"] != state:
            raise NotYetError(str(profile))
        return profile

    return wait_for(f"the profile of {pool} to be {state}", probe, limit_s=limit_s, every_s=0.5)


def measuring_pod(kubectl, *former: str) -> str:
    """Return the name of the pod that measures, and runs."""
    jobs = kubectl.within(NAMESPACE)
    found = jobs.list("pods", selector="app.kubernetes.io/component=calibration")
    states = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in found}
    for name, phase in states.items():
        if phase == "Running" and name not in former:
            return str(name)
    raise NotYetError(f"pods that measure: {states}")


MEASURED = {"calibration": {"enabled": True}, "diskSelector": {"minSize": "2Gi"}}


def test_an_evicted_measurement_is_made_by_another_pod(add_disk, add_pool, kubectl):
    add_disk(1, size="3G")
    pool = add_pool(pool_named("evicted", **MEASURED), "node1")
    name = wait_for("a measurement", lambda: measuring_pod(kubectl), limit_s=180)
    assert profile_of(kubectl, pool)["state"] == "Running"
    eviction = (
        f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{name}","namespace":"{NAMESPACE}"}}}}'
    )
    kubectl.run("create", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", "-f", "-", text=eviction)
    wait_for("another pod that measures", lambda: measuring_pod(kubectl, name), limit_s=120)
    profile = wait_for_profile(kubectl, pool, "Measured", limit_s=120)
    assert profile["readBytesPerSecond"] > MIB


def test_a_measurement_that_is_killed_again_and_again_is_told_tried_later_and_never_unreadies_the_pool(
    add_disk, add_pool, nodes, kubectl
):
    add_disk(1, size="3G")
    pool = add_pool(pool_named("killed", **MEASURED), "node1")

    def killed() -> Object:
        with suppress(NotYetError):  # there is none just now
            nodes[0].sandbox.run("pkill", "-KILL", "-f", "pykvcache calibrate storage")
        return wait_for_profile(kubectl, pool, "Failed", limit_s=0)

    wait_for("a measurement", lambda: measuring_pod(kubectl), limit_s=180)
    failed = wait_for("the measurement to have failed", killed, limit_s=240)
    assert (failed["reason"], failed["failures"]) == ("Crashed", 1)
    assert "137" in failed["message"]
    assert failed["nextAttempt"]
    told = pools.wait_for_condition(kubectl, pool, "Calibrated", "False", reason="Crashed")
    assert "137" in told["message"]
    pools.wait_for_condition(kubectl, pool, "Ready", "True")
    measured = wait_for_profile(kubectl, pool, "Measured", limit_s=240)
    assert measured["readBytesPerSecond"] > MIB
    assert not measured.get("failures")
    pools.wait_for_condition(kubectl, pool, "Calibrated", "True")
