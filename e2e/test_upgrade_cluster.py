"""The previous version side by side with this one: an upgrade under pods that run, and the way back."""

import json

import pytest

from harness import images, pools, vllm_image, vllm_pods
from harness.chart import NAMESPACE, RELEASE, Installation
from harness.injection import has_bundle, labelled, pool_on_disk, restricted
from harness.previous import Previous
from harness.vllm_pods import INJECTION, Servers, is_ready, prompts
from harness.waiting import wait_for

# The first test also builds images of two versions, and a large one, and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
POOL = "default"


@pytest.fixture
def previous(local_cluster, settings):
    return Previous(local_cluster, settings.cache)


@pytest.fixture
def installation(local_cluster, settings, previous, kubectl):
    """This version's chart, not installed; the previous one is."""
    local_cluster.load(vllm_image.build(settings.cache), vllm_image.name())
    chart = Installation(local_cluster, cache=settings.cache)
    try:
        chart.remove()
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
        previous.install(chart.helm)
        yield chart
    finally:
        chart.remove()


@pytest.fixture
def pool(installation, local_cluster):
    """A pool with nothing that the previous version does not know."""
    with pool_on_disk(local_cluster, POOL, {}):
        yield POOL


def test_versions_read_each_others_blocks_and_pods_and_pools_outlive_an_upgrade_and_the_way_back(
    installation, pool, previous, kubectl, namespace, local_cluster
):
    inside = restricted(kubectl, namespace)
    servers = Servers(inside, local_cluster.nodes[0])
    inside.apply(previous.vllm_pod("old", pool=pool))
    servers.wait_until_ready(1)
    ours, theirs = prompts(seed=1), prompts(seed=2)
    expected = servers.fill("old", ours)
    uid = kubectl.get("kvcachepool", pool)["metadata"]["uid"]

    installation.upgrade()
    wait_for("the webhook to be trusted", lambda: has_bundle(kubectl), limit_s=120)
    kubectl.patch("kvcachepool", pool, {"spec": INJECTION})
    pools.wait_for_state(kubectl, "node1", pool, "Ready")
    servers.find("old", ours, expected)
    inside.apply(vllm_pods.pod("new", pool=pool, node="node1"))
    servers.wait_until_ready(2)
    assert versions_of(inside, "old", "new") == ["", images.local_name("connector")]
    servers.find("new", ours, expected)
    more = servers.fill("new", theirs)
    servers.find("old", theirs, more)

    installation.helm.run("rollback", RELEASE, "1", "--wait", "--timeout=180s")
    pools.wait_for_agents(kubectl)
    pools.wait_for_state(kubectl, "node1", pool, "Ready")
    pools.wait_for_condition(kubectl, pool, "Ready", "True")
    assert kubectl.get("kvcachepool", pool)["metadata"]["uid"] == uid
    for pod in ("old", "new"):
        servers.find(pod, [*ours, *theirs], [*expected, *more])
    assert [is_ready(found) for found in servers.pods()] == [True, True]
    assert [row["restartCount"] for found in servers.pods() for row in found["status"]["containerStatuses"]] == [0, 0]
    inside.apply(labelled("plain", pool=pool, image=local_cluster.busybox, script="true"))
    assert "pykvcache" not in json.dumps(inside.get("pod", "plain")["spec"])


def versions_of(inside, *pods: str) -> list[str]:
    """Return the image of each pod's injected library; "" for one that was not injected."""
    found = [inside.get("pod", name) for name in pods]
    libraries = [pod["spec"]["initContainers"][0]["image"] for pod in found]
    injected = ["pykvcache.io/injected" in pod["metadata"].get("annotations", {}) for pod in found]
    return [name if is_injected else "" for name, is_injected in zip(libraries, injected, strict=True)]
