"""The webhook that the chart installs: which pods are sent to it, and with whose certificate it answers."""

import base64
import json

import pytest

from gen_manifests import NAMESPACE
from pykvcache_contract import names

pytestmark = pytest.mark.slow  # each rendering takes Helm a fifth of a second

AGENT_NAMESPACE = "pykvcache-agent"
SERVED = ("--api-versions", "cert-manager.io/v1")
CERTIFICATES = "webhook.certificates"
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
OWN = {f"{CERTIFICATES}.mode": "Secret", f"{CERTIFICATES}.secretName": "mine", f"{CERTIFICATES}.caBundle": PEM}
CERT_MANAGER = {f"{CERTIFICATES}.mode": "CertManager"}


def as_json(values):
    return {key: json.dumps(value) for key, value in values.items()}


def webhook_of(objects):
    (configuration,) = [row for row in objects if row["kind"] == "MutatingWebhookConfiguration"]
    (webhook,) = configuration["webhooks"]
    return webhook


def test_a_webhook_that_is_away_stops_no_pod(rendered):
    webhook = webhook_of(rendered())
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["sideEffects"] == "None"
    assert webhook["timeoutSeconds"] <= 5


def test_only_labelled_pods_are_sent_to_it(rendered):
    webhook = webhook_of(rendered())
    assert webhook["objectSelector"] == {"matchExpressions": [{"key": names.POOL_NAME_LABEL, "operator": "Exists"}]}
    (rule,) = webhook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])
    (condition,) = webhook["matchConditions"]
    assert f"'{names.INJECTED_ANNOTATION}'" in condition["expression"]


@pytest.mark.parametrize("excluded", [[], ["kube-system"], [NAMESPACE, "a"]])
def test_its_own_namespaces_are_left_alone_whatever_the_values_say(rendered, excluded):
    values = {"webhook.excludedNamespaces": json.dumps(excluded), "webhook.failurePolicy": '"Fail"'}
    selector = webhook_of(rendered(values))["namespaceSelector"]
    (row,) = selector["matchExpressions"]
    assert (row["key"], row["operator"]) == ("kubernetes.io/metadata.name", "NotIn")
    assert sorted(row["values"]) == sorted({*excluded, NAMESPACE, AGENT_NAMESPACE})


def test_namespaces_can_be_asked_for_more(rendered):
    more = [{"key": "gpu", "operator": "Exists"}]
    values = {
        "webhook.namespaceSelector.matchLabels": json.dumps({"team": "a"}),
        "webhook.namespaceSelector.matchExpressions": json.dumps(more),
    }
    selector = webhook_of(rendered(values))["namespaceSelector"]
    assert selector["matchLabels"] == {"team": "a"}
    assert selector["matchExpressions"][1:] == more


def test_only_in_mode_secret_the_release_owns_the_bundle(rendered):
    assert "caBundle" not in webhook_of(rendered())["clientConfig"]
    objects = rendered(as_json(OWN))
    bundle = base64.b64decode(webhook_of(objects)["clientConfig"]["caBundle"]).decode()
    assert bundle == PEM


@pytest.mark.parametrize(
    ("values", "secret"), [({}, "pykvcache-webhook-tls"), (CERT_MANAGER, "pykvcache-webhook-tls"), (OWN, "mine")]
)
def test_it_serves_with_the_certificate_of_its_mode(rendered, values, secret):
    objects = rendered(as_json(values), *SERVED)
    (pods,) = [
        row["spec"]["template"]["spec"]
        for row in objects
        if (row["kind"], row["metadata"]["name"]) == ("Deployment", "pykvcache-webhook")
    ]
    (volume,) = [volume for volume in pods["volumes"] if "secret" in volume]
    assert (volume["secret"]["secretName"], volume["secret"]["defaultMode"]) == (secret, 0o440)


def test_cert_manager_makes_the_certificate_that_it_injects(rendered):
    objects = rendered(as_json(CERT_MANAGER), *SERVED)
    found = {(row["kind"], row["metadata"]["name"]): row for row in objects}
    configuration = found["MutatingWebhookConfiguration", "pykvcache-webhook"]
    serving = found["Certificate", "pykvcache-webhook"]["spec"]
    annotation = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert annotation == f"{NAMESPACE}/pykvcache-webhook"
    service = configuration["webhooks"][0]["clientConfig"]["service"]
    assert f"{service['name']}.{service['namespace']}.svc" in serving["dnsNames"]
    issuer = found["Issuer", serving["issuerRef"]["name"]]["spec"]
    root = found["Certificate", "pykvcache-webhook-ca"]["spec"]
    assert (issuer["ca"]["secretName"], root["isCA"]) == (root["secretName"], True)
    assert found["Issuer", root["issuerRef"]["name"]]["spec"] == {"selfSigned": {}}
