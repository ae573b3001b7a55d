"""The command line of the webhook: what it takes, and what it says about what it cannot take."""

import pytest
from typer.testing import CliRunner

from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator.injection.outcome import SIDECAR_RESOURCES
from pykvcache_operator.main import app
from pykvcache_operator.webhook.options import make_options

runner = CliRunner()
GIVEN = {
    "certificate_directory": "/etc/x",
    "listen": ":9443",
    "metrics_listen": "127.0.0.1:9412",
    "connector_image": "registry.test/connector:1",
    "sidecar_image": "registry.test/sidecar@sha256:1",
    "pull_policy": "IfNotPresent",
    "pull_secrets": ("a", "b"),
    "library_resources": "",
    "sidecar_resources": "",
    "watch_seconds": 120.0,
    "grace_seconds": 10.0,
}


def test_what_is_not_said_about_resources_is_left_to_injection():
    text = '{"requests": {"cpu": "10m", "memory": 1024}, "limits": {"cpu": 0.5}}'
    options = make_options(**{**GIVEN, "library_resources": text})
    assert options.injection.library_resources["requests"] == {"cpu": "10m", "memory": 1024}
    assert options.injection.sidecar_resources == SIDECAR_RESOURCES
    assert (options.host, options.port, options.metrics_host) == ("", 9443, "127.0.0.1")
    assert options.injection.pull_secrets == ("a", "b")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("listen", "9443", "--listen 9443: write host:port"),
        ("metrics_listen", "x:y", "--metrics-listen x:y: write host:port"),
        ("connector_image", "", "--connector-image '': write the whole name"),
        ("sidecar_image", "a b", "--sidecar-image 'a b': write the whole name"),
        ("pull_policy", "Sometimes", "write one of Always, IfNotPresent, Never"),
        ("library_resources", "{", "Write JSON such as"),
        ("library_resources", "[]", "only requests and limits are known"),
        ("sidecar_resources", '{"request": {}}', "only requests and limits are known"),
        ("sidecar_resources", '{"requests": 5}', "Write JSON such as"),
        ("sidecar_resources", '{"requests": {"cpu": "5x"}}', "--sidecar-resources: '5x' is not a quantity"),
        ("sidecar_resources", '{"requests": {"cpu": true}}', "True is no amount"),
        ("sidecar_resources", '{"requests": {"cpu": [1]}}', "[1] is no amount"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_with_what_to_write(option, value, said):
    with pytest.raises(ConfigurationError) as raised:
        make_options(**{**GIVEN, option: value})
    assert said in str(raised.value)


def test_a_wrong_option_ends_the_process_with_status_2():
    result = runner.invoke(app, ["webhook", "--connector-image=a", "--sidecar-image=b", "--listen=x"])
    assert (result.exit_code, "--listen x" in result.output) == (2, True)


def test_options_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("PYKVCACHE_WEBHOOK_CONNECTOR_IMAGE", "a")
    monkeypatch.setenv("PYKVCACHE_WEBHOOK_SIDECAR_IMAGE", "b")
    monkeypatch.setenv("PYKVCACHE_WEBHOOK_PULL_POLICY", "Sometimes")
    result = runner.invoke(app, ["webhook"])
    assert (result.exit_code, "--pull-policy Sometimes" in result.output) == (2, True)


def test_without_a_way_to_a_cluster_it_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = runner.invoke(app, ["webhook", "--connector-image=a", "--sidecar-image=b"])
    assert (result.exit_code, "Set KUBECONFIG to a file" in result.output) == (2, True)
