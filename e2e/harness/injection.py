"""What tests of injected pods share: the chart with its webhook at work, a pool on a disk, a strict namespace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import pools, vllm_image
from harness.chart import Installation
from harness.cluster import LocalCluster
from harness.kubectl import Kubectl, Object
from harness.pools import Disk, pool_named
from harness.settings import Settings
from harness.vllm_pods import INJECTION
from harness.waiting import wait_for

WEBHOOK = "pykvcache-webhook"
DISK = "/mnt/pykvcache-e2e"


@contextmanager
def installed(cluster: LocalCluster, settings: Settings, *, with_vllm: bool = True) -> Iterator[Installation]:
    """Install the chart, beside it vLLM's image, and wait until the webhook is asked about pods; then remove it."""
    chart = Installation(cluster, cache=settings.cache)
    try:
        if with_vllm:
            cluster.load(vllm_image.build(settings.cache), vllm_image.name())
        chart.install()
        wait_for("the webhook to be trusted", lambda: has_bundle(cluster.kubectl), limit_s=120)
        yield chart
    finally:
        chart.remove()


def has_bundle(kubectl: Kubectl) -> bool:
    """Whether API servers can check the webhook's certificate."""
    (webhook,) = kubectl.get("mutatingwebhookconfiguration", WEBHOOK)["webhooks"]
    return bool(webhook["clientConfig"].get("caBundle"))


@contextmanager
def pool_on_disk(cluster: LocalCluster, name: str, spec: Object = INJECTION) -> Iterator[Disk]:
    """Make a pool on a disk of the first node, and delete it unless that was done."""
    disk = Disk(cluster.nodes[0], DISK, size="512M")
    try:
        disk.attach()
        cluster.kubectl.apply(pool_named(name, **spec))
        pools.wait_for_state(cluster.kubectl, "node1", name, "Ready")
        yield disk
        cluster.kubectl.run("delete", "kvcachepool", name, "--ignore-not-found", "--timeout=180s")
    finally:
        disk.remove()


def ephemeral(name: str, *, capacity: str = "512Mi") -> Object:
    """Return a pool that lives in its pods."""
    storage = {"type": "Ephemeral", "capacity": capacity}
    return {**pool_named(name), "spec": {"storage": storage, **INJECTION}}


def restricted(kubectl: Kubectl, namespace: str) -> Kubectl:
    """Put a namespace under Pod Security `restricted`, and return kubectl for it."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.patch("namespace", namespace, {"metadata": {"labels": labels}})
    return kubectl.within(namespace)


def take_pool_away(kubectl: Kubectl, pool: str) -> None:
    """Delete a pool although pods use it, and wait until it is gone."""
    kubectl.delete("kvcachepool", pool, wait=False)
    pools.wait_for_condition(kubectl, pool, "Deleting", "True", reason="InUse")
    kubectl.patch("kvcachepool", pool, {"metadata": {"annotations": {"pykvcache.io/force-delete": "true"}}})
    pools.wait_until_gone(kubectl, "kvcachepool", pool)


def labelled(name: str, *, pool: str, image: str, script: str, **spec: Any) -> Object:
    """Return a pod, labelled for a pool, that is no vLLM: it runs a script to its end."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "1", "memory": "64Mi"}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"pykvcache.io/pool": pool}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": security,
            "containers": [container],
            **spec,
        },
    }
