"""The webhook's certificates on a real API server, which verifies them when it calls."""

import base64
import http.server
import json
import socket
import ssl
import threading
from contextlib import ExitStack

import pytest

from harness.kubectl import KubectlError
from harness.operators import Operators
from harness.waiting import NotYetError, wait_for
from pykvcache_operator.certifier import AUTHORITY_SECRET, SERVING_SECRET, WEBHOOK

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SERVICE = "hook"
KIND = "mutatingwebhookconfiguration"
HEALED_S = 90
"""The operator looks every 30 s."""


def own_address():
    """Return an address of this machine that an EndpointSlice may name: none of the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        return probe.getsockname()[0]


class Hook:
    """A webhook that serves a Secret's certificate and allows everything.

    Attributes:
        called: how many reviews arrived.
    """

    def __init__(self, folder) -> None:
        self._folder, self.called = folder, 0
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.called += 1
                answer = {**review, "response": {"uid": review["request"]["uid"], "allowed": True}}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")  # each call verifies the certificate anew
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self._server.handle_error = lambda *arguments: None  # an API server that does not trust us hangs up
        self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def load(self, data) -> None:
        """Serve a Secret's certificate from now on."""
        pair = self._folder / "pair.pem"
        pair.write_bytes(base64.b64decode(data["tls.crt"]) + base64.b64decode(data["tls.key"]))
        self._context.load_cert_chain(pair)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Place:
    """A namespace with a Service that leads to a hook, a configuration that calls it, and operators beside it."""

    def __init__(self, kubectl, namespace, hook, operators) -> None:
        self.kubectl, self.inside, self.hook, self._operators = kubectl, kubectl.within(namespace), hook, operators
        self.namespace = self.configuration = namespace

    def start_operator(self):
        return self._operators.start(webhook_configuration=self.configuration, webhook_service=SERVICE)

    def make_service(self, address) -> None:
        metadata = {"name": SERVICE, "namespace": self.namespace}
        ports = [{"name": "https", "port": 443, "protocol": "TCP"}]
        self.inside.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}})
        labels = {"kubernetes.io/service-name": SERVICE}
        self.inside.apply(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**metadata, "labels": labels},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
                "ports": [{"name": "https", "port": self.hook.port, "protocol": "TCP"}],
            }
        )

    def configure(self) -> None:
        """Make the configuration, as the chart does but for ConfigMaps: without caBundle."""
        service = {"name": SERVICE, "namespace": self.namespace, "path": "/"}
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
        webhook = {
            "name": WEBHOOK,
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"service": service},
            "failurePolicy": "Fail",  # so that a certificate which is not trusted is seen
            "sideEffects": "None",
            "rules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
        }
        head = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
        self.kubectl.apply({**head, "metadata": {"name": self.configuration}, "webhooks": [webhook]})

    def secret(self, name=SERVING_SECRET):
        return self.inside.find("secret", name)

    def wait_for_bundle(self) -> str:
        """Wait until the configuration trusts what the serving Secret says; return it."""

        def is_there():
            (webhook,) = self.kubectl.get(KIND, self.configuration)["webhooks"]
            secret = self.secret()
            bundle = webhook["clientConfig"].get("caBundle")
            if not (secret and bundle and secret["data"]["ca.crt"] == bundle):
                raise NotYetError(f"bundle {bundle}, Secret {bool(secret)}")
            return bundle

        return wait_for("a bundle in the configuration", is_there, limit_s=HEALED_S)

    def call(self) -> None:
        """Make something that the hook is asked about.

        Raises:
            KubectlError: the API server did not trust the hook.
        """
        self.inside.run("create", "configmap", "probe", "--dry-run=server")

    def wait_until_called(self) -> None:
        """Wait until the API server, which reads configurations a moment late, trusts and calls the hook."""

        def is_called():
            before = self.hook.called
            try:
                self.call()
            except KubectlError as error:
                raise NotYetError(str(error)) from None
            return self.hook.called > before

        wait_for("the API server to call the webhook", is_called, limit_s=HEALED_S)


@pytest.fixture
def place(api_server, kubectl, namespace, tmp_path):
    with ExitStack() as stack:
        hook = Hook(tmp_path)
        stack.callback(hook.stop)
        operators = Operators(
            tmp_path / "operators", kubeconfig=api_server.kubeconfig, namespace=namespace, stack=stack
        )
        (tmp_path / "operators").mkdir()
        place = Place(kubectl, namespace, hook, operators)
        place.make_service(own_address())
        place.configure()
        stack.callback(kubectl.delete, KIND, place.configuration)
        yield place


@pytest.mark.short
def test_the_api_server_trusts_what_the_operator_made(place):
    operator = place.start_operator()
    place.wait_for_bundle()
    place.hook.load(place.secret()["data"])
    place.wait_until_called()
    operator.wait_until_serving()
    wait_for("the expiry", lambda: operator.metric("pykvcache_operator_webhook_certificate_expiry_timestamp_seconds"))
    assert operator.metric("pykvcache_operator_webhook_certificate_failures_total") == 0


def test_a_certificate_of_somebody_else_is_not_trusted(place, tmp_path):
    place.start_operator()
    place.wait_for_bundle()
    place.hook.load(place.secret()["data"])
    place.wait_until_called()
    other = place.secret(AUTHORITY_SECRET)["data"]  # good for signing, not for serving under this name
    place.hook.load(other)
    with pytest.raises(KubectlError, match="x509"):
        place.call()


def test_what_people_break_is_healed_while_the_old_certificate_is_served(place):
    place.start_operator()
    first = place.wait_for_bundle()
    place.hook.load(place.secret()["data"])
    place.wait_until_called()

    place.inside.delete("secret", AUTHORITY_SECRET)
    wait_for("a new authority", lambda: place.secret(AUTHORITY_SECRET), limit_s=HEALED_S)
    wait_for("both authorities", lambda: place.wait_for_bundle() != first, limit_s=HEALED_S)
    place.wait_until_called()  # with the certificate that the lost authority signed

    place.configure()  # as an administrator who applies the manifest again
    wipe = [{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]
    place.kubectl.run("patch", KIND, place.configuration, "--type=json", "-p", json.dumps(wipe))
    place.wait_for_bundle()
    place.wait_until_called()

    place.inside.delete("secret", SERVING_SECRET)
    wait_for("a new certificate", place.secret, limit_s=HEALED_S)
    place.hook.load(place.secret()["data"])
    place.wait_until_called()


def test_applying_the_manifest_again_leaves_the_bundle(place):
    place.start_operator()
    before = place.wait_for_bundle()
    place.configure()
    (webhook,) = place.kubectl.get(KIND, place.configuration)["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == before
