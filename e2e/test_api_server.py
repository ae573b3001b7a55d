"""The control plane without nodes that other tests build on."""

import pytest

from harness.kubectl import KubectlError

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]


def test_objects_are_kept_and_deleted_with_their_namespace(api_server, kubectl, namespace):
    inside = kubectl.within(namespace)
    inside.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"key": "value"}})
    assert inside.get("configmap", "a")["data"] == {"key": "value"}
    kubectl.delete("namespace", namespace)
    assert inside.find("configmap", "a") is None


def test_the_objects_of_a_simulated_node_go_with_it(api_server, kubectl, namespace):
    api_server.add_node("simulated", labels={"disk": "fast"})
    node = kubectl.get("node", "simulated")
    assert node["metadata"]["labels"]["disk"] == "fast"
    owner = {"apiVersion": "v1", "kind": "Node", "name": "simulated", "uid": node["metadata"]["uid"]}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": []}
    kubectl.apply({**role, "metadata": {"name": "of-node", "ownerReferences": [owner]}})
    kubectl.delete("node", "simulated")
    kubectl.run("wait", "--for=delete", "clusterrole/of-node", "--timeout=180s")


def test_a_wait_that_ends_in_vain_says_what_was_seen_last(api_server, kubectl, namespace):
    with pytest.raises(TimeoutError, match=r"to be Succeeded; last seen: .*NotFound"):
        kubectl.within(namespace).wait_for_phase("absent", "Succeeded", limit_s=0)
    with pytest.raises(KubectlError, match='"absent" not found'):
        kubectl.within(namespace).get("pod", "absent")
