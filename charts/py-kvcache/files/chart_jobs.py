"""What the pods of the Helm chart do: test an installation, apply the pool of the values, delete pools at uninstall.

Runs in the operator's image, one short process a pod, with the rights of the pod's service account. Every wait ends at
a deadline, with exit code 1 and a last line that says what was missing and what to do.
"""

import argparse
import base64
import json
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

GROUP, VERSION = "pykvcache.io", "v1alpha1"
COMPONENT = "app.kubernetes.io/name=py-kvcache,app.kubernetes.io/component="
PERIOD_SECONDS = 2
NO_POOL = "none.test.pykvcache.io"

log = logging.getLogger("chart")


class NotReadyError(Exception):
    """Something is not as it should be yet; the message says what."""


def wait(what: str, question: Callable[[], str], *, deadline: float) -> None:
    """Ask until the answer is empty, for success; else it is what is missing. Ends the process at the deadline."""
    while True:
        try:
            missing = question()
        except (ApiException, HTTPError) as error:
            missing = f"the API server answered: {getattr(error, 'reason', None) or error}"
        except NotReadyError as error:
            missing = str(error)
        except (OSError, HTTPException) as error:
            missing = f"{type(error).__name__}: {error}"
        if not missing:
            log.info("ok: %s", what)
            return
        if time.monotonic() > deadline:
            sys.exit(f"failed: {what}: {missing}")
        time.sleep(PERIOD_SECONDS)


def objects(plural: str) -> list[dict[str, Any]]:
    """List all objects of one of our kinds."""
    answer = client.CustomObjectsApi().list_cluster_custom_object(GROUP, VERSION, plural)
    return list(answer["items"])


def served(plural: str) -> str:
    objects(plural)  # raises, if not
    return ""


class Renewal:
    """Sees whether a Lease is renewed, by its change, as clocks of nodes differ."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name, self._namespace = name, namespace
        self._first: object = None

    def missing(self) -> str:
        spec = client.CoordinationV1Api().read_namespaced_lease(self._name, self._namespace).spec
        if not spec.holder_identity:
            return f"no operator holds Lease {self._name}; look at its log: kubectl logs deploy/pykvcache-operator"
        self._first = self._first or spec.renew_time
        return "" if spec.renew_time != self._first else f"{spec.holder_identity} does not renew Lease {self._name}"


def ready_pods(namespace: str, component: str) -> list[Any]:
    """Return the ready pods of one component.

    Raises:
        NotReadyError: there is none.
    """
    pods = client.CoreV1Api().list_namespaced_pod(namespace, label_selector=COMPONENT + component).items
    ready = [pod for pod in pods for row in pod.status.conditions or [] if (row.type, row.status) == ("Ready", "True")]
    if not ready:
        raise NotReadyError(f"none of {len(pods)} {component} pods is ready; see kubectl -n {namespace} describe pods")
    return ready


def operator_missing(namespace: str) -> str:
    ready_pods(namespace, "operator")
    return ""


def webhook_missing(name: str, namespace: str, port: int) -> str:
    """Ask every webhook pod about a pod, as the API server does: over TLS, by the configuration's bundle."""
    read = client.AdmissionregistrationV1Api().read_mutating_webhook_configuration
    bundle = read(name).webhooks[0].client_config.ca_bundle
    if not bundle:
        return f"MutatingWebhookConfiguration {name} has no caBundle; who makes it says webhook.certificates.mode"
    for pod in ready_pods(namespace, "webhook"):
        address = (pod.status.pod_ip, port)
        answer = ask(address, name=f"{name}.{namespace}.svc", bundle=base64.b64decode(bundle).decode())
        patch = base64.b64decode(answer["response"].get("patch", "")).decode()
        if not answer["response"]["allowed"] or f"{GROUP}/skipped" not in patch:
            return f"{pod.metadata.name} answers otherwise than it should: {json.dumps(answer)[:500]}"
    return ""


def ask(address: tuple[str, int], *, name: str, bundle: str) -> dict[str, Any]:
    """Return a webhook's review of a pod that wants a pool that cannot be, so that it is to say why not."""
    labels = {f"{GROUP}/pool": NO_POOL}
    pod = {"metadata": {"name": "test", "labels": labels}, "spec": {"containers": [{"name": "vllm", "image": "vllm"}]}}
    request = {"uid": "test", "operation": "CREATE", "namespace": "default", "object": pod, "dryRun": True}
    request["kind"] = {"group": "", "version": "v1", "kind": "Pod"}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    context = ssl.create_default_context(cadata=bundle)
    with (
        socket.create_connection(address, timeout=10) as raw,
        context.wrap_socket(raw, server_hostname=name) as encrypted,
    ):
        connection = HTTPConnection(name)
        connection.sock = encrypted
        connection.request("POST", "/mutate?timeout=5s", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    if answer.status != 200:
        raise NotReadyError(f"{address[0]} answers {answer.status}: {text[:500].decode(errors='replace')}")
    return dict(json.loads(text))


def agents_missing() -> str:
    told = [row for row in objects("kvcachenodes") if row.get("status", {}).get("agentVersion")]
    return "" if told else "no node agent has told about its node; see kubectl -n <agent.namespace> get pods"


def test(arguments: argparse.Namespace, deadline: float) -> None:
    """Check that the API is served, an operator works, webhooks answer, and agents tell about their nodes."""
    for plural in ("kvcachepools", "kvcachenodes"):
        wait(f"the API server serves {plural}", partial(served, plural), deadline=deadline)
    wait("an operator is ready", lambda: operator_missing(arguments.namespace), deadline=deadline)
    wait("it is the active one", Renewal(arguments.lease, arguments.namespace).missing, deadline=deadline)
    if arguments.webhook:
        question = partial(webhook_missing, arguments.webhook, arguments.namespace, arguments.webhook_port)
        wait("webhooks answer with a certificate that the API server trusts", question, deadline=deadline)
    if arguments.agents:
        wait("a node agent tells about its node", agents_missing, deadline=deadline)


def apply_pool(body: dict[str, Any]) -> str:
    resource = dynamic.DynamicClient(client.ApiClient()).resources.get(
        api_version=body["apiVersion"], kind=body["kind"]
    )
    try:
        resource.server_side_apply(body=body, name=body["metadata"]["name"], field_manager="helm")
    except ApiException as error:
        if error.status in (400, 403, 409, 422):  # asking again cannot help
            sys.exit(f"failed: pool {body['metadata']['name']}: {json.loads(error.body)['message']}")
        raise
    return ""


def pool(arguments: argparse.Namespace, deadline: float) -> None:
    """Create or update the pool of the chart's values, once the API server serves its kind."""
    body = json.loads(Path(arguments.file).read_text())
    wait(f"pool {body['metadata']['name']} is applied", lambda: apply_pool(body), deadline=deadline)


def pools_left() -> str:
    """Ask for the deletion of every pool; say which are still there and why."""
    reasons = []
    for row in objects("kvcachepools"):
        name = row["metadata"]["name"]
        if "deletionTimestamp" not in row["metadata"]:
            client.CustomObjectsApi().delete_cluster_custom_object(GROUP, VERSION, "kvcachepools", name)
        told = [c for c in row.get("status", {}).get("conditions", []) if c["type"] == "Deleting"]
        reasons.append(f"{name} ({told[0]['reason']}: {told[0]['message']})" if told else name)
    return f"still there: {', '.join(reasons[:10])}; nothing was uninstalled" if reasons else ""


def cleanup(_: argparse.Namespace, deadline: float) -> None:
    """Delete all pools while operator and agents still run to clean up after them."""
    wait("no pool is left", pools_left, deadline=deadline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["test", "pool", "cleanup"])
    parser.add_argument("--namespace", default="", help="of the operator")
    parser.add_argument("--lease", default="", help="that the active operator holds")
    parser.add_argument("--webhook", default="", help="name of its configuration and its service")
    parser.add_argument("--webhook-port", type=int, default=9443, help="of its pods")
    parser.add_argument("--agents", action="store_true", help="expect a node agent, too")
    parser.add_argument("--file", default="", help="pool to apply, as JSON")
    parser.add_argument("--seconds", type=float, default=120, help="how long to wait for all")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()  # on somebody's own machine
    task = {"test": test, "pool": pool, "cleanup": cleanup}[arguments.task]
    task(arguments, time.monotonic() + arguments.seconds)


if __name__ == "__main__":
    main()
