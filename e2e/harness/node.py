"""One node: containerd and the kubelet in namespaces of their own, as 10.89.0.N on a bridge that joins all nodes.

Inside, the kubelet's folder is /var/lib/kubelet and containerd's socket /run/containerd/containerd.sock, as on most
real nodes. No kube-proxy and no DNS: pods reach the API server's service address, each other's addresses, and nothing
outside; a webhook's Service works, because the API server goes straight to its endpoints.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from harness.binaries import Binaries
from harness.certificates import Authority
from harness.control_plane import SERVICE_IP, SERVICE_RANGE
from harness.oci import BUSYBOX
from harness.processes import Process
from harness.sandbox import Sandbox, make_cgroups, remove_cgroups
from harness.waiting import wait_for

BRIDGE = "node0"  # holds the node's address; a dummy device would do, but not every kernel has it
KUBELET_ROOT = "/var/lib/kubelet"
CONTAINERD = "/run/containerd/containerd.sock"
IMPORT_LIMIT_S = 900  # for an image of 2 GB while the machine builds something else

CONTAINERD_CONFIGURATION = """\
version = 2
root = "{state}/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE every sandbox would die
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""

KUBELET_CONFIGURATION = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: false}}
  x509: {{clientCAFile: {pki}/ca.crt}}
authorization: {{mode: AlwaysAllow}}
tlsCertFile: {pki}/{name}.crt
tlsPrivateKeyFile: {pki}/{name}.key
readOnlyPort: 0
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://{containerd}
resolvConf: ""
podLogsDir: {state}/pods
evictionHard: {{memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
maxPods: 100
serializeImagePulls: false
"""


class Node:
    """Node number N, called nodeN. `sandbox` runs commands on it; its disks are made there, too."""

    def __init__(self, state: Path, *, number: int, binaries: Binaries, authority: Authority, lasting: bool) -> None:
        self.number, self.name = number, f"node{number}"
        self.address, self.pods = address_of(number), f"10.244.{number}.0/24"
        self.state, self.binaries, self.authority = state / self.name, binaries, authority
        self.sandbox = Sandbox(self.state, lasting=lasting)
        self.cgroup = f"{state.name}-{self.name}"
        self.processes: list[Process] = []

    def enter(self) -> None:
        """Make its namespaces and its address; programs may start in them."""
        self.sandbox.start()
        ip = ["ip", "-batch", "-"]
        lines = [f"link add {BRIDGE} type bridge", f"addr add {self.address}/24 dev {BRIDGE}", f"link set {BRIDGE} up"]
        if self.number == 1:  # the control plane is here, and listens on the port of its service
            lines.append(f"addr add {SERVICE_IP}/32 dev {BRIDGE}")
        else:
            lines.append(f"route add {SERVICE_RANGE} via {address_of(1)}")
        self.sandbox.run(*ip, text="\n".join(lines) + "\n")

    def join(self, others: Sequence["Node"]) -> None:
        """Connect to the first node by cable and to the pods of all by routes; a second cable would close a loop."""
        others[0].sandbox.connect(self.sandbox, bridge=BRIDGE)
        for other in others:
            self.sandbox.run("ip", "route", "add", other.pods, "via", other.address)
            other.sandbox.run("ip", "route", "add", self.pods, "via", self.address)

    def start(self, *, busybox: Path) -> None:
        """Start containerd, load the image that every pod needs, start the kubelet."""
        make_cgroups(self.cgroup)
        self._write_configuration()
        self.processes.append(
            self.sandbox.spawn("containerd", ["containerd", "--config", self.state / "containerd.toml"])
        )
        wait_for(f"containerd of {self.name}", lambda: self.ctr("version"), limit_s=120)
        self.load(busybox)
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """Start the kubelet, at first or after `stop_kubelet`."""
        command: list[str | Path] = [
            self.binaries.kubernetes / "kubelet",
            f"--config={self.state}/kubelet.yaml",
            f"--kubeconfig={self.state}/kubelet.conf",
            f"--root-dir={KUBELET_ROOT}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            "--v=2",
        ]
        self.processes.append(self.sandbox.spawn("kubelet", command))

    def stop_kubelet(self) -> None:
        """Stop the kubelet and wait until it has ended; pods run on, the node becomes NotReady after 40 s."""
        self.sandbox.run("busybox", "killall", "kubelet")
        self.processes = [process for process in self.processes if process.name != "kubelet"]
        wait_for("the kubelet to end", lambda: not self.has_kubelet(), limit_s=120)

    def has_kubelet(self) -> bool:
        """Whether the kubelet runs."""
        return bool(self.sandbox.run("busybox", "sh", "-c", "busybox pidof kubelet || true").strip())

    def ctr(self, *arguments: str | Path) -> str:
        """Run containerd's tool."""
        return self.sandbox.run("ctr", f"--address={CONTAINERD}", "--namespace=k8s.io", *arguments)

    def load(self, archive: Path) -> None:
        """Import an image from an archive."""
        command = ["ctr", f"--address={CONTAINERD}", "--namespace=k8s.io", "images", "import", str(archive)]
        self.sandbox.run(*command, limit_s=IMPORT_LIMIT_S)

    def has_image(self, name: str) -> bool:
        """Whether pods can use an image here."""
        return name in self.ctr("images", "list", "--quiet").split()

    def check(self) -> None:
        """Raise RuntimeError if containerd or the kubelet has ended."""
        for process in self.processes:
            process.check()

    def stop(self) -> None:
        """End the node and everything in it at once."""
        self.sandbox.stop()
        remove_cgroups(self.cgroup)

    def _write_configuration(self) -> None:
        pki = self.authority.folder
        names = [self.name, "localhost", "127.0.0.1", self.address]
        self.authority.issue(
            self.name, common_name=f"system:node:{self.name}", organization="system:nodes", names=names
        )
        server = f"https://{address_of(1)}:443"
        self.authority.kubeconfig(self.state / "kubelet.conf", user=self.name, server=server)
        text = CONTAINERD_CONFIGURATION.format(state=self.state, pause=BUSYBOX)
        (self.state / "containerd.toml").write_text(text)
        text = KUBELET_CONFIGURATION.format(
            pki=pki, name=self.name, state=self.state, cgroup=self.cgroup, containerd=CONTAINERD
        )
        (self.state / "kubelet.yaml").write_text(text)
        (self.state / "cni").mkdir(exist_ok=True)
        (self.state / "cni" / "10-pods.conflist").write_text(json.dumps(self._pod_network()))

    def _pod_network(self) -> dict[str, object]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": f"{self.state}/addresses",
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def address_of(number: int) -> str:
    """Return the address of node N."""
    return f"10.89.0.{number}"
