"""The chart on a real API server, without nodes: what it accepts, who may write what, upgrade, uninstall.

Helm installs it once for the module. Pods stay Pending, but controllers make them, so Pod Security judges them.
test_chart_cluster.py lets them run.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from gen_manifests import CHART, INSTALL, NAMESPACE
from harness.chart import run_job
from harness.crds import wait_for_crds
from harness.helm import Helm, HelmError
from harness.kubectl import Kubectl, KubectlError
from harness.operators import Agents, Operators, condition, entry
from harness.waiting import NotYetError, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

AGENTS = "pykvcache-agent"
OURS = "app.kubernetes.io/name=py-kvcache"
KINDS = (
    "clusterroles,clusterrolebindings,csidrivers,validatingadmissionpolicies,validatingadmissionpolicybindings,"
    "namespaces,deployments,daemonsets,pods,services,serviceaccounts,configmaps,roles,rolebindings,resourcequotas,jobs,"
    "mutatingwebhookconfigurations,poddisruptionbudgets"
)
LABEL = "pykvcache.io/pool.local"
POOL = {
    "apiVersion": "pykvcache.io/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"name": "scratch"},
    "spec": {"storage": {"type": "Ephemeral", "capacity": "1Gi"}},
}


@pytest.fixture(scope="module")
def cluster_kubectl(api_server) -> Kubectl:
    return api_server.kubectl


@pytest.fixture(scope="module")
def helm(settings, api_server):
    return Helm(settings.cache, api_server.kubeconfig, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def installed(helm, cluster_kubectl, api_server):
    """The chart, in a namespace under Pod Security `restricted`, on two simulated nodes; removed after the module."""
    for node in ("chart-a", "chart-b"):
        api_server.add_node(node, labels={"kubernetes.io/os": "linux"})
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster_kubectl.make_namespace(NAMESPACE, labels=labels)
    # Other modules of this run leave the CRDs that they applied.
    helm.run("install", "py-kvcache", str(CHART), "--take-ownership", "--force-conflicts")
    wait_for_crds(cluster_kubectl)
    yield
    if "py-kvcache" in helm.run("list", "--short"):
        # Who installs it next finds no namespace that is about to end.
        helm.run("uninstall", "py-kvcache", "--wait", "--timeout=180s")
    for node in ("chart-a", "chart-b"):
        cluster_kubectl.delete("node", node)
    cluster_kubectl.delete("namespace", NAMESPACE)


def pods_of(kubectl, namespace, count):
    def probe():
        pods = kubectl.within(namespace).list("pods", selector=OURS)
        if len(pods) != count:
            events = kubectl.within(namespace).list("events")
            raise NotYetError(f"{len(pods)} pods; {[row.get('message') for row in events][-3:]}")
        return pods

    return wait_for(f"{count} pods in {namespace}", probe, limit_s=120)


def test_pod_security_admits_the_operator_the_webhooks_and_one_agent_a_node(installed, kubectl):
    accounts = [pod["spec"]["serviceAccountName"] for pod in pods_of(kubectl, NAMESPACE, 3)]
    assert sorted(accounts) == ["pykvcache-operator", "pykvcache-webhook", "pykvcache-webhook"]
    agents = pods_of(kubectl, AGENTS, len(kubectl.list("nodes")))
    assert {pod["spec"]["priorityClassName"] for pod in agents} == {"system-node-critical"}


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["operator.replicas=2", "networkPolicy.enabled=true", "commonLabels.team=a"],
        ["cleanupOnUninstall=true", "pool.create=true", "pool.spec.storage.type=Ephemeral"],
        ["agent.createNamespace=false", "images.pullSecrets={a}", "agent.diskDirectories={/mnt,/data}"],
        ["webhook.failurePolicy=Fail", "webhook.timeoutSeconds=3", "webhook.namespaceSelector.matchLabels.team=a"],
        ["webhook.enabled=false"],
    ],
    ids=" ".join,
)
def test_the_api_server_accepts_every_object(installed, helm, kubectl, values):
    options = [part for value in values for part in ("--set", value)]
    rendered = helm.run("template", "py-kvcache", str(CHART), *options)
    kubectl.run("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-", text=rendered)


def test_the_api_server_accepts_the_plain_manifest(installed, kubectl):
    kubectl.run("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", str(INSTALL))


def test_policies_have_no_type_errors(installed, kubectl):
    for policy in kubectl.list("validatingadmissionpolicies", selector=OURS):
        name = policy["metadata"]["name"]
        seen = kubectl.wait_for(
            "validatingadmissionpolicy",
            name,
            lambda row: row.get("status", {}).get("typeChecking") is not None,
            "checked",
        )
        assert not seen["status"]["typeChecking"].get("expressionWarnings"), name


# ---- who may write what ----


def as_user(kubectl, folder: Path, token: str) -> Kubectl:
    """Return kubectl with a token instead of the administrator's certificate."""
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = folder / f"{hashlib.sha256(token.encode()).hexdigest()[:8]}.conf"  # a test may be two users
    path.write_text(json.dumps(config))
    return Kubectl(kubectl.program, path)


@pytest.fixture
def agent(installed, kubectl, tmp_path):
    """kubectl with the token of an agent's pod on node chart-a; the token may have been stolen there."""
    inside = kubectl.within(AGENTS)
    container = {"name": "agent", "image": "none"}
    spec = {"nodeName": "chart-a", "serviceAccountName": AGENTS, "containers": [container]}
    inside.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent-of-a"}, "spec": spec})
    uid = inside.get("pod", "agent-of-a")["metadata"]["uid"]
    bound = ["--bound-object-kind=Pod", "--bound-object-name=agent-of-a", f"--bound-object-uid={uid}"]
    yield as_user(kubectl, tmp_path, inside.run("create", "token", AGENTS, *bound).strip())
    inside.run("delete", "pod", "agent-of-a", "--force", "--grace-period=0")
    kubectl.run("delete", "kvcachenodes", "--all")


@pytest.fixture
def operator(installed, kubectl, tmp_path):
    """kubectl with a token of the operator's service account."""
    return as_user(kubectl, tmp_path, kubectl.within(NAMESPACE).run("create", "token", "pykvcache-operator").strip())


def cache_node(kubectl, name, **metadata):
    uid = kubectl.get("node", name)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
    api = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCacheNode"}
    return api | {"metadata": {"name": name, "ownerReferences": [owner]} | metadata}


def apply_status(kubectl, name, **status):
    document = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCacheNode", "metadata": {"name": name}}
    text = json.dumps(document | {"status": {"agentVersion": "1"} | status})
    kubectl.run("apply", "--server-side", "--subresource=status", "-f", "-", text=text)


def test_an_agent_writes_the_node_it_runs_on(agent, kubectl):
    agent.apply(cache_node(kubectl, "chart-a"))
    apply_status(agent, "chart-a")
    assert kubectl.get("kvcachenode", "chart-a")["status"]["agentVersion"] == "1"


def test_a_stolen_agent_token_writes_no_other_node(agent, kubectl):
    with pytest.raises(KubectlError, match="node agent of node chart-a may not write KVCacheNode chart-b"):
        agent.apply(cache_node(kubectl, "chart-b"))
    kubectl.apply(cache_node(kubectl, "chart-b"))
    with pytest.raises(KubectlError, match="may not write KVCacheNode chart-b"):
        apply_status(agent, "chart-b")
    with pytest.raises(KubectlError, match="may not write KVCacheNode chart-b"):
        agent.apply(cache_node(kubectl, "chart-b", labels={"a": "b"}))


def test_a_token_without_a_pod_writes_no_node(installed, kubectl, tmp_path):
    loose = as_user(kubectl, tmp_path, kubectl.within(AGENTS).run("create", "token", AGENTS).strip())
    with pytest.raises(KubectlError, match="not bound to a pod"):
        loose.apply(cache_node(kubectl, "chart-a"))


def test_an_agent_gives_its_object_no_other_owner_and_no_finalizer(agent, kubectl):
    wrong = cache_node(kubectl, "chart-a")["metadata"]["ownerReferences"][0] | {"name": "chart-b"}
    with pytest.raises(KubectlError, match="owned by its Node only"):
        agent.apply(cache_node(kubectl, "chart-a", ownerReferences=[wrong]))
    with pytest.raises(KubectlError, match="may not add finalizers"):
        agent.apply(cache_node(kubectl, "chart-a", finalizers=["example.org/stay"]))


def test_an_agent_writes_its_half_of_the_status_only(agent, operator, kubectl):
    profile = {"pool": "default", "poolUID": "1", "state": "Measured", "readBytesPerSecond": 1}
    agent.apply(cache_node(kubectl, "chart-a"))
    with pytest.raises(KubectlError, match=r"may not write status\.profiles"):
        apply_status(agent, "chart-a", profiles=[profile])
    document = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCacheNode", "metadata": {"name": "chart-a"}}
    text = json.dumps(document | {"status": {"profiles": [profile]}})
    operator.run("apply", "--server-side", "--field-manager=o", "--subresource=status", "-f", "-", text=text)
    apply_status(agent, "chart-a")
    assert [profile] == kubectl.get("kvcachenode", "chart-a")["status"]["profiles"]


def test_an_agent_may_do_nothing_else(agent):
    assert agent.run("auth", "can-i", "patch", "kvcachenodes.pykvcache.io").strip() == "yes"
    for verb, resource in [
        ("delete", "kvcachenodes.pykvcache.io"),
        ("patch", "kvcachepools.pykvcache.io"),
        ("patch", "nodes"),
        ("list", "pods"),
        ("get", "secrets"),
        ("create", "pods"),
    ]:
        with pytest.raises(KubectlError):  # the answer "no" is exit code 1
            agent.run("auth", "can-i", verb, resource)


def test_the_operator_changes_labels_of_its_prefix_only(operator, kubectl):
    operator.patch("node", "chart-a", {"metadata": {"labels": {"pykvcache.io/pool.x": "ready"}}})
    assert kubectl.get("node", "chart-a")["metadata"]["labels"]["pykvcache.io/pool.x"] == "ready"
    operator.patch("node", "chart-a", {"metadata": {"labels": {"pykvcache.io/pool.x": None}}})
    for patch in (
        {"metadata": {"labels": {"role": "mine"}}},
        {"metadata": {"labels": {"kubernetes.io/hostname": "other"}}},
        {"metadata": {"labels": {"kubernetes.io/os": None}}},
        {"metadata": {"labels": {"pykvcache.io.example.org/x": "y"}}},
    ):
        with pytest.raises(KubectlError, match=r"only labels of nodes that begin with pykvcache\.io/"):
            operator.patch("node", "chart-a", patch)
    for patch in ({"metadata": {"annotations": {"a": "b"}}}, {"spec": {"unschedulable": True}}):
        with pytest.raises(KubectlError, match="nothing of a node but its labels"):
            operator.patch("node", "chart-a", patch)


def test_the_operator_makes_claims_of_its_prefix_only(operator, kubectl, namespace):
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec}
    inside = operator.within(namespace)
    inside.apply(claim | {"metadata": {"name": "pykvcache-models"}})
    with pytest.raises(KubectlError, match="begin with pykvcache-"):
        inside.apply(claim | {"metadata": {"name": "database"}})
    kubectl.within(namespace).apply(claim | {"metadata": {"name": "database"}})
    with pytest.raises(KubectlError, match="begin with pykvcache-"):
        inside.delete("pvc", "database")
    inside.delete("pvc", "pykvcache-models", wait=False)


@pytest.fixture
def no_pools(installed, kubectl):
    yield
    for pool in kubectl.list("kvcachepools"):
        kubectl.patch("kvcachepool", pool["metadata"]["name"], {"metadata": {"finalizers": None}})
    kubectl.run("delete", "kvcachepools", "--all")


def test_the_operator_needs_no_more_rights_than_the_chart_gives_it(no_pools, operator, kubectl, namespace, tmp_path):
    local = {"type": "NodeLocal", "capacityPerNode": "1Gi"}
    selected = {"nodeSelector": {"kubernetes.io/hostname": "chart-a"}}
    shared = {"type": "SharedFilesystem", "storageClassName": "fast", "capacity": "1Gi"}
    with ExitStack() as stack:
        operators = Operators(tmp_path / "log", kubeconfig=operator.kubeconfig, namespace=NAMESPACE, stack=stack)
        process = operators.start(lease_name="pykvcache-operator", calibration_image="none").wait_until_active()
        kubectl.apply(POOL | {"metadata": {"name": "local"}, "spec": {"storage": local, **selected}})
        allowed = {"allowedNamespaces": {"names": [namespace]}}
        kubectl.apply(POOL | {"metadata": {"name": "shared"}, "spec": {"storage": shared, **allowed}})
        Agents(kubectl).report("chart-a", entry(kubectl.get("kvcachepool", "local")))
        kubectl.wait_for("kvcachepool", "local", lambda pool: condition(pool, "Ready")[0] == "True", "to be Ready")
        kubectl.wait_for("node", "chart-a", lambda node: LABEL in node["metadata"]["labels"], f"to have label {LABEL}")
        kubectl.within(namespace).wait_for("pvc", "pykvcache-shared", bool, "to exist")
        kubectl.delete("kvcachenode", "chart-a")
        for pool in ("local", "shared"):
            kubectl.delete("kvcachepool", pool)
        process.ask_to_end()
        assert process.wait_for_end() == 0
    assert "forbidden" not in process.log.read_text().lower()


# ---- what Helm's pods do ----


def test_the_pool_of_the_values_is_made_and_changed(no_pools, api_server, kubectl, tmp_path):
    file = tmp_path / "pool.json"
    for capacity in ("1Gi", "2Gi"):
        file.write_text(json.dumps(POOL | {"spec": {"storage": {"type": "Ephemeral", "capacity": capacity}}}))
        done = run_job(api_server.kubeconfig, "pool", "--file", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        assert kubectl.get("kvcachepool", "scratch")["spec"]["storage"]["capacity"] == capacity


def test_a_wrong_pool_ends_its_job_with_the_servers_words(no_pools, api_server, tmp_path):
    file = tmp_path / "pool.json"
    file.write_text(json.dumps(POOL | {"spec": {"storage": {"type": "Nonsense"}}}))
    done = run_job(api_server.kubeconfig, "pool", "--file", str(file))
    assert done.returncode == 1
    assert "spec.storage.type: Unsupported value" in done.stderr


def test_the_clean_up_deletes_every_pool_or_says_which_stay(no_pools, api_server, kubectl):
    kubectl.apply(POOL)
    done = run_job(api_server.kubeconfig, "cleanup", "--seconds", "100")
    assert done.returncode == 0, done.stderr
    assert kubectl.list("kvcachepools") == []
    kubectl.apply(POOL | {"metadata": {"name": "stays", "finalizers": ["pykvcache.io/cleanup"]}})
    done = run_job(api_server.kubeconfig, "cleanup", "--seconds", "1")
    assert done.returncode == 1
    assert "still there: stays; nothing was uninstalled" in done.stderr


def test_the_test_says_what_is_missing(installed, api_server):
    done = run_job(
        api_server.kubeconfig, "test", "--namespace", NAMESPACE, "--lease", "pykvcache-operator", "--seconds", "1"
    )
    assert done.returncode == 1
    assert "none of 1 operator pods is ready" in done.stderr


# ---- upgrade and uninstall: last, as they change what is installed ----


def test_an_upgrade_keeps_pools_and_renews_crds(installed, helm, kubectl):
    kubectl.apply(POOL)
    before = kubectl.get("kvcachepool", "scratch")["metadata"]["uid"]
    column = [{"name": "Old", "type": "string", "jsonPath": ".metadata.name"}]
    patch = [{"op": "replace", "path": "/spec/versions/0/additionalPrinterColumns", "value": column}]
    kubectl.run("patch", "crd", "kvcachepools.pykvcache.io", "--type=json", "-p", json.dumps(patch))
    helm.run("upgrade", "py-kvcache", str(CHART), "--set", "operator.replicas=2", "--force-conflicts")
    assert kubectl.get("kvcachepool", "scratch")["metadata"]["uid"] == before
    version = kubectl.get("crd", "kvcachepools.pykvcache.io")["spec"]["versions"][0]
    assert "Old" not in [column["name"] for column in version["additionalPrinterColumns"]]
    assert kubectl.within(NAMESPACE).get("deployment", "pykvcache-operator")["spec"]["replicas"] == 2
    assert kubectl.within(NAMESPACE).find("poddisruptionbudget", "pykvcache-operator")


def test_an_uninstall_leaves_crds_and_pools_and_nothing_else(installed, helm, kubectl):
    kubectl.apply(POOL)
    helm.run("uninstall", "py-kvcache", "--wait", "--timeout=180s")
    assert kubectl.get("kvcachepool", "scratch")

    def left():
        text = kubectl.run("get", KINDS, "--all-namespaces", "-l", OURS, "-o", "name")
        if text.strip():
            raise NotYetError(text)
        return True

    wait_for("everything else to be gone", left, limit_s=120)


def test_crds_that_came_from_elsewhere_are_taken_over_on_request(installed, helm, kubectl):
    kubectl.apply(POOL)
    for crd in ("kvcachepools.pykvcache.io", "kvcachenodes.pykvcache.io"):
        kubectl.patch("crd", crd, {"metadata": {"annotations": {"meta.helm.sh/release-name": None}}})
    with pytest.raises(HelmError, match="invalid ownership metadata"):
        helm.run("install", "py-kvcache", str(CHART))
    helm.run("install", "py-kvcache", str(CHART), "--take-ownership")
    assert kubectl.get("kvcachepool", "scratch")


def test_it_can_be_installed_again_over_what_an_uninstall_left(installed, helm, kubectl):
    kubectl.apply(POOL)
    helm.run("uninstall", "py-kvcache", "--wait", "--timeout=180s")
    helm.run("install", "py-kvcache", str(CHART))
    assert kubectl.get("kvcachepool", "scratch")
