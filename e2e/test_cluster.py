"""The cluster that other tests build on: pods run in it, our images start, and it ends without a trace."""

import os
import uuid
from pathlib import Path

import pytest

from harness.cluster import LocalCluster
from harness.diagnose import diagnose
from harness.kubectl import KubectlError
from harness.settings import Mode
from harness.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, *, image: str, command: list[str], **spec) -> dict:
    """Return a pod of one container that asks for nothing special."""
    container = {"name": "main", "image": image, "command": command, **spec.pop("container", {})}
    body = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


def test_a_pod_runs_and_logs_and_exec_reach_it(cluster, kubectl, namespace):
    inside = kubectl.within(namespace)
    inside.apply(pod("shell", image=cluster.busybox, command=["sh", "-c", "echo started; sleep 600"]))
    inside.wait_for_phase("shell", "Running")
    wait_for("its first words", lambda: inside.logs("shell") == "started\n")  # it runs, and has perhaps not spoken yet
    assert inside.exec("shell", "sh", "-c", "echo $((6 * 7))") == "42\n"


def test_a_pod_reaches_the_api_server_at_its_service_address(cluster, kubectl, namespace):
    inside = kubectl.within(namespace)
    connect = 'echo | nc -w 60 "$KUBERNETES_SERVICE_HOST" "$KUBERNETES_SERVICE_PORT"'
    inside.apply(pod("client", image=cluster.busybox, command=["sh", "-c", connect]))
    inside.wait_for_phase("client", "Succeeded")


@pytest.mark.parametrize(
    ("part", "command"),
    [
        ("sidecar", "pykvcache-sidecar --help && pykvcache --help && command -v mount"),
        ("operator", "python -c 'import kopf, kubernetes.aio, pykvcache_operator'"),
    ],
)
def test_our_image_starts_without_any_right(cluster, kubectl, namespace, part, command):
    inside = kubectl.within(namespace)
    kubectl.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    container = {"securityContext": RESTRICTED}
    inside.apply(pod("ours", image=cluster.image(part), command=["sh", "-c", command], container=container))
    ended = inside.wait_for_phase("ours", "Succeeded", "Failed", limit_s=180)
    assert ended["status"]["phase"] == "Succeeded", inside.logs("ours")


def test_an_init_container_brings_the_library(cluster, kubectl, namespace):
    inside = kubectl.within(namespace)
    mount = {"volumeMounts": [{"name": "library", "mountPath": "/library-of-vllm"}]}
    init = {"name": "library", "image": cluster.image("connector"), "args": ["/library-of-vllm"], **mount}
    show = "cd /library-of-vllm && ls -d pykvcache_connector pykvcache_storage liburing && ! ls -d pydantic"
    volumes = [{"name": "library", "emptyDir": {}}]
    inside.apply(
        pod(
            "vllm",
            image=cluster.busybox,
            command=["sh", "-c", show],
            container=mount,
            initContainers=[init],
            volumes=volumes,
        )
    )
    ended = inside.wait_for_phase("vllm", "Succeeded", "Failed", limit_s=180)
    assert ended["status"]["phase"] == "Succeeded", inside.logs("vllm")


def test_what_a_node_mounts_reaches_pods_and_not_this_machine(local_cluster, kubectl, namespace):
    """A disk of a node is a filesystem mounted in its namespaces; Bidirectional propagation works both ways."""
    node, inside = local_cluster.nodes[0], kubectl.within(namespace)
    disk = f"/mnt/{uuid.uuid4().hex[:8]}"
    node.sandbox.run("sh", "-c", f"mkdir -p {disk} && mount -t tmpfs disk {disk} && echo here > {disk}/file")
    try:
        volume = {"name": "disk", "hostPath": {"path": disk}}
        mount = {"name": "disk", "mountPath": "/disk", "mountPropagation": "Bidirectional"}
        container = {"volumeMounts": [mount], "securityContext": {"privileged": True}}
        script = "mkdir /disk/inner && mount -t tmpfs inner /disk/inner && echo there > /disk/inner/file; sleep 600"
        command = ["sh", "-c", script]
        inside.apply(pod("agent", image=local_cluster.busybox, command=command, container=container, volumes=[volume]))
        inside.wait_for_phase("agent", "Running")
        assert inside.exec("agent", "cat", "/disk/file") == "here\n"
        wait_for("what it mounts", lambda: node.sandbox.run("cat", f"{disk}/inner/file") == "there\n")
        assert disk not in Path("/proc/self/mounts").read_text()
        inside.delete("pod", "agent")
    finally:
        node.sandbox.run("sh", "-c", f"umount -R {disk} && rmdir {disk}")


def test_a_kubelet_can_be_stopped_and_pods_run_on(local_cluster, kubectl, namespace):
    node, inside = local_cluster.nodes[0], kubectl.within(namespace)
    inside.apply(pod("lasting", image=local_cluster.busybox, command=["sleep", "600"]))
    inside.wait_for_phase("lasting", "Running")
    node.stop_kubelet()
    try:
        with pytest.raises(KubectlError, match="refused"):
            inside.exec("lasting", "true")
        assert "sleep 600" in node.sandbox.run("ps", "-e", "-o", "args")
    finally:
        node.start_kubelet()
    wait_for("the kubelet to answer", lambda: inside.exec("lasting", "echo", "yes"))
    assert inside.get("pod", "lasting")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_second_node_joins_and_its_pods_reach_those_of_the_first(settings, binaries):
    """In a cluster of its own, which then shows that the end of one leaves nothing."""
    if settings.mode is not Mode.LOCAL:
        pytest.skip("needs the inside of a node: PYKVCACHE_E2E=local")
    cluster = LocalCluster.temporary(settings.state, binaries=binaries, cache=settings.cache)
    try:
        cluster.start()
        cluster.add_node()
        inside = cluster.kubectl.within("default")
        for number in (1, 2):
            body = pod(f"on-{number}", image=cluster.busybox, command=["sleep", "600"], nodeName=f"node{number}")
            inside.apply(body)
        address = inside.wait_for_phase("on-1", "Running")["status"]["podIP"]
        inside.wait_for_phase("on-2", "Running")
        inside.exec("on-2", "ping", "-c", "1", "-W", "60", address)
        running = traces(cluster.state)
    finally:
        cluster.stop()
    assert {kind for kind, found in running.items() if found} == {"cgroups", "files", "processes"}
    assert {kind: found for kind, found in traces(cluster.state).items() if found} == {}


def traces(state: Path) -> dict[str, list[str]]:
    """Return what a cluster has on this machine outside of its namespaces."""
    names = Path("/proc/self/net/dev").read_text()
    return {
        "files": [str(state)] if state.exists() else [],
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(state) in line],
        "cgroups": [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"/{state.name}-" in path],
        "processes": [line for line in map(command_line, Path("/proc").glob("[0-9]*")) if str(state) in line],
        "interfaces": [name for name in ("node0", "cni0", "to-node2") if f"{name}:" in names],
    }


def command_line(process: Path) -> str:
    """Return the command line of a process, "" when it has just ended."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_diagnosis_holds_pods_events_and_logs(local_cluster, kubectl, namespace, tmp_path):
    inside = kubectl.within(namespace)
    inside.apply(pod("broken", image=local_cluster.busybox, command=["sh", "-c", "echo last words; exit 3"]))
    inside.wait_for_phase("broken", "Failed")
    folder = diagnose(kubectl, tmp_path / "diagnosis", logs=local_cluster.logs())
    assert (folder / "containers" / f"{namespace}-broken-main.txt").read_text() == "last words\n"
    assert "Exit Code:    3" in (folder / "pods.txt").read_text()
    assert "broken" in (folder / "events.txt").read_text()
    assert (folder / "programs" / "node1-kubelet.txt").stat().st_size > 0
