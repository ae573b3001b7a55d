"""The webhook as a process of this machine, its configuration, and other people's webhooks beside it."""

import base64
import copy
import http.server
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.certificates import LIFE, Authority
from harness.kubectl import Kubectl
from harness.processes import free_ports, tail
from harness.waiting import NotYetError, wait_for

MANIFEST = Path(__file__).parents[2] / "manifests" / "install.yaml"
KIND = "mutatingwebhookconfiguration"
NAMES = ("127.0.0.1", "pykvcache-webhook.test.svc")
MAIN = "from pykvcache_operator.main import main; import sys; sys.argv[0] = 'pykvcache-operator'; main()"
PATIENCE_S = 30
"""How long the API server waits for a webhook here, its longest: an answer that comes later is lost."""
Object = dict[str, Any]
Change = Callable[[Object], None]


class WebhookProcess:
    """One `pykvcache-operator webhook`; `before` is Python that runs in it first, to spoil something."""

    def __init__(self, folder: Path, *, kubeconfig: Path, tls: Path, port: int, before: str = "") -> None:
        """Start it; `tls` is the folder with its certificate."""
        flags = {
            "certificate-directory": tls,
            "listen": f"127.0.0.1:{port}",
            "metrics-listen": "127.0.0.1:0",
            "connector-image": "registry.test/connector:1",
            "sidecar-image": "registry.test/sidecar:1",
            "grace-seconds": 1,
        }
        command = [sys.executable, "-c", f"{before}\n{MAIN}", "webhook"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
        folder.mkdir(parents=True)
        self.log = folder / "webhook.log"
        with self.log.open("wb") as output:
            self._popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command], stdout=output, stderr=output, env=environment
            )
        self._port = 0

    def wait_until_ready(self) -> "WebhookProcess":
        """Wait until it says that reviews should be sent to it."""
        wait_for(f"the webhook to be ready; {self.log}", lambda: self.get("/readyz")[0] == 200, limit_s=120)
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of one of its pages."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._find_port()}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def count(self, result: str = "", reason: str = "") -> float:
        """Return how many reviews it answered, of all or of one result and reason."""
        pattern = rf'^pykvcache_webhook_requests_total{{reason="{reason or ".*"}",result="{result or ".*"}"}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.get("/metrics")[1], flags=re.MULTILINE)))

    def pause(self) -> None:
        """Freeze it."""
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after a pause."""
        self._popen.send_signal(signal.SIGCONT)

    def ask_to_end(self) -> int:
        """Do as the kubelet does, and return its exit status."""
        self._popen.send_signal(signal.SIGTERM)
        return self._popen.wait(120)

    def kill(self) -> None:
        """End it at once."""
        self._popen.kill()
        self._popen.wait()

    def _find_port(self) -> int:
        if (code := self._popen.poll()) is not None:
            raise RuntimeError(f"the webhook ended with status {code}; {self.log} ends with:\n{tail(self.log)}")
        if not self._port:
            found = re.search(r"/metrics on port (\d+)\n", self.log.read_text())
            if not found:
                raise NotYetError(tail(self.log))
            self._port = int(found[1])
        return self._port


class Site:
    """Where a test's webhook is served: a port, certificates, and the configuration that leads there."""

    def __init__(self, folder: Path, *, kubectl: Kubectl, namespace: str) -> None:
        self._folder, self._kubectl, self._namespace = folder, kubectl, namespace
        self._authority = Authority(folder / "pki")
        self.tls = folder / "tls"
        self.tls.mkdir()
        (self.port,) = free_ports(1)
        self._count = 0
        self._configurations: list[str] = []

    def issue(self, *, life: Any = LIFE) -> None:
        """Write a certificate to where the webhook looks for it."""
        self._authority.issue("webhook", common_name="webhook", names=NAMES, life=life)
        for target, source in (("tls.key", "webhook.key"), ("tls.crt", "webhook.crt")):
            (self.tls / target).write_bytes((self._authority.folder / source).read_bytes())

    def start(self, *, before: str = "") -> WebhookProcess:
        """Start the webhook."""
        self._count += 1
        folder, kubeconfig = self._folder / f"webhook{self._count}", self._kubectl.kubeconfig
        return WebhookProcess(folder, kubeconfig=kubeconfig, tls=self.tls, port=self.port, before=before)

    def configure(self, name: str, *, port: int | None = None, **changes: object) -> None:
        """Send pods of the test's namespace to the webhook at a port, as manifested but for patience and `changes`."""
        rows = yaml.safe_load_all(MANIFEST.read_text())
        document = next(copy.deepcopy(row) for row in rows if row["kind"] == "MutatingWebhookConfiguration")
        (webhook,) = document["webhooks"]
        bundle = base64.b64encode((self._authority.folder / "ca.crt").read_bytes()).decode()
        url = f"https://127.0.0.1:{port or self.port}/mutate"
        own = {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}}
        webhook |= {"clientConfig": {"url": url, "caBundle": bundle}, "namespaceSelector": own}
        webhook |= {"timeoutSeconds": PATIENCE_S, **changes}
        full = f"{name}-{self._namespace}"[:200]
        self._configurations.append(full)
        self._kubectl.apply({**document, "metadata": {"name": full}})

    def other(self, change: Change) -> "OtherWebhook":
        """Start somebody else's webhook."""
        return OtherWebhook(self._authority, change)

    def clear(self) -> None:
        """Remove the configurations."""
        for name in self._configurations:
            self._kubectl.delete(KIND, name)


class OtherWebhook:
    """Somebody else's mutating webhook, in a thread: `change` is done to every pod that it is sent."""

    def __init__(self, authority: Authority, change: Change) -> None:
        authority.issue("other", common_name="other", names=NAMES)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority.folder / "other.crt", authority.folder / "other.key")
        self.calls = 0
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(change))
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(120)

    def _handler(self, change: Change) -> type[http.server.BaseHTTPRequestHandler]:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.calls += 1
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
                body = json.dumps(_changed(request, change)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                """Say nothing."""

        return Handler


def _changed(request: Mapping[str, Any], change: Change) -> Object:
    pod = copy.deepcopy(request["object"])
    change(pod)
    steps: Sequence[Object] = [{"op": "replace", "path": "/spec", "value": pod["spec"]}]
    patch = base64.b64encode(json.dumps(steps).encode()).decode()
    response = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
