"""A control plane without nodes: etcd, API server, controller manager, on free ports of this machine. Needs no root.

For whatever only talks to the API: custom resources, validation, controllers. Pods stay Pending; nodes are simulated
objects, which nobody taints. Garbage collection, Jobs' status and namespaces' deletion are the real ones.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.binaries import Binaries
from harness.control_plane import ControlPlane, Endpoint
from harness.kubectl import Kubectl, KubectlError
from harness.processes import Process, abandoned, free_ports, make_folder
from harness.waiting import NotYetError, stage, wait_for


class ApiCluster:
    """One of them, from `start` to `stop`. `kubeconfig` is a file with administrator rights."""

    def __init__(self, state: Path, *, binaries: Binaries) -> None:
        """Make certificates and files in a new folder below `state`; remove what killed runs left there."""
        for folder in abandoned(state, "api"):
            shutil.rmtree(folder, ignore_errors=True)  # another run may do the same
        self.state = make_folder(state, "api")
        api, etcd, peer = free_ports(3)
        endpoint = Endpoint(address="127.0.0.1", api_port=api, etcd_port=etcd, etcd_peer_port=peer)
        self._plane = ControlPlane(self.state, binaries=binaries, endpoint=endpoint, spawn=self._spawn, has_nodes=False)
        self.server = f"https://127.0.0.1:{api}"
        self.kubeconfig = self._plane.authority.kubeconfig(self.state / "admin.conf", user="admin", server=self.server)
        self.kubectl = Kubectl(binaries.tools / "kubectl", self.kubeconfig)

    def start(self) -> None:
        """Start it and wait until objects can be made."""
        with stage("API server ready"):
            self._plane.start()
            wait_for("the API server", self._is_ready, limit_s=180)

    def stop(self) -> None:
        """End it; its logs and data go too."""
        for process in reversed(self._plane.processes):
            process.kill()
        shutil.rmtree(self.state)

    def restart_apiserver(self) -> None:
        """Kill the API server, start it anew and wait until objects can be made."""
        self._plane.restart_apiserver()
        wait_for("the API server after its restart", self._is_ready, limit_s=180)

    @property
    def certificates(self) -> Path:
        """Folder with admin.crt, admin.key and ca.crt."""
        return self._plane.authority.folder

    def logs(self) -> Sequence[Path]:
        """Return the log files."""
        return [process.log for process in self._plane.processes]

    def add_node(self, name: str, *, labels: Mapping[str, str] | None = None) -> None:
        """Make a simulated Node that is Ready."""
        names = {"kubernetes.io/hostname": name, **(labels or {})}
        self.kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": names}})
        condition = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "made by a test"}
        self.kubectl.patch("node", name, {"status": {"conditions": [condition]}}, subresource="status")

    def _spawn(self, name: str, command: Sequence[str | Path]) -> Process:
        return Process(name, command, log=self.state / "log" / name)

    def _is_ready(self) -> bool:
        self._plane.check()
        try:
            self.kubectl.run("get", "--raw", "/readyz", limit_s=30)
            self.kubectl.get("serviceaccount", "default")  # the controller manager works too
        except KubectlError as error:
            raise NotYetError(str(error)) from None
        return True
