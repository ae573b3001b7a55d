"""The command itself: help, version, mistakes, packages that are not installed."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pykvcache_sidecar.commands import app

WITHOUT = """
import sys
sys.modules["{package}"] = None
from pykvcache_sidecar.main import main
main()
"""


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), prog_name="pykvcache-sidecar")


def test_help_lists_every_sub_command_with_its_summary():
    result = invoke("--help")
    assert 0 == result.exit_code
    assert "run       Keep one pool within its bounds" in result.output
    assert "simulate  Say which hit rate a pool" in result.output
    assert "node      Keep the pools of one Kubernetes node" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("package", ["typer", "rich", "prometheus_client"])
def test_a_package_that_is_not_installed_is_named_with_the_extra(package):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT.format(package=package), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert 1 == result.returncode
    assert f"needs {package}" in result.stderr
    assert "pip install 'py-kvcache[sidecar]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_sub_command_is_an_error():
    result = invoke("simulat")
    assert 2 == result.exit_code
    assert "simulat" in result.output


def test_the_version_is_printed():
    result = invoke("--version")
    assert 0 == result.exit_code
    assert result.output.startswith("pykvcache-sidecar ")
