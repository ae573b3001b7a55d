"""The operator as a process of this machine, and what node agents would write, for tests against an API server."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.kubectl import Kubectl
from harness.processes import tail
from harness.waiting import NotYetError, wait_for

GIB = 2**30


class OperatorProcess:
    """One `pykvcache-operator run`."""

    def __init__(self, folder: Path, *, kubeconfig: Path, namespace: str, options: Mapping[str, object]) -> None:
        """Start it; `options` are flags without their dashes; those without a value are True."""
        flags = {"namespace": namespace, "listen": "127.0.0.1:0", **options}
        command = [sys.executable, "-m", "pykvcache_operator.main", "run"]
        command += [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
        environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
        self.log = folder / "operator.log"
        folder.mkdir(parents=True)
        with self.log.open("wb") as output:
            self._popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command], stdout=output, stderr=output, env=environment
            )
        self._port = 0

    def wait_until_serving(self) -> "OperatorProcess":
        """Wait until its probes answer."""
        wait_for("the operator's port", self._find_port, limit_s=120)
        return self

    def wait_until_active(self) -> "OperatorProcess":
        """Wait until it holds the Lease and has read the cluster."""
        self.wait_until_serving()
        wait_for(f"the operator to be active; {self.log}", self._is_active, limit_s=120)
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of one of its pages."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        lines = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics")[1], flags=re.MULTILINE)
        return sum(map(float, lines))

    def ask_to_end(self) -> None:
        """Do as the kubelet does."""
        self._popen.send_signal(signal.SIGTERM)

    def wait_for_end(self, *, limit_s: float = 120) -> int:
        """Wait until it has ended, and return its exit status."""
        return self._popen.wait(limit_s)

    def pause(self) -> None:
        """Freeze it."""
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after a pause."""
        self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._popen.kill()
        self._popen.wait()

    def _check(self) -> None:
        if (code := self._popen.poll()) is not None:
            raise RuntimeError(f"the operator ended with status {code}; {self.log} ends with:\n{tail(self.log)}")

    def _find_port(self) -> bool:
        self._check()
        found = re.search(r"/metrics on port (\d+)\n", self.log.read_text())
        if not found:
            raise NotYetError(tail(self.log))
        self._port = int(found[1])
        return True

    def _is_active(self) -> bool:
        self._check()
        return self.metric("pykvcache_operator_is_leader") == 1 and self.get("/readyz")[0] == 200


class Operators:
    """Starts operators of one test and ends them all with it."""

    def __init__(self, folder: Path, *, kubeconfig: Path, namespace: str, stack: ExitStack) -> None:
        self._folder, self._kubeconfig, self._namespace, self._stack = folder, kubeconfig, namespace, stack
        self._count = 0

    def start(self, *, kubeconfig: Path | None = None, **options: object) -> OperatorProcess:
        """Start one; options as `watch_seconds=4`."""
        self._count += 1
        flags = {name.replace("_", "-"): value for name, value in options.items()}
        operator = OperatorProcess(
            self._folder / str(self._count),
            kubeconfig=kubeconfig or self._kubeconfig,
            namespace=self._namespace,
            options=flags,
        )
        self._stack.callback(operator.kill)
        return operator


class Agents:
    """Writes what the node agents of simulated nodes would write."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def report(self, node: str, *pools: Mapping[str, Any], disk_bytes: int = 1000 * GIB, age_s: int = 0) -> None:
        """Write the whole status of a node's agent; its last heartbeat was `age_s` seconds ago."""
        uid = self._kubectl.get("node", node)["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        head = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCacheNode"}
        self._apply({**head, "metadata": {"name": node, "ownerReferences": [owner]}})
        beat = datetime.fromtimestamp(datetime.now(timezone.utc).timestamp() - age_s, timezone.utc)
        status = {
            "agentVersion": "test",
            "ioUring": "Available",
            "heartbeatTime": beat.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "disks": [{"mountPath": "/mnt/nvme", "type": "NVMe", "sizeBytes": disk_bytes, "freeBytes": disk_bytes}],
            "pools": list(pools),
        }
        self._apply({**head, "metadata": {"name": node}, "status": status}, "--subresource=status")

    def _apply(self, document: Mapping[str, Any], *extra: str) -> None:
        flags = ("--server-side", "--force-conflicts", "--field-manager=pykvcache-agent")
        self._kubectl.run("apply", *flags, *extra, "-f", "-", text=json.dumps(document))


def entry(pool: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a pool's entry in a node's status: ready, unless fields say otherwise."""
    name, uid = pool["metadata"]["name"], pool["metadata"]["uid"]
    ready = {"state": "Ready", "path": f"/mnt/nvme/pykvcache/{name}", "capacityBytes": 10 * GIB, "usedBytes": GIB}
    return {"name": name, "uid": uid, **ready, **fields}


def condition(pool: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """Return status and reason of a condition."""
    found = [c for c in pool.get("status", {}).get("conditions", []) if c["type"] == kind]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")
