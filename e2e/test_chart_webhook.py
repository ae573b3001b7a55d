"""The chart's webhook on a real API server: which pods are sent to it, who may write what, and its certificate's bundle
through upgrades. Nothing answers at the webhook's address here.
"""

import base64
import json
import re
import runpy
from contextlib import ExitStack

import pytest
import yaml

from gen_manifests import CHART, NAMESPACE
from harness.certificates import Authority
from harness.chart import AGENT_NAMESPACE, run_job
from harness.helm import Helm, HelmError
from harness.kubectl import Kubectl, KubectlError
from harness.operators import Operators
from harness.processes import free_ports
from harness.waiting import NotYetError, wait_for
from harness.webhooks import WebhookProcess
from pykvcache_contract.names import OPERATOR_FIELD_MANAGER

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

NAME = "pykvcache-webhook"
ONE = ("--set", "webhook.replicas=1")
LABEL = {"pykvcache.io/pool": "default"}
UNANSWERED = 'failed calling webhook "pods.pykvcache.io"'
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
OTHER = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "other"},
}


@pytest.fixture(scope="module")
def helm(settings, api_server):
    return Helm(settings.cache, api_server.kubeconfig, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def installed(helm, api_server):
    """The chart with its defaults; removed after the module."""
    kubectl = api_server.kubectl
    kubectl.make_namespace(NAMESPACE)
    # Other modules of this run leave the CRDs that they applied.
    helm.run("install", "py-kvcache", str(CHART), "--take-ownership", "--force-conflicts")
    kubectl.within(AGENT_NAMESPACE).wait_for("serviceaccount", "default", bool, "to be made")  # pods are tried there
    yield
    helm.run("uninstall", "py-kvcache", "--wait", "--timeout=180s")
    kubectl.delete("namespace", NAMESPACE)


@pytest.fixture
def upgrade(installed, helm):
    """A function that upgrades to some values; the defaults come back after the test."""
    yield lambda *options: helm.run("upgrade", "py-kvcache", str(CHART), *ONE, *options)
    helm.run("upgrade", "py-kvcache", str(CHART), "--server-side=true", "--force-conflicts")


def webhook_of(kubectl):
    (webhook,) = kubectl.get("mutatingwebhookconfiguration", NAME)["webhooks"]
    return webhook


# ---- which pods are sent to it ----


def pod(name, **metadata):
    container = {"name": "vllm", "image": "none", "securityContext": RESTRICTED}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name} | metadata}
    return document | {"spec": {"containers": [container], "automountServiceAccountToken": False}}


def dry_run(kubectl, document, namespace):
    kubectl.within(namespace).run("create", "--dry-run=server", "-f", "-", text=json.dumps(document))


def wait_until_refused(kubectl, document, namespace):
    """Wait until a pod is refused, as nobody answers: the API server reads configurations and labels a moment late."""

    def is_refused():
        try:
            dry_run(kubectl, document, namespace)
        except KubectlError as error:
            if UNANSWERED in str(error):
                return True
            raise
        return False

    wait_for("a refusal", is_refused)


def test_a_labelled_pod_starts_although_nobody_answers(installed, kubectl, namespace):
    dry_run(kubectl, pod("labelled", labels=LABEL), namespace)


def test_only_labelled_pods_without_the_cache_are_sent(upgrade, kubectl, namespace):
    upgrade("--set", "webhook.failurePolicy=Fail", "--set", "webhook.timeoutSeconds=2")
    wait_until_refused(kubectl, pod("labelled", labels=LABEL), namespace)
    with pytest.raises(KubectlError, match=re.escape(UNANSWERED)):
        dry_run(kubectl, pod("annotated", labels=LABEL, annotations={"a": "b"}), namespace)
    dry_run(kubectl, pod("unlabelled", labels={"app": "vllm"}), namespace)
    dry_run(kubectl, pod("injected", labels=LABEL, annotations={"pykvcache.io/injected": "0.2.0"}), namespace)
    for excluded in ("kube-system", NAMESPACE, AGENT_NAMESPACE):
        dry_run(kubectl, pod("labelled", labels=LABEL), excluded)


def test_a_namespace_without_the_label_asked_for_is_left_alone(upgrade, kubectl, namespace):
    upgrade(
        *("--set", "webhook.failurePolicy=Fail", "--set", "webhook.timeoutSeconds=2"),
        *("--set", "webhook.namespaceSelector.matchLabels.team=a"),
    )
    dry_run(kubectl, pod("labelled", labels=LABEL), namespace)
    kubectl.patch("namespace", namespace, {"metadata": {"labels": {"team": "a"}}})
    wait_until_refused(kubectl, pod("labelled", labels=LABEL), namespace)


# ---- the certificate's bundle ----


@pytest.fixture
def pem(tmp_path):
    """A CA's certificate; the API server refuses what is none."""
    return (Authority(tmp_path / "ca").folder / "ca.crt").read_text()


def write_bundle(kubectl, pem):
    """Do as the operator does."""
    path = "/webhooks/0/clientConfig/caBundle"
    patch = json.dumps([{"op": "add", "path": path, "value": base64.b64encode(pem.encode()).decode()}])
    options = ["--type=json", f"--field-manager={OPERATOR_FIELD_MANAGER}", "-p", patch]
    kubectl.run("patch", "mutatingwebhookconfiguration", NAME, *options)


def bundle_of(kubectl):
    return base64.b64decode(webhook_of(kubectl)["clientConfig"].get("caBundle", "")).decode()


def test_upgrades_and_roll_backs_leave_the_operators_bundle_alone(upgrade, helm, kubectl, pem):
    upgrade("--set", "webhook.timeoutSeconds=4")
    write_bundle(kubectl, pem)
    upgrade("--set", "webhook.failurePolicy=Fail", "--set", "webhook.timeoutSeconds=3")
    assert (webhook_of(kubectl)["failurePolicy"], bundle_of(kubectl)) == ("Fail", pem)
    helm.run("rollback", "py-kvcache")
    assert (webhook_of(kubectl)["timeoutSeconds"], bundle_of(kubectl)) == (4, pem)
    upgrade("--server-side=false")  # as Helm 3 does
    assert (webhook_of(kubectl)["timeoutSeconds"], bundle_of(kubectl)) == (5, pem)


def test_the_operator_writes_the_bundle_again_after_an_upgrade(upgrade, kubectl, pem, operator):
    write_bundle(operator, pem)
    upgrade("--set", "webhook.timeoutSeconds=4")
    write_bundle(operator, pem * 2)
    assert bundle_of(kubectl) == pem * 2


def test_a_bundle_of_ones_own_replaces_the_operators_on_request_and_goes_with_its_mode(upgrade, kubectl, pem, tmp_path):
    write_bundle(kubectl, pem)
    own = tmp_path / "own.crt"
    own.write_text(pem * 2)
    mode = [
        *("--set", "webhook.certificates.mode=Secret", "--set", "webhook.certificates.secretName=mine"),
        *("--set-file", f"webhook.certificates.caBundle={own}"),
    ]
    with pytest.raises(HelmError, match="caBundle"):
        upgrade(*mode)
    upgrade(*mode, "--force-conflicts")
    assert bundle_of(kubectl) == pem * 2
    upgrade()
    assert bundle_of(kubectl) == ""


# ---- who may write what ----


@pytest.fixture
def account(installed, kubectl, tmp_path):
    """A function that returns kubectl with a token of a service account of the release."""

    def login(name):
        token = kubectl.within(NAMESPACE).run("create", "token", name).strip()
        config = yaml.safe_load(kubectl.kubeconfig.read_text())
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        (path := tmp_path / f"{name}.conf").write_text(json.dumps(config))
        return Kubectl(kubectl.program, path)

    return login


@pytest.fixture
def operator(account):
    return account("pykvcache-operator")


def secret(name, kind, **metadata):
    metadata = {"name": name, "namespace": NAMESPACE} | metadata
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata}


def test_the_operator_writes_the_two_secrets_of_the_certificates_only(operator, kubectl, pem):
    key = base64.b64encode(pem.encode()).decode()
    inside = operator.within(NAMESPACE)
    inside.run("create", "-f", "-", text=json.dumps(secret("pykvcache-webhook-ca", "Opaque")))
    serving = secret("pykvcache-webhook-tls", "kubernetes.io/tls") | {"data": {"tls.crt": key, "tls.key": key}}
    inside.run("create", "-f", "-", text=json.dumps(serving))
    inside.patch("secret", "pykvcache-webhook-tls", {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(KubectlError, match="may write only the Secrets"):
        inside.run("create", "-f", "-", text=json.dumps(secret("other", "Opaque")))
    with pytest.raises(KubectlError, match=r"cannot get resource \"secrets\""):
        inside.get("secret", "other")
    with pytest.raises(KubectlError, match=r"cannot create resource \"secrets\""):
        operator.within("default").run("create", "-f", "-", text=json.dumps(secret("a", "Opaque", namespace="default")))
    for name in ("pykvcache-webhook-ca", "pykvcache-webhook-tls"):
        kubectl.within(NAMESPACE).delete("secret", name)


def test_the_operator_makes_no_secret_that_holds_the_token_of_another_account(operator):
    annotations = {"kubernetes.io/service-account.name": "default"}
    token = secret("pykvcache-webhook-ca", "kubernetes.io/service-account-token", annotations=annotations)
    with pytest.raises(KubectlError, match="may write only the Secrets"):
        operator.within(NAMESPACE).run("create", "-f", "-", text=json.dumps(token))


def test_the_operator_changes_no_other_webhook(operator, kubectl):
    kubectl.apply(OTHER)
    try:
        with pytest.raises(KubectlError, match='cannot get resource "mutatingwebhookconfigurations"'):
            operator.patch("mutatingwebhookconfiguration", "other", {"metadata": {"labels": {"a": "b"}}})
    finally:
        kubectl.delete("mutatingwebhookconfiguration", "other")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rules", [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*/*"]}]),
        ("failurePolicy", "Fail"),
        ("matchPolicy", "Exact"),
        ("sideEffects", "NoneOnDryRun"),
        ("timeoutSeconds", 30),
        ("reinvocationPolicy", "Never"),
        ("admissionReviewVersions", ["v1", "v2"]),
        ("namespaceSelector", {}),
        ("objectSelector", {}),
        ("matchConditions", None),
        ("clientConfig", {"url": "https://elsewhere.example/"}),
        ("clientConfig", {"service": {"name": "other", "namespace": "default"}}),
        ("name", "other.pykvcache.io"),
    ],
)
def test_the_operator_changes_nothing_of_the_webhook_but_its_bundle(operator, kubectl, field, value):
    path = f"/webhooks/0/{field}"
    step = {"op": "remove", "path": path} if value is None else {"op": "replace", "path": path, "value": value}
    with pytest.raises(KubectlError, match="may change nothing of a webhook but its caBundle"):
        operator.run("patch", "mutatingwebhookconfiguration", NAME, "--type=json", "-p", json.dumps([step]))


def test_the_operator_adds_no_webhook_and_no_label(operator, kubectl):
    second = webhook_of(kubectl) | {"name": "second.pykvcache.io"}
    for step, message in (
        ({"op": "add", "path": "/webhooks/-", "value": second}, "nothing of a webhook but its caBundle"),
        ({"op": "remove", "path": "/webhooks"}, "nothing of a webhook but its caBundle"),
        ({"op": "add", "path": "/metadata/labels/a", "value": "b"}, "nothing of a webhook's metadata"),
    ):
        with pytest.raises(KubectlError, match=message):
            operator.run("patch", "mutatingwebhookconfiguration", NAME, "--type=json", "-p", json.dumps([step]))


def test_policies_have_no_type_errors(installed, kubectl):
    for name in ("pykvcache-operator-webhook", "pykvcache-operator-secrets"):
        seen = kubectl.wait_for(
            "validatingadmissionpolicy",
            name,
            lambda row: row.get("status", {}).get("typeChecking") is not None,
            "checked",
        )
        assert not seen["status"]["typeChecking"].get("expressionWarnings"), name


def test_the_webhook_may_read_what_it_needs_and_nothing_else(account):
    webhook = account(NAME)
    for allowed in (("list", "kvcachepools.pykvcache.io"), ("watch", "namespaces")):
        assert webhook.run("auth", "can-i", *allowed).strip() == "yes"
    for verb, resource in (("list", "pods"), ("get", "secrets"), ("create", "pods"), ("patch", "kvcachepools")):
        with pytest.raises(KubectlError):  # the answer "no" is exit code 1
            webhook.run("auth", "can-i", verb, resource, "-n", NAMESPACE)


# ---- operator and webhook with the rights that the chart gives them ----


@pytest.fixture
def stack():
    """Ends what a test started."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def active(operator, kubectl, stack, tmp_path):
    """An operator that runs with the chart's options and rights, and has made certificates."""
    operators = Operators(tmp_path / "operators", kubeconfig=operator.kubeconfig, namespace=NAMESPACE, stack=stack)
    options = {"webhook_configuration": NAME, "webhook_service": NAME, "follow_pods": True, "watch_seconds": 5}
    process = operators.start(lease_name="pykvcache-operator", **options).wait_until_active()
    wait_for("a bundle", lambda: bundle_of(kubectl), limit_s=180)
    yield process
    for name in ("pykvcache-webhook-ca", "pykvcache-webhook-tls"):
        kubectl.within(NAMESPACE).delete("secret", name)


@pytest.fixture
def webhook(active, account, kubectl, stack, tmp_path):
    """A webhook that runs with the chart's rights and the operator's certificate, and its port."""
    (folder := tmp_path / "tls").mkdir()
    data = kubectl.within(NAMESPACE).wait_for("secret", "pykvcache-webhook-tls", bool, "to exist")["data"]
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(base64.b64decode(data[name]))
    (port,) = free_ports(1)
    process = WebhookProcess(tmp_path / "webhook", kubeconfig=account(NAME).kubeconfig, tls=folder, port=port)
    stack.callback(process.kill)
    return process.wait_until_ready(), port


def stand_in(kubectl, component):
    """Make a pod of a component of the release that is Ready at this machine's address."""
    labels = {"app.kubernetes.io/name": "py-kvcache", "app.kubernetes.io/component": component}
    kubectl.within(NAMESPACE).apply(pod(f"test-{component}", labels=labels))
    ready = {"type": "Ready", "status": "True"}
    status = {"status": {"conditions": [ready], "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    kubectl.within(NAMESPACE).patch("pod", f"test-{component}", status, subresource="status")


def test_helm_test_asks_the_webhook_as_the_api_server_does(webhook, kubectl, api_server):
    process, port = webhook
    for component in ("operator", "webhook"):
        stand_in(kubectl, component)
    arguments = ["test", "--namespace", NAMESPACE, "--lease", "pykvcache-operator", "--seconds", "100"]
    arguments += ["--webhook", NAME, "--webhook-port", str(port)]
    try:
        done = run_job(api_server.kubeconfig, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert process.count(result="skipped", reason="PoolNotFound") == 1
        process.kill()
        script = runpy.run_path(str(CHART / "files" / "chart_jobs.py"))
        script["config"].load_kube_config(str(api_server.kubeconfig))
        with pytest.raises(ConnectionRefusedError):
            script["webhook_missing"](NAME, NAMESPACE, port)
    finally:
        for component in ("operator", "webhook"):
            kubectl.within(NAMESPACE).run("delete", "pod", f"test-{component}", "--force", "--grace-period=0")


def test_operator_and_webhook_need_no_more_rights_than_the_chart_gives_them(active, webhook, kubectl, namespace):
    kubectl.within(namespace).apply(pod("missed", labels=LABEL))

    def told():
        events = kubectl.within(namespace).list("events")
        if "CacheNotInjected" not in [event["reason"] for event in events]:
            raise NotYetError(str([event["reason"] for event in events]))
        return True

    wait_for("an Event about the pod that was missed", told, limit_s=120)
    active.ask_to_end()
    assert active.wait_for_end() == 0
    process, _ = webhook
    for log in (active.log, process.log):
        assert "forbidden" not in log.read_text().lower()
