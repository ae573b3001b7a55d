"""The chart on a cluster that runs pods: it becomes ready, tests itself, is upgraded and removed, in this order."""

import pytest

from harness import pools
from harness.chart import AGENT_NAMESPACE, NAMESPACE, OURS, Installation
from harness.helm import HelmError
from harness.pools import Disk, pod_with_pool, pool_named
from harness.waiting import NotYetError, wait_for

# The first test also builds images and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LABEL = "pykvcache.io/pool."
VALUES = {"agent.allowRootFilesystem": True}  # test machines have one disk
POOL = {
    "apiVersion": "pykvcache.io/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "chart"},
    "spec": {"storage": {"type": "Ephemeral", "capacity": "1Gi"}},
}


@pytest.fixture(scope="module")
def installation(cluster, settings):
    chart = Installation(cluster, cache=settings.cache)
    chart.install(VALUES)  # what fails stays, to be looked at
    yield chart
    chart.remove()


def is_ready(pool):
    conditions = pool.get("status", {}).get("conditions", [])
    return any((row["type"], row["status"]) == ("Ready", "True") for row in conditions)


def test_its_own_test_passes(installation):
    told = installation.helm.run("test", "py-kvcache", "--logs", "--timeout=150s")
    assert "ok: a node agent tells about its node" in told


def test_the_agent_of_each_node_registers_the_csi_driver(installation, kubectl):
    for node in kubectl.list("nodes"):
        name = node["metadata"]["name"]
        kubectl.wait_for(
            "kvcachenode", name, lambda row: row.get("status", {}).get("agentVersion"), "told by its agent"
        )
        kubectl.wait_for("csinode", name, has_driver, "with the driver csi.pykvcache.io")


def is_told(node):
    return node.get("status", {}).get("agentVersion")


def has_driver(node):
    return "csi.pykvcache.io" in [row["name"] for row in node["spec"].get("drivers") or []]


def test_an_upgrade_keeps_pools_and_leaves_one_active_operator(installation, kubectl):
    kubectl.apply(POOL)
    before = kubectl.wait_for("kvcachepool", "chart", is_ready, "to be Ready")["metadata"]["uid"]
    installation.upgrade(
        {"agent.allowRootFilesystem": True, "operator.replicas": 2, "metrics.scrapeAnnotations": False}
    )
    after = kubectl.wait_for("kvcachepool", "chart", is_ready, "to be Ready")
    assert after["metadata"]["uid"] == before
    installation.helm.run("test", "py-kvcache", "--timeout=150s")


@pytest.fixture
def disk(local_cluster):
    """A disk of the first node."""
    disk = Disk(local_cluster.nodes[0], "/mnt/pykvcache-e2e", size="256M")
    try:
        disk.attach()
        yield disk
    finally:
        disk.remove()


def test_a_chart_that_is_removed_before_its_pools_leaves_their_data_and_adopts_them_when_it_is_installed_again(
    installation, disk, local_cluster, kubectl, namespace
):
    inside, image = kubectl.within(namespace), local_cluster.busybox
    kubectl.apply(pool_named("adopted"), pool_named("doomed"))
    for pool in ("adopted", "doomed"):
        pools.wait_for_state(kubectl, "node1", pool, "Ready")
        inside.apply(pod_with_pool(pool, pool=pool, image=image, script="echo kept > /pool/said", node="node1"))
        inside.wait_for_phase(pool, "Succeeded", limit_s=180)
        inside.delete("pod", pool)
    uid = kubectl.get("kvcachepool", "adopted")["metadata"]["uid"]
    inside.apply(pod_with_pool("lasting", pool="adopted", image=image, script="sleep 600", node="node1"))
    inside.wait_for_phase("lasting", "Running", limit_s=180)
    installation.uninstall()
    assert {f"{disk.pools}/{name}/ns/{namespace}/said" for name in ("adopted", "doomed")} <= set(disk.find())
    kubectl.delete("kvcachepool", "doomed", wait=False)
    inside.delete("pod", "lasting", wait=False)
    installation.install_again(VALUES)
    pools.wait_until_gone(kubectl, "kvcachepool", "doomed")
    pools.wait_until_gone(inside, "pod", "lasting", limit_s=pools.PATIENCE_S)
    pools.wait_for_state(kubectl, "node1", "adopted", "Ready")
    assert kubectl.get("kvcachepool", "adopted")["metadata"]["uid"] == uid
    inside.apply(pod_with_pool("reader", pool="adopted", image=image, script="cat /pool/said", node="node1"))
    inside.wait_for_phase("reader", "Succeeded", limit_s=pools.PATIENCE_S)
    assert inside.logs("reader") == "kept\n"
    inside.delete("pod", "reader")
    assert [path for path in disk.find() if path.startswith(f"{disk.pools}/doomed")] == []
    kubectl.delete("kvcachepool", "adopted")


def test_an_uninstall_after_the_pools_leaves_nothing_on_nodes_but_what_retain_keeps(
    installation, disk, local_cluster, kubectl
):
    kubectl.apply(pool_named("erased"), pool_named("kept", deletionPolicy="Retain"))
    for pool in ("erased", "kept"):
        pools.wait_for_state(kubectl, "node1", pool, "Ready")
        kubectl.wait_for(
            "node", "node1", lambda node, pool=pool: f"{LABEL}{pool}" in ours_of(node), "to have the label"
        )
    for pool in ("erased", "kept"):
        kubectl.delete("kvcachepool", pool)
    installation.uninstall()
    assert ours_of(kubectl.get("node", "node1")) == []
    assert {path.split("/")[4] for path in disk.find()} == {"kept"}
    assert f"{disk.pools}/kept/node.json" in disk.find()
    kubectl.wait_for("csinode", "node1", lambda node: not has_driver(node), "without the driver")
    root = local_cluster.kubelet_root
    left = local_cluster.nodes[0].sandbox.run(
        "find", f"{root}/plugins_registry", f"{root}/plugins", "-name", "*pykvcache*"
    )
    assert left.split() == [f"{root}/plugins/{pools.DRIVER}"]
    kinds = "pods,daemonsets,deployments,clusterroles,clusterrolebindings,csidrivers,validatingadmissionpolicies"
    assert kubectl.run("get", kinds, "--all-namespaces", "-l", OURS, "-o", "name") == ""
    wait_for(
        "the agents' namespace to be gone", lambda: kubectl.find("namespace", AGENT_NAMESPACE) is None, limit_s=180
    )
    installation.install_again(VALUES)


def ours_of(node) -> list[str]:
    """Return the names of all labels and annotations of a node that are ours, and the driver's."""
    metadata = node["metadata"]
    names = [*metadata.get("labels", {}), *metadata.get("annotations", {})]
    return [name for name in names if "pykvcache.io/" in name] + [
        name for name, value in metadata.get("annotations", {}).items() if pools.DRIVER in value
    ]


def test_an_uninstall_leaves_crds_and_pools_only(installation, kubectl):
    kubectl.apply(POOL)
    kubectl.wait_for("kvcachepool", "chart", is_ready, "to be Ready")
    installation.uninstall()
    assert kubectl.get("kvcachepool", "chart")

    def nothing_left():
        kinds = "pods,daemonsets,deployments,clusterroles,csidrivers,validatingadmissionpolicies,namespaces"
        if left := kubectl.run("get", kinds, "--all-namespaces", "-l", OURS, "-o", "name").split():
            raise NotYetError(f"left: {left}")
        return True

    wait_for("everything else to be gone", nothing_left, limit_s=180)
    assert kubectl.find("namespace", AGENT_NAMESPACE) is None


def test_a_clean_up_that_is_too_late_uninstalls_nothing_and_can_be_repeated(installation, kubectl):
    installation.install(VALUES | {"cleanupOnUninstall": True, "cleanupTimeoutSeconds": 10})
    kubectl.apply(POOL, POOL | {"metadata": {"name": "held", "finalizers": ["example.org/held"]}})
    try:
        with pytest.raises(HelmError, match="still there: held; nothing was uninstalled"):
            installation.helm.run("uninstall", "py-kvcache", "--timeout=90s")
        assert [pool["metadata"]["name"] for pool in kubectl.list("kvcachepools")] == ["held"]
        assert kubectl.within(NAMESPACE).get("deployment", "pykvcache-operator")["status"]["readyReplicas"] == 1
    finally:
        kubectl.patch("kvcachepool", "held", {"metadata": {"finalizers": None}})
    installation.uninstall()
    assert kubectl.list("kvcachepools") == []
    assert kubectl.within(NAMESPACE).find("deployment", "pykvcache-operator") is None
