"""The command line: what it says when it cannot run."""

import pytest
from typer.testing import CliRunner

from pykvcache_operator.main import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_without_a_way_to_a_cluster_it_says_what_to_set():
    result = runner.invoke(app, ["run", "--namespace", "x", "--listen", "127.0.0.1:0"])
    assert result.exit_code == 2
    assert "Set KUBECONFIG to a file" in result.output


def test_options_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("PYKVCACHE_OPERATOR_NAMESPACE", "x")
    monkeypatch.setenv("PYKVCACHE_OPERATOR_ALLOWED_HOST_PATH", "/mnt relative")
    result = runner.invoke(app, ["run"])
    assert result.exit_code == 2
    assert "--allowed-host-path relative" in result.output


def test_the_namespace_is_needed():
    result = runner.invoke(app, ["run"])
    assert result.exit_code == 2
    assert "--namespace" in result.output
