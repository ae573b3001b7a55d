"""Every value is documented, checked by the schema and does something; what does not fit is refused with a remedy."""

import json
import subprocess

import pytest
import yaml

from gen_manifests import CHART, chart_values

pytestmark = pytest.mark.slow  # each rendering takes Helm a fifth of a second

VALUES = chart_values((CHART / "values.yaml").read_text())
SERVED = ("--api-versions", "monitoring.coreos.com/v1", "--api-versions", "cert-manager.io/v1")
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
SECRET = {
    "webhook.certificates.mode": "Secret",
    "webhook.certificates.secretName": "tls",
    "webhook.certificates.caBundle": PEM,
}
EVERYTHING = {
    "operator.replicas": 2,
    "webhook.certificates.mode": "CertManager",
    "metrics.serviceMonitor.enabled": True,
    "metrics.podMonitor.enabled": True,
    "networkPolicy.enabled": True,
    "pool.create": True,
    "pool.spec": {"storage": {"type": "Ephemeral", "capacity": "1Gi"}},
    "cleanupOnUninstall": True,
}
OTHER = {  # for each value one that differs from its default and from EVERYTHING
    "commonLabels": {"team": "inference"},
    "crds.install": False,
    "images.registry": "registry.example/cache",
    "images.pullPolicy": "Always",
    "images.pullSecrets": ["secret"],
    "images.operator.repository": "other-operator",
    "images.operator.tag": "7.7.7",
    "images.operator.digest": f"sha256:{'a' * 64}",
    "images.sidecar.repository": "other-sidecar",
    "images.sidecar.tag": "8.8.8",
    "images.sidecar.digest": f"sha256:{'b' * 64}",
    "images.connector.repository": "other-connector",
    "images.connector.tag": "9.9.9",
    "images.connector.digest": f"sha256:{'c' * 64}",
    "storage.allowedPaths": ["/mnt/nvme"],
    "operator.replicas": 3,
    "operator.claims.enabled": False,
    "operator.resources": {"limits": {"memory": "1Gi"}},
    "operator.priorityClassName": "system-cluster-critical",
    "operator.nodeSelector": {"role": "infra"},
    "operator.tolerations": [{"operator": "Exists"}],
    "operator.affinity": {"nodeAffinity": {}},
    "operator.serviceAccountAnnotations": {"a": "b"},
    "webhook.enabled": False,
    "webhook.replicas": 3,
    "webhook.failurePolicy": "Fail",
    "webhook.timeoutSeconds": 3,
    "webhook.excludedNamespaces": [],
    "webhook.namespaceSelector.matchLabels": {"team": "inference"},
    "webhook.namespaceSelector.matchExpressions": [{"key": "gpu", "operator": "Exists"}],
    "webhook.certificates.mode": "Operator",
    "webhook.certificates.issuerRef": {"name": "corporate", "kind": "ClusterIssuer", "group": "cert-manager.io"},
    "webhook.certificates.secretName": "other",
    "webhook.certificates.caBundle": PEM * 2,
    "webhook.resources": {"limits": {"memory": "1Gi"}},
    "webhook.priorityClassName": "system-cluster-critical",
    "webhook.nodeSelector": {"role": "infra"},
    "webhook.tolerations": [{"operator": "Exists"}],
    "webhook.affinity": {"nodeAffinity": {}},
    "webhook.serviceAccountAnnotations": {"a": "b"},
    "injection.pullSecrets": ["secret"],
    "injection.library.resources": {"limits": {"memory": "1Gi"}},
    "injection.sidecar.resources": {"limits": {"memory": "1Gi"}},
    "calibration.enabled": False,
    "calibration.priorityClassName": "low",
    "agent.enabled": False,
    "agent.namespace": "elsewhere",
    "agent.createNamespace": False,
    "agent.kubeletDir": "/var/lib/k0s/kubelet",
    "agent.diskDirectories": ["/mnt", "/data"],
    "agent.diskPatterns": ["/mnt/fast*"],
    "agent.allowRootFilesystem": True,
    "agent.resources": {"limits": {"memory": "2Gi"}},
    "agent.priorityClassName": "mine",
    "agent.nodeSelector": {"gpu": "yes"},
    "agent.tolerations": [],
    "agent.affinity": {"nodeAffinity": {}},
    "agent.maxUnavailable": 3,
    "agent.serviceAccountAnnotations": {"a": "b"},
    "metrics.scrapeAnnotations": False,
    "metrics.serviceMonitor.enabled": False,
    "metrics.podMonitor.enabled": False,
    "metrics.monitorLabels": {"release": "prometheus"},
    "metrics.interval": "15s",
    "networkPolicy.enabled": False,
    "networkPolicy.apiServerPorts": [16443],
    "networkPolicy.metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    "pool.create": False,
    "pool.name": "other",
    "pool.spec": {"storage": {"type": "Ephemeral", "capacity": "2Gi"}},
    "cleanupOnUninstall": False,
    "cleanupTimeoutSeconds": 60,
}


def as_json(values):
    return {key: json.dumps(value) for key, value in values.items()}


@pytest.fixture(scope="module")
def with_everything(rendered):
    return rendered(as_json(EVERYTHING), *SERVED)


def test_helm_finds_nothing_to_complain_about(helm):
    command = [str(helm), "lint", "--strict", "--namespace", "pykvcache-system", str(CHART)]
    lint = subprocess.run(command, capture_output=True, text=True, check=False)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_the_values_tried_here_are_those_documented():
    assert set(OTHER) == {value.path for value in VALUES}


@pytest.mark.parametrize("path", OTHER)
def test_a_value_changes_what_is_installed(rendered, with_everything, path):
    basis, before = EVERYTHING, with_everything
    if path in SECRET and path != "webhook.certificates.mode":
        basis = EVERYTHING | SECRET
        before = rendered(as_json(basis), *SERVED)
    assert rendered(as_json(basis | {path: OTHER[path]}), *SERVED) != before


def test_a_value_without_documentation_is_an_error():
    with pytest.raises(SystemExit, match=r"a\.b has no comment"):
        chart_values("a:\n  b: 1\n  # Documented.\n  c: 2\n")


def groups(node, prefix=""):
    """Return the paths of all mappings of values.yaml that are not values themselves."""
    known = {value.path for value in VALUES}
    for key, child in node.items():
        if f"{prefix}{key}" not in known and isinstance(child, dict):
            yield f"{prefix}{key}."
            yield from groups(child, f"{prefix}{key}.")


@pytest.mark.parametrize("group", ["", *groups(yaml.safe_load((CHART / "values.yaml").read_text()))])
def test_a_misspelt_value_is_refused(refused, group):
    assert "'mispelt' not allowed" in refused({f"{group}mispelt": "1"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("images.pullPolicy", "Sometimes"),
        ("images.operator.digest", "sha256:abc"),
        ("images.registry", "registry.example/"),
        ("storage.allowedPaths", []),
        ("storage.allowedPaths", ["mnt"]),
        ("storage.allowedPaths", ["/mnt/"]),
        ("storage.allowedPaths", ["/"]),
        ("storage.allowedPaths", ["/mnt/../etc"]),
        ("storage.allowedPaths", ["/mnt", "/mnt"]),
        ("operator.replicas", 9),
        ("operator.replicas", "2"),
        ("operator.resources", {"request": {}}),
        ("webhook.replicas", -1),
        ("webhook.failurePolicy", "ignore"),
        ("webhook.timeoutSeconds", 60),
        ("webhook.excludedNamespaces", ["No_Name"]),
        ("webhook.certificates.mode", "Helm"),
        ("webhook.certificates.caBundle", "LS0tLS1CRUdJTg=="),
        ("webhook.certificates.caBundle", f"{PEM}x"),
        ("injection.library.resources", {"request": {}}),
        ("agent.namespace", "No_Name"),
        ("agent.kubeletDir", "var/lib/kubelet"),
        ("agent.maxUnavailable", 0),
        ("agent.maxUnavailable", "0%"),
        ("agent.maxUnavailable", "101%"),
        ("metrics.interval", "half a minute"),
        ("networkPolicy.apiServerPorts", [70000]),
        ("pool.name", "UPPER"),
        ("cleanupTimeoutSeconds", 1),
    ],
)
def test_an_impossible_value_is_refused(refused, path, value):
    message = refused({path: json.dumps(value)})
    assert f"'/{path.replace('.', '/')}" in message
    assert "values don't meet the specifications of the schema" in message


@pytest.mark.parametrize("path", ["commonLabels", "metrics.monitorLabels"])
def test_no_label_replaces_one_of_the_charts_own(refused, path):
    message = refused({path: json.dumps({"app.kubernetes.io/name": "mine"})})
    assert "invalid propertyName 'app.kubernetes.io/name'" in message


@pytest.mark.parametrize(
    ("values", "arguments", "remedy"),
    [
        ({"agent.namespace": "pykvcache-system"}, (), "set agent.namespace"),
        ({"storage.allowedPaths": ["/data/nvme"]}, (), "agent.diskDirectories"),
        ({"storage.allowedPaths": ["/mntx"]}, (), "agent.diskDirectories"),
        ({"pool.create": True}, (), "capacityPerNode"),
        ({"metrics.podMonitor.enabled": True}, (), "Install the Prometheus Operator"),
        ({"webhook.certificates.mode": "CertManager"}, (), "Install cert-manager first, or use mode Operator"),
        ({"webhook.certificates.mode": "Secret"}, (), "--set-file webhook.certificates.caBundle"),
        (SECRET | {"webhook.certificates.caBundle": ""}, (), "--set-file webhook.certificates.caBundle"),
        ({"webhook.certificates.secretName": "mine"}, (), "Set webhook.certificates.mode=Secret"),
        ({"webhook.certificates.caBundle": PEM}, (), "Set webhook.certificates.mode=Secret"),
        ({"webhook.certificates.issuerRef": {"name": "a"}}, (), "Set webhook.certificates.mode=CertManager"),
        ({}, ("--kube-version", "1.29.9"), "kubeVersion"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_with_a_remedy(refused, values, arguments, remedy):
    assert remedy in refused(as_json(values), *arguments)


def test_paths_that_the_agent_cannot_see_are_fine_without_it(rendered):
    assert rendered(as_json({"storage.allowedPaths": ["/data"], "agent.enabled": False}))


def test_settings_of_a_webhook_that_is_off_refuse_nothing(rendered):
    assert rendered(as_json({"webhook.enabled": False, "webhook.certificates.mode": "CertManager"}))
