"""etcd, the API server, the controller manager and, where there are nodes, the scheduler.

Where they run, on the host or in a node's namespaces, is the caller's business: it hands in `spawn`. Data are thrown
away with the cluster, so etcd does not sync, and a stop is a kill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.binaries import Binaries
from harness.certificates import Authority
from harness.processes import Process

Spawn = Callable[[str, Sequence["str | Path"]], Process]

SERVICE_RANGE, SERVICE_IP = "10.96.0.0/16", "10.96.0.1"
ISSUER = "https://kubernetes.default.svc"
SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1", SERVICE_IP)
CONTROLLER_MANAGER = "kcm"
RESTARTS_MAX = 5
# Nobody sends heartbeats for simulated nodes; this controller would taint them and delete their pods.
WITHOUT_NODES = "--controllers=*,-node-lifecycle-controller,-taint-eviction-controller"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a control plane listens."""

    address: str  # that the API server advertises, and nodes use
    api_port: int
    etcd_port: int
    etcd_peer_port: int


class ControlPlane:
    """One control plane; `processes` are its programs in the order of their start."""

    def __init__(self, state: Path, *, binaries: Binaries, endpoint: Endpoint, spawn: Spawn, has_nodes: bool) -> None:
        self.state, self.binaries, self.endpoint = state, binaries, endpoint
        self.has_nodes, self._spawn = has_nodes, spawn
        self.processes: list[Process] = []
        self._restarts = 0
        self.authority = self._issue_certificates()

    def start(self) -> None:
        """Start all programs; none of them needs to wait for another, they retry, or `check` does it for them."""
        self._start_etcd()
        self._start_apiserver()
        self._start_controller_manager()
        if self.has_nodes:
            self._start("scheduler", self.binaries.kubernetes / "kube-scheduler", *self._client("scheduler"))

    def restart_apiserver(self) -> None:
        """Kill the API server and start it anew; it takes seconds until it answers."""
        (old,) = (process for process in self.processes if process.name == "apiserver")
        old.kill()
        self.processes.remove(old)
        self._start_apiserver()

    def check(self) -> None:
        """Raise RuntimeError if a program has ended.

        The controller manager waits ten seconds for the API server, which is too short on a busy machine; it is started
        again a few times.
        """
        for process in list(self.processes):
            try:
                process.check()
            except RuntimeError:
                if process.name != CONTROLLER_MANAGER or self._restarts == RESTARTS_MAX:
                    raise
                self._restarts += 1
                self.processes.remove(process)
                self._start_controller_manager()

    def _issue_certificates(self) -> Authority:
        authority = Authority(self.state / "pki")
        server = f"https://127.0.0.1:{self.endpoint.api_port}"
        authority.issue("apiserver", common_name="kube-apiserver", names=[*SERVER_NAMES, self.endpoint.address])
        authority.issue("admin", common_name="admin", organization="system:masters")
        for user, name in (("kcm", "system:kube-controller-manager"), ("scheduler", "system:kube-scheduler")):
            authority.issue(user, common_name=name)
            authority.kubeconfig(self.state / f"{user}.conf", user=user, server=server)
        authority.service_account_keys()
        return authority

    def _start(self, name: str, program: Path, *arguments: str) -> None:
        self.processes.append(self._spawn(name, [program, *arguments]))

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self.endpoint.etcd_port}"
        peer = f"http://127.0.0.1:{self.endpoint.etcd_peer_port}"
        self._start(
            "etcd",
            self.binaries.etcd,
            f"--data-dir={self.state}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def _start_apiserver(self) -> None:
        pki = self.authority.folder
        kubelets = [
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--bind-address=0.0.0.0",
        ]
        self._start(
            "apiserver",
            self.binaries.kubernetes / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.endpoint.etcd_port}",
            f"--secure-port={self.endpoint.api_port}",
            f"--advertise-address={self.endpoint.address}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--service-account-issuer={ISSUER}",
            f"--api-audiences={ISSUER}",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--allow-privileged=true",
            "--enable-aggregator-routing=true",  # webhooks reach endpoints of a Service without kube-proxy
            *(kubelets if self.has_nodes else ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]),
        )

    def _start_controller_manager(self) -> None:
        pki = self.authority.folder
        self._start(
            CONTROLLER_MANAGER,
            self.binaries.kubernetes / "kube-controller-manager",
            *self._client("kcm"),
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            "--use-service-account-credentials=true",
            *([] if self.has_nodes else [WITHOUT_NODES]),
        )

    def _client(self, user: str) -> list[str]:
        return [f"--kubeconfig={self.state}/{user}.conf", "--secure-port=0", "--leader-elect=false"]
