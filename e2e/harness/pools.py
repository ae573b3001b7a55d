"""For tests of pools on real nodes: disks below /mnt, pods that mount a pool, and what is told of both.

A disk is a file of the node's folder with an ext4 on a loop device, so it can be unmounted, read-only, full, and
replaced, as a real one. It is mounted inside the node only and ends with it.
"""

import json

from harness.chart import AGENT_NAMESPACE
from harness.kubectl import Kubectl, Object
from harness.node import Node
from harness.sandbox import Sandbox
from harness.waiting import NotYetError, wait_for

DRIVER = "csi.pykvcache.io"
MARKER = "pykvcache-unavailable"
POOLS_DIRECTORY = "pykvcache"  # of a disk: where pools without a path lie
AWAY = "e2e.pykvcache.io/away"  # a label that no node has
PATIENCE_S = 150  # kubelet asks again for a volume after up to two minutes


class Disk:
    """A disk of a node. `point` is where it is mounted, `pools` what the node agent keeps on it."""

    def __init__(self, node: Node, point: str, *, size: str) -> None:
        self.point, self.pools, self._size = point, f"{point}/{POOLS_DIRECTORY}", size
        self._sandbox: Sandbox = node.sandbox
        self._image = f"{node.state}/{point.rsplit('/', 1)[-1]}.img"

    def attach(self) -> None:
        """Make it, empty, and mount it."""
        self.format()
        self.mount()

    def format(self) -> None:
        """Put an empty filesystem in place of what is there; it must not be mounted."""
        self._run(f"rm -f {self._image} && truncate -s {self._size} {self._image} && mkfs.ext4 -q -F {self._image}")

    def mount(self) -> None:
        """Mount it at its place."""
        self._run(f"mkdir -p {self.point} && mount -o loop {self._image} {self.point}")

    def unmount(self) -> None:
        """Take it from its place, at once for everybody who opens a file there from now on."""
        self._run(f"umount -l {self.point}")

    def set_read_only(self, read_only: bool) -> None:
        """Make the whole filesystem read-only, also for the mounts in pods, or writable again."""
        # Not `mount -o remount`, which util-linux does for one mount only when somebody bound it elsewhere.
        self._run(f"busybox mount -o remount,{'ro' if read_only else 'rw'} {self.point}")

    def fill(self) -> None:
        """Let somebody else's file take all that is free."""
        self._run(f"head -c 1T /dev/zero > {self.point}/somebodys 2>/dev/null; test -s {self.point}/somebodys")

    def empty(self) -> None:
        """Remove that file."""
        self._run(f"rm {self.point}/somebodys")

    def find(self) -> list[str]:
        """Return the paths of everything that pools have there, sorted."""
        return sorted(self._run(f"test ! -d {self.pools} || find {self.pools} -mindepth 1").split())

    def read(self, path: str) -> str:
        """Return what a file there holds."""
        return self._run(f"cat {path}")

    def remove(self) -> None:
        """Unmount it if it is mounted, and forget it."""
        self._run(f"umount -l {self.point} 2>/dev/null; rm -rf {self.point} {self._image}")

    def _run(self, script: str) -> str:
        return self._sandbox.run("sh", "-c", script)


def pool_named(name: str, *, storage: Object | None = None, **spec: object) -> Object:
    """Return a small NodeLocal pool that is not measured, unless the spec says so."""
    return {
        "apiVersion": "pykvcache.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name},
        "spec": {
            "storage": {"type": "NodeLocal", "capacityPerNode": "64Mi", "minFree": "0", **(storage or {})},
            "calibration": {"enabled": False},
            **spec,
        },
    }


def pod_with_pool(name: str, *, pool: str, image: str, script: str, node: str) -> Object:
    """Return a pod without any right that runs a script on a node, beside the pool in /pool."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "pool", "mountPath": "/pool"}],
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": node},
            "securityContext": security,
            "containers": [container],
            "volumes": [{"name": "pool", "csi": {"driver": DRIVER, "volumeAttributes": {"pool": pool}}}],
        },
    }


def entry(kubectl: Kubectl, node: str, pool: str) -> Object:
    """Return what a node's agent tells of a pool.

    Raises:
        NotYetError: nothing.
    """
    pools = kubectl.get("kvcachenode", node).get("status", {}).get("pools", [])
    for row in pools:
        if row["name"] == pool:
            found: Object = row
            return found
    raise NotYetError(f"{node} tells of {[row['name'] for row in pools]}")


def wait_for_state(
    kubectl: Kubectl, node: str, pool: str, state: str, *, reason: str = "", limit_s: float = 120
) -> Object:
    """Wait until a node's agent tells this state and reason of a pool, and return all that it tells of it."""

    def probe() -> Object:
        row = entry(kubectl, node, pool)
        if (row["state"], row.get("reason", "")) != (state, reason):
            raise NotYetError(json.dumps(row))
        return row

    return wait_for(f"{pool} to be {state} {reason} on {node}", probe, limit_s=limit_s, every_s=0.3)


def wait_for_condition(
    kubectl: Kubectl, pool: str, kind: str, status: str, *, reason: str = "", limit_s: float = 120
) -> Object:
    """Wait until the operator gives a condition of a pool this status and reason, and return the condition."""

    def found(document: Object) -> Object | None:
        rows = document.get("status", {}).get("conditions", [])
        return next(
            (row for row in rows if (row["type"], row["status"]) == (kind, status) and reason in {"", row["reason"]}),
            None,
        )

    what = f"to have {kind}={status} {reason}"
    document = kubectl.wait_for("kvcachepool", pool, found, what, limit_s=limit_s)
    return found(document) or {}


def wait_for_event(kubectl: Kubectl, name: str, text: str, *, limit_s: float = 120) -> str:
    """Wait until an event of a pod or pool holds a text, and return its message."""

    def probe() -> str:
        rows = json.loads(kubectl.run("get", "events", "-o", "json", f"--field-selector=involvedObject.name={name}"))
        messages: list[str] = [row["message"] for row in rows["items"]]
        if said := [message for message in messages if text in message]:
            return said[-1]
        raise NotYetError(f"events: {messages}")

    return wait_for(f"an event of {name} with {text!r}", probe, limit_s=limit_s, every_s=0.5)


def send_agents_away(kubectl: Kubectl) -> None:
    """Let no node have a node agent, and wait until none has."""
    _place_agents(kubectl, {AWAY: "yes"})
    inside = kubectl.within(AGENT_NAMESPACE)
    wait_for("the node agents to be gone", lambda: not inside.list("pods"), limit_s=180)


def call_agents_back(kubectl: Kubectl) -> None:
    """Undo `send_agents_away`, and wait until every node has an agent that is ready."""
    _place_agents(kubectl, {AWAY: None})
    wait_for_agents(kubectl)


def wait_for_agents(kubectl: Kubectl) -> None:
    """Wait until every node has an agent that is ready."""
    count = len(kubectl.list("nodes"))

    def ready(found: Object) -> bool:
        status = found["status"]
        current = status.get("observedGeneration") == found["metadata"]["generation"]
        return bool(current and status.get("numberReady") == count == status.get("desiredNumberScheduled"))

    kubectl.within(AGENT_NAMESPACE).wait_for("daemonset", "pykvcache-agent", ready, f"to have {count}", limit_s=120)


def _place_agents(kubectl: Kubectl, selector: Object) -> None:
    patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
    kubectl.within(AGENT_NAMESPACE).patch("daemonset", "pykvcache-agent", patch)


def volumes_of(sandbox: Sandbox) -> list[str]:
    """Return the lines of a node's mount table that are volumes of pods by the CSI driver."""
    return [line for line in sandbox.run("cat", "/proc/mounts").splitlines() if "kubernetes.io~csi/pool/" in line]


def wait_until_gone(kubectl: Kubectl, kind: str, name: str, *, limit_s: float = 120) -> None:
    """Wait until an object exists no more; a deletion must have been asked for."""

    def probe() -> bool:
        if left := kubectl.find(kind, name):
            raise NotYetError(json.dumps({"metadata": left["metadata"], "status": left.get("status")})[:3000])
        return True

    wait_for(f"{kind}/{name} to be gone", probe, limit_s=limit_s, every_s=0.3)
