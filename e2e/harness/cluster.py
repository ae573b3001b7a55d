"""Our own cluster on this machine: a control plane and nodes in namespaces. Needs root and Debian's containerd.

The control plane lives with node1, in its namespaces; one forwarded port of 127.0.0.1 leads to the API server. A
cluster belongs to the process that started it and ends with it, unless it is a lasting one: that is found again by its
folder, until `stop`.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import forward, images
from harness.binaries import Binaries, MissingError, require
from harness.certificates import Authority
from harness.control_plane import ControlPlane, Endpoint
from harness.kubectl import Kubectl
from harness.node import KUBELET_ROOT, Node, address_of
from harness.oci import BUSYBOX, write_busybox
from harness.processes import abandoned, make_folder
from harness.sandbox import read_sysctls, restore_sysctls
from harness.waiting import NotYetError, stage, wait_for

ENDPOINT = Endpoint(address=address_of(1), api_port=443, etcd_port=2379, etcd_peer_port=2380)
RECORD = "cluster.json"  # of a started one: what another process needs to use and stop it


class LocalCluster:
    """One cluster; everything of it lies in `state`. `kubeconfig` is a file with administrator rights."""

    kubelet_root = KUBELET_ROOT
    busybox = BUSYBOX

    def __init__(self, state: Path, *, binaries: Binaries, cache: Path, lasting: bool = False) -> None:
        self.state, self._binaries, self._cache, self._lasting = state, binaries, cache, lasting
        self.kubeconfig = state / "admin.conf"
        self.kubectl = Kubectl(binaries.tools / "kubectl", self.kubeconfig)
        self.nodes: list[Node] = []
        self._plane: ControlPlane | None = None
        self._sysctls = ""

    @classmethod
    def temporary(cls, parent: Path, *, binaries: Binaries, cache: Path) -> "LocalCluster":
        """Return one in a new folder, not yet started; what killed runs left is removed."""
        for folder in abandoned(parent, "c"):
            if left := cls._read(folder, binaries=binaries, cache=cache):
                left.stop()
        return cls(make_folder(parent, "c"), binaries=binaries, cache=cache)

    @classmethod
    def attach(cls, state: Path, *, binaries: Binaries, cache: Path) -> "LocalCluster | None":
        """Return a lasting cluster that runs, or None."""
        cluster = cls._read(state, binaries=binaries, cache=cache)
        return cluster if cluster and cluster.nodes[0].sandbox.is_alive else None

    @classmethod
    def _read(cls, state: Path, *, binaries: Binaries, cache: Path) -> "LocalCluster | None":
        """Return the cluster that was started in a folder, whether it runs or not; None if none was."""
        try:
            record: dict[str, Any] = json.loads((state / RECORD).read_text())
        except FileNotFoundError:
            return None
        cluster = cls(state, binaries=binaries, cache=cache, lasting=True)
        cluster._sysctls = record["sysctls"]
        for number, pid in enumerate(record["pids"], 1):
            cluster.nodes.append(cluster._make_node(number, authority=Authority(state / "pki")))
            cluster.nodes[-1].sandbox.pid = pid
        return cluster

    def start(self) -> None:
        """Start it with one node and wait until pods can run.

        Raises:
            MissingError: not root, or a program is missing.
            TimeoutError, RuntimeError: it did not come up; the message ends with a log.
        """
        if os.geteuid() != 0:
            raise MissingError(
                "a local cluster needs root: namespaces, mounts. Or use PYKVCACHE_E2E=kubeconfig or kind"
            )
        require("containerd", "runc", "/usr/lib/cni/bridge", "busybox", "iptables", "conntrack")
        self.state.mkdir(parents=True, exist_ok=True)
        self._sysctls = read_sysctls()
        with stage("cluster ready"):
            authority = Authority(self.state / "pki")
            node = self._make_node(1, authority=authority)
            self.nodes.append(node)
            node.enter()
            self._record()
            spawn = node.sandbox.spawn
            self._plane = ControlPlane(
                self.state, binaries=self._binaries, endpoint=ENDPOINT, spawn=spawn, has_nodes=True
            )
            self._plane.start()
            self._forward()
            node.start(busybox=self._busybox())
            wait_for("the API server", self._api_is_ready, limit_s=180)
            self._wait_for_node(node)

    def add_node(self) -> Node:
        """Add a node, and wait until it is Ready."""
        first = self.nodes[0]
        node = self._make_node(len(self.nodes) + 1, authority=first.authority)
        with stage(f"{node.name} ready"):
            self.nodes.append(node)
            node.enter()
            self._record()
            node.join(self.nodes[:-1])
            node.start(busybox=self._busybox())
            self._wait_for_node(node)
        return node

    def image(self, target: str) -> str:
        """Build an image of the product, make it usable on all nodes, and return its name."""
        archive, name = images.build(target, self._cache), images.local_name(target)
        self.load(archive, name)
        return name

    def load(self, archive: Path, name: str) -> None:
        """Make an image usable on all nodes, unless it is."""
        for node in self.nodes:
            if not node.has_image(name):
                node.load(archive)

    def logs(self) -> list[Path]:
        """Return the log files of all programs, of this and of other processes."""
        return sorted(self.state.glob("*/log/*"))

    def stop(self) -> None:
        """End it at once, put back what it changed, remove its folder."""
        for node in reversed(self.nodes):
            node.stop()
        if self._sysctls:
            restore_sysctls(self._sysctls)
        shutil.rmtree(self.state)

    def _make_node(self, number: int, *, authority: Authority) -> Node:
        return Node(self.state, number=number, binaries=self._binaries, authority=authority, lasting=self._lasting)

    def _record(self) -> None:
        pids = [node.sandbox.pid for node in self.nodes]
        (self.state / RECORD).write_text(json.dumps({"pids": pids, "sysctls": self._sysctls}))

    def _forward(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            fd = listener.fileno()
            command = [sys.executable, forward.__file__, str(fd), "127.0.0.1", str(ENDPOINT.api_port)]
            self.nodes[0].sandbox.spawn("forward", command, pass_fds=[fd])
            server = f"https://127.0.0.1:{listener.getsockname()[1]}"
        self.nodes[0].authority.kubeconfig(self.kubeconfig, user="admin", server=server)

    def _busybox(self) -> Path:
        archive = self.state / "busybox.tar"
        if not archive.exists():
            with tempfile.TemporaryDirectory() as scratch:
                write_busybox(archive, scratch=Path(scratch), busybox=require("busybox"))
        return archive

    def _api_is_ready(self) -> bool:
        if self._plane:
            self._plane.check()
        self.kubectl.run("get", "--raw", "/readyz", limit_s=30)
        return bool(self.kubectl.get("serviceaccount", "default"))

    def _wait_for_node(self, node: Node) -> None:
        def ready() -> bool:
            node.check()
            conditions = self.kubectl.get("node", node.name)["status"].get("conditions", [])
            if not any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions):
                raise NotYetError(json.dumps(conditions))
            return True

        wait_for(f"{node.name} to be Ready", ready, limit_s=180)
