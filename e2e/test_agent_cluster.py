"""A pool as the README's Kubernetes part has it, and what pods see of it, on a real node with a real disk."""

import json

import pytest

from harness import pools
from harness.chart import Installation
from harness.kubectl import Object
from harness.pools import Disk, pod_with_pool, pool_named
from harness.settings import REPOSITORY
from harness.waiting import NotYetError, wait_for

# The first test also builds images and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
EXAMPLE = (REPOSITORY / "examples" / "nodelocal.yaml").read_text()
# Test machines have no NVMe of 500 GiB.
SMALLER = {"400Gi": "1Gi", "50Gi": "512Mi", "500Gi": "2Gi", "NVMe": "Other"}
MIB = 1 << 20
WRITE_ON = "while true; do echo on >> /pool/said; sleep 0.1; done"
# Forty blocks of 1 MiB, counted before they are there, as a connector does: the agent counts at the same time.
STORE_BLOCKS = """
import os
from pathlib import Path
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_storage.pool import open_pool
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.testing.blocks import publish
from pykvcache_storage.usage import Reserved, UsageLedger

fingerprint = fingerprint_of({"model": "made by a test"})
open_pool("/pool", create=True).prepare_fingerprint(fingerprint, {"model": "made by a test"})
ledger = UsageLedger("/pool")
ledger.recount(lambda: count_bytes("/pool"))
for number in range(40):
    payload = os.urandom((1 << 20) - 4096)
    key = BlockKey(fingerprint, bytes([number]) * 32, 0, 0)
    assert ledger.reserve(1 << 20, capacity_bytes=1 << 30) is Reserved.TAKEN
    publish(Path("/pool"), key, payload)
"""


@pytest.fixture(scope="module")
def installation(local_cluster, settings):
    """The chart, as the README installs it."""
    chart = Installation(local_cluster, cache=settings.cache)
    try:
        chart.install()
        yield chart
    finally:
        chart.remove()


@pytest.fixture(scope="module")
def disk(local_cluster):
    """A disk of the first node, large enough to be measured."""
    disk = Disk(local_cluster.nodes[0], "/mnt/pykvcache-e2e", size="3G")
    try:
        disk.attach()
        yield disk
    finally:
        disk.remove()


@pytest.fixture
def make_pool(installation, disk, kubectl):
    """Make a pool from its manifest, wait until the first node has it, and delete it after the test."""
    made = []

    def make(manifest: Object) -> str:
        name = manifest["metadata"]["name"]
        kubectl.apply(manifest)
        made.append(name)
        pools.wait_for_state(kubectl, "node1", name, "Ready")
        return name

    yield make
    for name in made:
        kubectl.run("delete", "kvcachepool", name, "--ignore-not-found", "--timeout=180s")


@pytest.fixture
def other(kubectl, namespace):
    """A second namespace."""
    name = f"{namespace[:50]}-b"
    kubectl.make_namespace(name)
    yield kubectl.within(name)
    kubectl.delete("namespace", name, wait=False)


@pytest.fixture
def start(local_cluster, kubectl, namespace):
    """Start a pod on the first node, with a script and a pool."""

    def start(name: str, pool: str, script: str, *, image: str = local_cluster.busybox, inside=None):
        inside = inside or kubectl.within(namespace)
        inside.apply(pod_with_pool(name, pool=pool, image=image, script=script, node="node1"))
        return inside

    return start


@pytest.mark.short
def test_the_readme_holds_nodes_are_ready_and_measured_pods_find_what_their_namespace_wrote_and_deletion_leaves_nothing(
    installation, disk, kubectl, namespace, other, start
):
    text = EXAMPLE
    for word, smaller in SMALLER.items():
        assert word in text
        text = text.replace(word, smaller)
    kubectl.apply(text)
    pools.wait_for_condition(kubectl, "default", "Ready", "True")
    for name, found in (("first", ""), ("second", "one\n")):
        inside = start(name, "default", "cat /pool/said 2>/dev/null; echo one >> /pool/said")
        ended = inside.wait_for_phase(name, "Succeeded", "Failed", limit_s=180)
        assert ended["status"]["phase"] == "Succeeded", inside.logs(name)
        assert inside.logs(name) == found
        inside.delete("pod", name)
    start("other", "default", "ls -a /pool", inside=other)
    other.wait_for_phase("other", "Succeeded", limit_s=180)
    told = other.logs("other")
    assert "said" not in told
    assert "pool.json" in told

    pools.wait_for_condition(kubectl, "default", "Calibrated", "True", limit_s=400)
    row, listed = wait_for("an unchanging moment", lambda: told_and_listed(kubectl))
    assert (row["nodes"], row["capacity"]) == ("1/1", "1.0 GiB")
    assert row["readBytesPerSecond"]["min"] > MIB
    for shown in ("kvcachepool.pykvcache.io/default", "kvcachenode.pykvcache.io/node1", "1/1", "1.0 GiB", row["read"]):
        assert shown in listed
    assert row["used"] in listed
    profile = measured(kubectl)
    assert profile["readBytesPerSecond"] == row["readBytesPerSecond"]["min"]
    files = [f"{disk.pools}/default/ns/{name}/profiles/storage.json" for name in (namespace, other.namespace)]

    def handed_on() -> bool:
        kept = [json.loads(disk.read(file)) for file in files]
        return all(document["readBytesPerSecond"] == profile["readBytesPerSecond"] for document in kept)

    wait_for("the measurement to reach the pool's directories", handed_on, limit_s=120)
    kubectl.run("delete", "-f", "-", "--timeout=180s", text=text)
    assert disk.find() == []


def told_and_listed(kubectl) -> tuple[Object, str]:
    """Return the pool's status and how kubectl lists it; NotYetError if the one changed beside the other."""
    before = kubectl.get("kvcachepool", "default")["status"]
    listed = kubectl.run("get", "kvcachepools,kvcachenodes")
    after = kubectl.get("kvcachepool", "default")["status"]
    if before != after:
        raise NotYetError(f"{before}, then {after}")
    return before, listed


def measured(kubectl) -> Object:
    profiles = kubectl.get("kvcachenode", "node1")["status"]["profiles"]
    (found,) = [row for row in profiles if row["pool"] == "default"]
    return found


def lines_of(inside, name: str) -> int:
    """Return how often a pod that runs WRITE_ON has written."""
    return int(inside.exec(name, "wc", "-l", "/pool/said").split()[0])


def wait_for_more(inside, name: str) -> None:
    """Wait until such a pod has written again."""
    before = lines_of(inside, name)
    wait_for(f"{name} to write on", lambda: lines_of(inside, name) > before, limit_s=120)


def test_pods_that_start_or_end_while_the_agent_is_away_wait_for_it_and_no_mount_stays(
    make_pool, local_cluster, kubectl, start
):
    node = local_cluster.nodes[0]
    name = make_pool(pool_named("away"))
    inside = start("ending", name, WRITE_ON)
    inside.wait_for_phase("ending", "Running", limit_s=180)
    pools.send_agents_away(kubectl)
    try:
        wait_for_more(inside, "ending")
        start("starting", name, "touch /pool/started")
        uid = inside.get("pod", "ending")["metadata"]["uid"]
        inside.delete("pod", "ending", wait=False)
        pools.wait_for_event(inside, "starting", f"{pools.DRIVER} not found")
        wait_for(
            "kubelet to have tried to unmount",
            lambda: any(
                uid in line and "TearDown failed" in line
                for line in (node.state / "log/kubelet").read_text().splitlines()
            ),
            limit_s=180,
        )
        assert inside.get("pod", "starting")["status"]["phase"] == "Pending"
        assert inside.get("pod", "ending")["metadata"]["deletionTimestamp"]
        assert len(pools.volumes_of(node.sandbox)) == 1
    finally:
        pools.call_agents_back(kubectl)
    pools.wait_until_gone(inside, "pod", "ending", limit_s=pools.PATIENCE_S)
    inside.wait_for_phase("starting", "Succeeded", limit_s=pools.PATIENCE_S)
    inside.delete("pod", "starting")
    assert pools.volumes_of(node.sandbox) == []


def test_a_pool_that_is_deleted_while_a_pod_mounts_it_stays_until_the_pod_ends(make_pool, disk, kubectl, start):
    name = make_pool(pool_named("held"))
    inside = start("holder", name, WRITE_ON)
    inside.wait_for_phase("holder", "Running", limit_s=180)
    kubectl.delete("kvcachepool", name, wait=False)
    pools.wait_for_condition(kubectl, name, "Deleting", "True", reason="InUse")
    pools.wait_for_state(kubectl, "node1", name, "Deleting", reason="InUse")
    wait_for_more(inside, "holder")
    start("late", name, f"cat /pool/{pools.MARKER}; ! touch /pool/x")
    inside.wait_for_phase("late", "Succeeded", limit_s=180)
    assert "is being deleted" in inside.logs("late")
    assert kubectl.find("kvcachepool", name)
    inside.delete("pod", "holder")
    pools.wait_until_gone(kubectl, "kvcachepool", name)
    assert disk.find() == []


def test_force_takes_a_pool_away_from_a_pod_that_runs_on_and_ends_cleanly(
    make_pool, disk, local_cluster, kubectl, start
):
    name = make_pool(pool_named("forced"))
    inside = start("holder", name, "while true; do echo on >> /pool/said; sleep 0.1; done 2>/dev/null")
    inside.wait_for_phase("holder", "Running", limit_s=180)
    kubectl.delete("kvcachepool", name, wait=False)
    pools.wait_for_condition(kubectl, name, "Deleting", "True", reason="InUse")
    kubectl.patch("kvcachepool", name, {"metadata": {"annotations": {"pykvcache.io/force-delete": "true"}}})
    pools.wait_until_gone(kubectl, "kvcachepool", name)
    wait_for("its files to be gone", lambda: not disk.find(), limit_s=120)
    assert inside.exec("holder", "ls", "-A", "/pool") == ""
    assert inside.get("pod", "holder")["status"]["phase"] == "Running"
    inside.delete("pod", "holder")
    assert pools.volumes_of(local_cluster.nodes[0].sandbox) == []


def test_a_capacity_that_is_lowered_is_kept_while_the_pod_runs_on(make_pool, disk, local_cluster, kubectl, start):
    manifest = pool_named("lowered")
    name = make_pool(manifest)
    script = f"python3 -c '{STORE_BLOCKS}' && touch /pool/stored; {WRITE_ON}"
    inside = start("storing", name, script, image=local_cluster.image("sidecar"))
    inside.wait_for_phase("storing", "Running", limit_s=180)
    wait_for("the blocks to be stored", lambda: inside.exec("storing", "ls", "/pool/stored"), limit_s=120)
    assert blocks_of(disk) == 40
    manifest["spec"]["storage"]["capacityPerNode"] = "16Mi"
    kubectl.apply(manifest)
    wait_for("blocks to be evicted", lambda: 0 < blocks_of(disk) < 16, limit_s=120)
    wait_for("the new capacity to be told", lambda: told(kubectl, name) == (16 * MIB, True), limit_s=120)
    wait_for_more(inside, "storing")
    assert inside.get("pod", "storing")["status"]["containerStatuses"][0]["restartCount"] == 0


def blocks_of(disk) -> int:
    return sum(path.endswith(".kvb") for path in disk.find())


def told(kubectl, name: str) -> tuple[int, bool]:
    """Return which capacity the operator tells of a pool, and whether what is used is within it."""
    status = kubectl.get("kvcachepool", name)["status"]
    return status["capacityBytes"], 0 < status["usedBytes"] <= status["capacityBytes"]


def test_a_pod_whose_namespace_may_not_use_the_pool_waits_with_an_event_that_says_so_until_it_may(
    make_pool, kubectl, namespace, other, start
):
    name = make_pool(pool_named("private", allowedNamespaces={"names": [namespace]}))
    start("stranger", name, "touch /pool/started", inside=other)
    text = f"namespace {other.namespace} may not mount KVCachePool private: add it to spec.allowedNamespaces"
    pools.wait_for_event(other, "stranger", text)
    stranger = other.get("pod", "stranger")["status"]
    assert stranger["phase"] == "Pending"
    assert stranger["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
    inside = start("friend", name, "ls /pool")
    inside.wait_for_phase("friend", "Succeeded", limit_s=180)
    kubectl.patch("kvcachepool", name, {"spec": {"allowedNamespaces": {"names": [namespace, other.namespace]}}})
    other.wait_for_phase("stranger", "Succeeded", limit_s=pools.PATIENCE_S)
