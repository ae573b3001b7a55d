"""The node agent as a process of this machine, with a real disk and a real API server; kubelet is a gRPC client."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from harness.kubectl import Object
from harness.processes import Process, tail
from harness.waiting import wait_for
from pykvcache_sidecar.node.csi_messages import CSI

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
]
ROOT = Path(__file__).parents[1]
FORWARD = ROOT / "e2e" / "harness" / "forward.py"
AGENT = "from pykvcache_sidecar.main import main; main()"


class Agent:
    """A node of its own: a disk, a kubelet's directory, and the agent between them and the API server."""

    def __init__(self, folder: Path, *, api_server, stack: ExitStack) -> None:
        self.name = f"node-{uuid.uuid4().hex[:8]}"
        self.kubectl, self._folder, self._stack = api_server.kubectl, folder, stack
        self.disk, self.kubelet = folder / "disk", folder / "kubelet"
        self.pools: list[str] = []
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._port = self._listener.getsockname()[1]
        self._server = api_server.server
        self._kubeconfig = folder / "kubeconfig"
        text = Path(api_server.kubeconfig).read_text()
        self._kubeconfig.write_text(text.replace(self._server, f"https://127.0.0.1:{self._port}"))
        self._process: subprocess.Popen[bytes] | None = None
        self._forward: Process | None = None
        (self.kubelet / "plugins_registry").mkdir(parents=True)
        (self.kubelet / "pods").mkdir()
        self.mount_disk()
        stack.callback(self._clear)
        self.connect()

    # ---- the world around it ----

    def mount_disk(self, *, size: str = "64m") -> None:
        self.disk.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", self.disk], check=True)

    def unmount_disk(self) -> None:
        subprocess.run(["umount", "-l", self.disk], check=True)

    def connect(self) -> None:
        """Let the agent reach the API server."""
        self._listener.set_inheritable(True)
        port = self._server.rpartition(":")[2]
        command = [sys.executable, FORWARD, str(self._listener.fileno()), "127.0.0.1", port]
        descriptors = [self._listener.fileno()]
        self._forward = Process("forward", command, log=self._folder / "forward.log", pass_fds=descriptors)

    def disconnect(self) -> None:
        """Cut the agent off from the API server."""
        if self._forward is not None:
            self._forward.kill()
            self._forward = None

    # ---- the agent ----

    def start(self, *options: str) -> None:
        self.log = self._folder / f"agent-{uuid.uuid4().hex[:4]}.log"
        command = [sys.executable, "-c", AGENT, "node", "--node-name", self.name, "--kubelet-dir", str(self.kubelet)]
        command += ["--allowed-path", str(self.disk), "--disks", str(self.disk), "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command, "--interval", "0.2", *options],
                stdout=output,
                stderr=output,
                env=environment,
            )
        wait_for(f"the agent's port; {self.log}", self._find_port, limit_s=180)

    def _find_port(self) -> str:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        found = re.search(r"listening on \S+:(\d+)\n", self.log.read_text())
        self.http_port = found[1] if found else ""
        return self.http_port

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def pool_now(self, name: str) -> Object | None:
        """Return what the agent itself says of a pool."""
        pools = json.loads(self.get("/status")[1])["pools"]
        return next((pool for pool in pools if pool["name"] == name), None)

    # ---- objects ----

    def add_node(self, api_server) -> None:
        api_server.add_node(self.name, labels={"test": self.name})

    def pool(self, **spec: object) -> str:
        """Make a pool for this node alone; return its name."""
        name = f"p-{uuid.uuid4().hex[:8]}"
        self.pools.append(name)
        storage = {"type": "NodeLocal", "capacityPerNode": "16Mi", "minFree": "0", **spec.pop("storage", {})}
        self.kubectl.apply(
            {
                "apiVersion": "pykvcache.io/v1alpha1",
                "kind": "KVCachePool",
                "metadata": {"name": name},
                "spec": {"storage": storage, "nodeSelector": {"test": self.name}, **spec},
            }
        )
        return name

    def wait_for_pool(self, name: str, state: str, reason: str = "") -> Object:
        """Wait until the KVCacheNode tells this of a pool; return that entry."""

        def look() -> Object | None:
            node = self.kubectl.find("kvcachenode", self.name) or {}
            entries = node.get("status", {}).get("pools", [])
            seen = next((entry for entry in entries if entry["name"] == name), {})
            return seen if (seen.get("state"), seen.get("reason", "")) == (state, reason) else None

        return wait_for(f"pool {name} to be {state} {reason}; the log ends with {tail(self.log)}", look, limit_s=120)

    def wait_until_untold(self, name: str) -> None:
        def is_gone() -> bool:
            node = self.kubectl.get("kvcachenode", self.name)
            return name not in [entry["name"] for entry in node.get("status", {}).get("pools", [])]

        wait_for(f"pool {name} to be told no more", is_gone, limit_s=120)

    # ---- kubelet ----

    def publish(self, pool: str, *, namespace: str = "team-a", pod: str = "") -> Path:
        """Ask for a volume as kubelet does; return where it is mounted."""
        uid = pod or str(uuid.uuid4())
        target = self.kubelet / "pods" / uid / "volumes" / "kubernetes.io~csi" / "pool" / "mount"
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = "csi.storage.k8s.io/"
        context = {
            "pool": pool,
            f"{prefix}ephemeral": "true",
            f"{prefix}pod.namespace": namespace,
            f"{prefix}pod.name": "vllm-0",
            f"{prefix}pod.uid": uid,
        }
        self._call(
            "NodePublishVolume",
            volume_id="csi-1",
            target_path=str(target),
            volume_capability={"mount": {}},
            volume_context=context,
        )
        return target

    def unpublish(self, target: Path) -> None:
        self._call("NodeUnpublishVolume", volume_id="csi-1", target_path=str(target))

    def _call(self, method: str, **fields: object) -> None:
        with grpc.insecure_channel(f"unix:{self.kubelet}/plugins/csi.pykvcache.io/csi.sock") as channel:
            call = channel.unary_unary(
                f"/csi.v1.Node/{method}",
                request_serializer=CSI[f"{method}Request"].SerializeToString,
                response_deserializer=CSI[f"{method}Response"].FromString,
            )
            call(CSI[f"{method}Request"](**fields), timeout=30, wait_for_ready=True)

    def _clear(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.disconnect()
        for name in self.pools:
            self.kubectl.delete("kvcachepool", name, wait=False)
        self.kubectl.delete("kvcachenode", self.name, wait=False)
        self.kubectl.delete("node", self.name, wait=False)
        points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in reversed([point for point in points if point.startswith(str(self._folder))]):
            subprocess.run(["umount", "-l", point], check=False)


@pytest.fixture
def agent(api_server, crds):
    """A node with its agent started."""
    with ExitStack() as stack:
        # Not pytest's folder, whose name is too long for a socket in it.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-"))
        agent = Agent(Path(folder), api_server=api_server, stack=stack)
        agent.add_node(api_server)
        agent.start()
        yield agent


def test_a_node_tells_its_disks_and_what_became_of_a_pool_and_goes_with_its_node(agent):
    name = agent.pool()
    entry = agent.wait_for_pool(name, "Ready")
    assert entry["path"] == f"{agent.disk}/pykvcache/{name}"
    node = agent.kubectl.get("kvcachenode", agent.name)
    assert [disk["mountPath"] for disk in node["status"]["disks"]] == [str(agent.disk)]
    assert node["status"]["ioUring"]
    assert node["metadata"]["ownerReferences"][0]["name"] == agent.name
    shown = agent.kubectl.run("get", "kvcachenode", agent.name, "-o", "json", "--show-managed-fields")
    assert {entry["manager"] for entry in json.loads(shown)["metadata"]["managedFields"]} == {"pykvcache-agent"}
    assert agent.get("/healthz")[0] == 200
    code, text = agent.get("/readyz")
    assert (code, "kubelet has not registered" in text) == (503, True)
    metrics = agent.get("/metrics")[1]
    assert f'pykvcache_node_pool_ready{{pool="{name}"}} 1.0' in metrics
    agent.stop()
    agent.kubectl.delete("node", agent.name)
    wait_for("its KVCacheNode to go", lambda: agent.kubectl.find("kvcachenode", agent.name) is None, limit_s=120)


def test_pods_of_a_namespace_find_what_others_wrote_and_other_namespaces_do_not(agent):
    name = agent.pool(allowedNamespaces={"names": ["team-a", "team-b"]})
    agent.wait_for_pool(name, "Ready")
    first = agent.publish(name)
    (first / "hello.txt").write_text("hello")
    assert agent.wait_for_pool(name, "Ready")
    wait_for("the mount to be counted", lambda: (agent.pool_now(name) or {}).get("mounts") == 1)
    agent.unpublish(first)
    assert (agent.publish(name) / "hello.txt").read_text() == "hello"
    assert not (agent.publish(name, namespace="team-b") / "hello.txt").exists()
    with pytest.raises(grpc.RpcError) as refused:
        agent.publish(name, namespace="team-c")
    assert refused.value.code().name == "PERMISSION_DENIED"


def test_a_deleted_pool_is_erased_also_by_an_agent_that_was_down(agent):
    first, second = agent.pool(), agent.pool()
    agent.wait_for_pool(first, "Ready")
    agent.wait_for_pool(second, "Ready")
    agent.unpublish(agent.publish(first))
    agent.kubectl.delete("kvcachepool", first)
    agent.wait_until_untold(first)
    assert not (agent.disk / "pykvcache" / first).exists()
    assert agent.stop() == 0
    agent.kubectl.delete("kvcachepool", second)
    agent.start()
    wait_for("the orphan to be erased", lambda: not (agent.disk / "pykvcache" / second).exists(), limit_s=120)
    agent.wait_until_untold(second)


def test_an_agent_that_is_killed_takes_up_where_it_was(agent):
    name = agent.pool()
    agent.wait_for_pool(name, "Ready")
    mounted = agent.publish(name)
    (mounted / "kept").write_text("x")
    agent.stop(signal.SIGKILL)
    assert (mounted / "kept").exists()
    agent.start()
    wait_for("the pool to be ready", lambda: (agent.pool_now(name) or {}).get("state") == "Ready")
    assert agent.pool_now(name)["generation"] == 1
    agent.unpublish(mounted)
    assert (agent.publish(name) / "kept").exists()


def test_pods_get_their_volumes_while_the_api_server_is_away_and_what_was_missed_is_done_then(agent):
    name, doomed = agent.pool(), agent.pool()
    agent.wait_for_pool(name, "Ready")
    agent.wait_for_pool(doomed, "Ready")
    agent.disconnect()
    mounted = agent.publish(name, namespace="team-z")
    (mounted / "x").write_text("x")
    agent.unpublish(mounted)
    agent.kubectl.delete("kvcachepool", doomed)
    assert agent.get("/healthz")[0] == 200
    assert (agent.disk / "pykvcache" / doomed).exists()
    agent.connect()
    agent.wait_until_untold(doomed)
    assert not (agent.disk / "pykvcache" / doomed).exists()
    assert (agent.disk / "pykvcache" / name / "ns" / "team-z" / "x").exists()


def test_a_disk_that_goes_and_comes_is_followed_in_the_status(agent):
    name = agent.pool()
    agent.wait_for_pool(name, "Ready")
    agent.unmount_disk()
    agent.wait_for_pool(name, "NotReady", "DiskNotMounted")
    target = agent.publish(name)
    assert "DiskNotMounted" in (target / "pykvcache-unavailable").read_text()
    assert list(agent.disk.iterdir()) == []
    agent.mount_disk()
    assert agent.wait_for_pool(name, "Ready")["generation"] == 2


def test_a_measurement_that_the_operator_wrote_reaches_the_pools_directories(agent):
    name = agent.pool()
    agent.wait_for_pool(name, "Ready")
    mounted = agent.publish(name)
    profile = {
        "pool": name,
        "poolUID": agent.kubectl.get("kvcachepool", name)["metadata"]["uid"],
        "state": "Measured",
        "readBytesPerSecond": 12345,
    }
    agent.kubectl.patch("kvcachenode", agent.name, {"status": {"profiles": [profile]}}, subresource="status")
    path = mounted / "profiles" / "storage.json"
    wait_for("the profile", path.exists, limit_s=120)
    assert json.loads(path.read_text())["readBytesPerSecond"] == 12345
    node = agent.kubectl.get("kvcachenode", agent.name)
    assert node["status"]["pools"], "the agent's writes and the operator's leave each other alone"


def test_nothing_is_written_to_the_api_server_while_nothing_changes_but_the_heartbeat(agent):
    name = agent.pool()
    agent.wait_for_pool(name, "Ready")

    def writes() -> int:
        found = re.search(r'status_writes_total\{result="success"\} (\S+)', agent.get("/metrics")[1])
        return int(float(found[1])) if found else 0

    wait_for("the last change to be written", lambda: (agent.pool_now(name) or {}).get("state") == "Ready")
    before, seconds = writes(), []
    with suppress(TimeoutError):
        wait_for("ten seconds to pass", lambda: seconds.append(1) or writes() > before + 1, limit_s=10, every_s=1)
    assert writes() <= before + 1


def test_a_wrong_start_ends_with_what_to_change(agent):
    agent.stop()
    os.rmdir(agent.kubelet / "pods")
    command = [sys.executable, "-c", AGENT, "node", "--node-name", "n", "--listen", "127.0.0.1:0", "--kubelet-dir"]
    environment = {**os.environ, "KUBECONFIG": str(agent.disk / "none")}
    ended = subprocess.run(
        [*command, str(agent.kubelet)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, "KUBECONFIG" in ended.stderr) == (2, True)
