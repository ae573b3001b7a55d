"""What the pods of the Helm chart do: test an installation, apply the pool of the values, delete pools at uninstall.

Runs in the operator's image, one short process a pod, with the rights of the pod's service account. Every wait ends at
a deadline, with exit code 1 and a last line that says what was missing and what to do.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

GROUP, VERSION = "pykvcache.io", "v1alpha1"
OPERATOR = "app.kubernetes.io/name=py-kvcache,app.kubernetes.io/component=operator"
PERIOD_SECONDS = 2

log = logging.getLogger("chart")


def wait(what: str, question: Callable[[], str], *, deadline: float) -> None:
    """Ask until the answer is empty, for success; else it is what is missing. Ends the process at the deadline."""
    while True:
        try:
            missing = question()
        except (ApiException, HTTPError) as error:
            missing = f"the API server answered: {getattr(error, 'reason', None) or error}"
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


def operator_missing(namespace: str) -> str:
    pods = client.CoreV1Api().list_namespaced_pod(namespace, label_selector=OPERATOR).items
    ready = [pod for pod in pods for row in pod.status.conditions or [] if (row.type, row.status) == ("Ready", "True")]
    return "" if ready else f"none of {len(pods)} operator pods is ready; see kubectl -n {namespace} describe pods"


def agents_missing() -> str:
    told = [row for row in objects("kvcachenodes") if row.get("status", {}).get("agentVersion")]
    return "" if told else "no node agent has told about its node; see kubectl -n <agent.namespace> get pods"


def test(arguments: argparse.Namespace, deadline: float) -> None:
    """Check that the API is served, an operator works, and agents tell about their nodes."""
    for plural in ("kvcachepools", "kvcachenodes"):
        wait(f"the API server serves {plural}", partial(served, plural), deadline=deadline)
    wait("an operator is ready", lambda: operator_missing(arguments.namespace), deadline=deadline)
    wait("it is the active one", Renewal(arguments.lease, arguments.namespace).missing, deadline=deadline)
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
