"""What the chart installs: well-formed, named and labelled alike, and with no more rights than the docs say."""

import json

import pytest
import yaml

from gen_manifests import CHART, INSTALL, NAMESPACE, VALUES_PAGE, crd_copies, generated
from pykvcache_contract import names

pytestmark = pytest.mark.slow

AGENT_NAMESPACE = "pykvcache-agent"
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CSIDriver",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "Namespace",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
SERVED = ("--api-versions", "monitoring.coreos.com/v1", "--api-versions", "cert-manager.io/v1")
CERTIFICATES = "webhook.certificates"
COMBINATIONS = {
    "defaults": {},
    "no agent": {"agent.enabled": False},
    "own namespace": {"agent.createNamespace": False, "agent.namespace": "storage"},
    "two operators": {"operator.replicas": 2},
    "network policies": {"networkPolicy.enabled": True, "networkPolicy.metricsFrom": [{"podSelector": {}}]},
    "network policies, no agent": {"networkPolicy.enabled": True, "agent.enabled": False},
    "no webhook": {"webhook.enabled": False, "networkPolicy.enabled": True, "metrics.serviceMonitor.enabled": True},
    "one webhook": {"webhook.replicas": 1, "webhook.namespaceSelector.matchLabels": {"team": "a"}},
    "certificates of cert-manager": {f"{CERTIFICATES}.mode": "CertManager"},
    "certificates of an issuer": {f"{CERTIFICATES}.mode": "CertManager", f"{CERTIFICATES}.issuerRef": {"name": "a"}},
    "own certificate": {
        f"{CERTIFICATES}.mode": "Secret",
        f"{CERTIFICATES}.secretName": "mine",
        f"{CERTIFICATES}.caBundle": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    },
    "monitors": {"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True},
    "monitors, no agent": {"metrics.podMonitor.enabled": True, "agent.enabled": False},
    "labels everywhere": {"commonLabels": {"team": "a"}, "metrics.monitorLabels": {"release": "p"}},
    "pool and clean-up": {"pool.create": True, "pool.spec": {"storage": {}}, "cleanupOnUninstall": True},
    "pull secrets": {"images.pullSecrets": ["a", "b"], "pool.create": True, "pool.spec": {"storage": {}}},
    "bare pods": {
        "metrics.scrapeAnnotations": False,
        "webhook.nodeSelector": {"kubernetes.io/os": None},
        "operator.nodeSelector": {"kubernetes.io/os": None},
        "agent.nodeSelector": {"kubernetes.io/os": None},
        "agent.tolerations": [],
        "agent.priorityClassName": "",
    },
    "all": {
        "operator.replicas": 2,
        "networkPolicy.enabled": True,
        "metrics.serviceMonitor.enabled": True,
        "metrics.podMonitor.enabled": True,
        "commonLabels": {"team": "a"},
        "images.pullSecrets": ["a"],
        "pool.create": True,
        "pool.spec": {"storage": {"type": "Ephemeral", "capacity": "1Gi"}},
        "cleanupOnUninstall": True,
    },
}


@pytest.fixture(scope="module", params=COMBINATIONS)
def objects(request, rendered):
    values = {key: json.dumps(value) for key, value in COMBINATIONS[request.param].items()}
    return rendered(values, *SERVED)


@pytest.fixture(scope="module")
def everything(rendered):
    return rendered({key: json.dumps(value) for key, value in COMBINATIONS["all"].items()}, *SERVED)


def pod_spec(thing):
    return thing["spec"] if thing["kind"] == "Pod" else thing["spec"]["template"]["spec"]


def with_pods(objects):
    return [row for row in objects if row["kind"] in {"Pod", "Job", "Deployment", "DaemonSet", "StatefulSet"}]


def deployment(objects, name):
    """Return the pod spec of one Deployment."""
    (found,) = [row for row in objects if (row["kind"], row["metadata"]["name"]) == ("Deployment", name)]
    return pod_spec(found)


def unrestricted(spec):
    """Return what Pod Security `restricted`, and our own rule of a read-only root, find wrong with a pod."""
    pod = spec.get("securityContext", {})
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    wrong += ["runs as root"] if not (pod.get("runAsNonRoot") and pod.get("runAsUser", 0)) else []
    wrong += ["seccomp"] if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault" else []
    wrong += [
        f"volume {row['name']}" for row in spec.get("volumes", []) if not {"configMap", "emptyDir", "secret"} & set(row)
    ]
    for container in spec["containers"] + spec.get("initContainers", []):
        own = container.get("securityContext", {})
        wrong += ["privileges"] if own.get("privileged") or own.get("allowPrivilegeEscalation", True) else []
        wrong += ["capabilities"] if own.get("capabilities") != {"drop": ["ALL"]} else []
        wrong += ["writable root"] if not own.get("readOnlyRootFilesystem") else []
        wrong += ["loosened"] if {"runAsUser", "runAsNonRoot", "seccompProfile"} & set(own) else []
    return wrong


# ---- form ----


def test_every_object_is_there_once(objects):
    names = [(row["kind"], row["metadata"].get("namespace"), row["metadata"]["name"]) for row in objects]
    assert len(names) == len(set(names))
    assert ("Deployment", NAMESPACE, "pykvcache-operator") in names


def test_every_object_says_its_namespace_and_its_part(objects):
    for row in objects:
        assert ("namespace" in row["metadata"]) is (row["kind"] not in CLUSTER_SCOPED), row["metadata"]
        if row["kind"] != "CustomResourceDefinition":
            assert row["metadata"]["labels"]["app.kubernetes.io/name"] == "py-kvcache"
            assert row["metadata"]["labels"]["app.kubernetes.io/component"] in {
                "operator",
                "webhook",
                "agent",
                "chart",
                "calibration",
            }


def test_selectors_find_their_own_pods_only(objects):
    labels = {
        row["metadata"]["name"]: row["spec"]["template"]["metadata"]["labels"]
        for row in objects
        if row["kind"] in {"Deployment", "DaemonSet", "Job"}
    }
    for row in objects:
        wanted = row.get("spec", {}).get("selector", {})
        if row["kind"] in {"Deployment", "DaemonSet", "PodDisruptionBudget", "Service", "ServiceMonitor", "PodMonitor"}:
            wanted = wanted.get("matchLabels", wanted).items()
            found = [name for name, has in labels.items() if wanted <= has.items()]
            assert [row["metadata"]["name"].removesuffix("-metrics")] == found, row["kind"]


def test_every_container_has_requests_and_a_memory_limit(objects):
    for row in with_pods(objects):
        for container in pod_spec(row)["containers"]:
            assert {"cpu", "memory"} == set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


def test_names_of_mounts_and_volumes_fit(objects):
    for row in with_pods(objects):
        volumes = [volume["name"] for volume in pod_spec(row)["volumes"]]
        assert len(volumes) == len(set(volumes))
        for container in pod_spec(row)["containers"]:
            assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(volumes)


def test_common_labels_are_on_every_object_and_pod(everything):
    for row in everything:
        if row["kind"] != "CustomResourceDefinition":
            assert row["metadata"]["labels"]["team"] == "a", row
        if "template" in row.get("spec", {}):
            assert row["spec"]["template"]["metadata"]["labels"]["team"] == "a"


# ---- rights ----


def test_every_pod_but_the_agents_is_restricted(objects):
    for row in with_pods(objects):
        wrong = unrestricted(pod_spec(row))
        assert bool(wrong) is (row["kind"] == "DaemonSet"), (row["metadata"]["name"], wrong)


def test_only_the_agents_namespace_is_privileged(everything):
    labels = {row["metadata"]["name"]: row["metadata"]["labels"] for row in everything if row["kind"] == "Namespace"}
    assert {AGENT_NAMESPACE} == set(labels)
    assert labels[AGENT_NAMESPACE]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_agent_sees_nothing_of_the_host_but_what_it_needs(rendered):
    (agent,) = [row for row in rendered() if row["kind"] == "DaemonSet"]
    paths = {volume["hostPath"]["path"] for volume in pod_spec(agent)["volumes"] if "hostPath" in volume}
    kubelet = "/var/lib/kubelet"
    assert paths == {
        "/mnt",
        "/sys",
        f"{kubelet}/pods",
        f"{kubelet}/plugins/csi.pykvcache.io",
        f"{kubelet}/plugins_registry",
    }
    (container,) = pod_spec(agent)["containers"]
    mounts = {mount["mountPath"]: mount.get("mountPropagation") for mount in container["volumeMounts"]}
    assert mounts[f"{kubelet}/pods"] == "Bidirectional"
    assert mounts["/mnt"] == "HostToContainer"


def rules(objects):
    for row in objects:
        for rule in row.get("rules", []) if row["kind"] in {"Role", "ClusterRole"} else []:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    yield row["kind"], row["metadata"]["name"], f"{group}/{resource}", set(rule["verbs"])


def test_no_right_is_a_wildcard_or_reaches_other_rights(everything):
    for row in everything:
        if row["kind"] in {"Role", "ClusterRole"}:
            assert "*" not in json.dumps(row["rules"])
    for _, _, resource, verbs in rules(everything):
        assert not verbs & {"escalate", "bind", "impersonate", "deletecollection"}
        assert resource not in {"/pods/exec", "/serviceaccounts/token", "/configmaps"}
        assert not resource.startswith("rbac.authorization.k8s.io/")


def test_the_only_secrets_are_those_of_the_certificates(everything):
    found = [
        (row["metadata"]["name"], rule["verbs"], rule.get("resourceNames"))
        for row in everything
        if row["kind"] in {"Role", "ClusterRole"}
        for rule in row["rules"]
        if "secrets" in rule["resources"]
    ]
    assert found == [
        ("pykvcache-operator", ["create"], None),  # a name cannot be asked for; policies/operator.yaml does
        ("pykvcache-operator", ["get", "patch"], ["pykvcache-webhook-ca", "pykvcache-webhook-tls"]),
    ]


@pytest.mark.parametrize("mode", ["CertManager", "Secret", None])
def test_an_operator_that_makes_no_certificates_reads_no_secret_and_changes_no_webhook(rendered, mode):
    own = {"secretName": "mine", "caBundle": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"}
    values = {f"{CERTIFICATES}.{key}": json.dumps(value) for key, value in own.items() if mode == "Secret"}
    values |= {f"{CERTIFICATES}.mode": json.dumps(mode)} if mode else {"webhook.enabled": "false"}
    objects = rendered(values, *SERVED)
    rights = {resource: verbs for _, name, resource, verbs in rules(objects) if name == "pykvcache-operator"}
    assert "/secrets" not in rights
    assert rights.get("admissionregistration.k8s.io/mutatingwebhookconfigurations", {"get"}) == {"get"}
    arguments = deployment(objects, "pykvcache-operator")["containers"][0]["args"]
    assert not [text for text in arguments if text.startswith("--webhook-configuration")]
    assert ("--follow-pods" in arguments) is (mode is not None)


def test_who_may_write_what_over_the_whole_cluster(everything):
    writes = {}
    for kind, name, resource, verbs in rules(everything):
        if kind == "ClusterRole" and (written := verbs - {"get", "list", "watch"}):
            writes[name, resource] = written
    assert writes == {
        ("pykvcache-operator", "pykvcache.io/kvcachepools"): {"patch"},
        ("pykvcache-operator", "pykvcache.io/kvcachepools/status"): {"patch"},
        ("pykvcache-operator", "pykvcache.io/kvcachenodes/status"): {"patch"},
        ("pykvcache-operator", "/nodes"): {"patch"},
        ("pykvcache-operator", "/persistentvolumeclaims"): {"create", "patch", "delete"},
        ("pykvcache-operator", "events.k8s.io/events"): {"create"},
        ("pykvcache-operator", "admissionregistration.k8s.io/mutatingwebhookconfigurations"): {"patch"},
        ("pykvcache-agent", "pykvcache.io/kvcachenodes"): {"create", "patch"},
        ("pykvcache-agent", "pykvcache.io/kvcachenodes/status"): {"patch"},
        ("pykvcache-pool", "pykvcache.io/kvcachepools"): {"create", "patch"},
        ("pykvcache-cleanup", "pykvcache.io/kvcachepools"): {"delete"},
    }


def test_the_agent_may_read_only_what_it_reads(everything):
    reads = {
        resource: verbs & {"get", "list", "watch"}
        for _, name, resource, verbs in rules(everything)
        if name == "pykvcache-agent"
    }
    assert reads == {
        "pykvcache.io/kvcachepools": {"list", "watch"},
        "pykvcache.io/kvcachenodes": {"list", "watch"},
        "pykvcache.io/kvcachenodes/status": set(),
        "/nodes": {"get"},
        "/namespaces": {"list", "watch"},
    }


def test_the_webhook_reads_pools_and_namespaces_and_writes_nothing(everything):
    assert {resource: verbs for _, name, resource, verbs in rules(everything) if name == "pykvcache-webhook"} == {
        "pykvcache.io/kvcachepools": {"list", "watch"},
        "/namespaces": {"list", "watch"},
    }


def test_who_may_write_what_in_one_namespace(everything):
    writes = {
        (row["metadata"]["namespace"], resource, verb)
        for row in everything
        if row["kind"] == "Role"
        for _, _, resource, verbs in rules([row])
        for verb in verbs - {"get", "list", "watch"}
    }
    assert writes == {
        (NAMESPACE, "coordination.k8s.io/leases", "create"),
        (NAMESPACE, "coordination.k8s.io/leases", "update"),
        (NAMESPACE, "batch/jobs", "create"),
        (NAMESPACE, "batch/jobs", "delete"),
        (NAMESPACE, "/secrets", "create"),
        (NAMESPACE, "/secrets", "patch"),
        ("default", "events.k8s.io/events", "create"),
    }


def test_without_claims_the_operator_may_not_touch_claims(rendered):
    objects = rendered({"operator.claims.enabled": "false"})
    assert "/persistentvolumeclaims" not in {resource for _, _, resource, _ in rules(objects)}


def test_every_policy_fails_closed_and_is_bound_to_deny(everything):
    policies = {
        row["metadata"]["name"]: row["spec"] for row in everything if row["kind"] == "ValidatingAdmissionPolicy"
    }
    bindings = [row["spec"] for row in everything if row["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert set(policies) == {
        "pykvcache-agent-own-node",
        "pykvcache-operator-node-labels",
        "pykvcache-operator-claims",
        "pykvcache-operator-secrets",
        "pykvcache-operator-webhook",
    }
    assert all(spec["failurePolicy"] == "Fail" for spec in policies.values())
    assert sorted(policies) == sorted(binding["policyName"] for binding in bindings)
    assert all(binding["validationActions"] == ["Deny"] for binding in bindings)


# ---- what is generated ----


def test_crds_of_the_chart_equal_those_of_the_repository():
    copies = crd_copies()
    assert {path.name for path in copies} == {path.name for path in (CHART / "files" / "crds").iterdir()}
    assert len(copies) == 2
    for path, text in copies.items():
        assert path.read_text() == text, f"{path.name} differs from crds/; run `make gen` and commit it"


def test_crds_outlive_the_release(rendered):
    definitions = [row for row in rendered() if row["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 2
    for row in definitions:
        assert row["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_generated_files_are_what_would_be_generated(helm):
    for path, text in generated(helm).items():
        assert path.read_text() == text, f"{path.name} is out of date; run `make gen` and commit it"


def test_the_plain_manifest_has_every_object_but_helms_own(rendered):
    helms = {(row["kind"], row["metadata"]["name"]) for row in rendered({}, "--skip-tests")}
    plain = {(row["kind"], row["metadata"]["name"]) for row in yaml.safe_load_all(INSTALL.read_text())}
    assert plain - helms == {("Namespace", NAMESPACE)}
    assert helms - plain == {("ConfigMap", "pykvcache-chart")}
    assert "Helm" not in INSTALL.read_text().replace("helm.sh/", "")


def test_the_documentation_says_what_to_do_for_every_reason():
    reasons = [value for name, value in vars(names).items() if name.startswith("REASON_")]
    assert len(reasons) > 5
    page = VALUES_PAGE.read_text()
    assert [] == [reason for reason in reasons if f"`{reason}`" not in page]
