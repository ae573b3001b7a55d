"""`pykvcache-sidecar node`: help, mistakes, packages that are not installed."""

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
    return CliRunner().invoke(app, ["node", *arguments], prog_name="pykvcache-sidecar", env={"NODE_NAME": None})


def test_help_says_what_it_does_and_what_it_needs():
    text = " ".join(invoke("--help").output.split())
    for words in (
        "never formats",
        "csi.pykvcache.io",
        "--root-dir",
        "NODE_NAME",
        "calibration Jobs",
        "service account",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--node-name"]),
        (["--node-name", ""], ["--node-name", "kubectl get nodes"]),
        (["--node-name", "n", "--kubelet-dir", "kubelet"], ["--kubelet-dir kubelet", "absolute"]),
        (["--node-name", "n", "--allowed-path", "/mnt/../etc"], ["--allowed-path /mnt/../etc"]),
        (["--node-name", "n", "--disks", "/mnt/a,mnt/*"], ["--disks mnt/*"]),
        (["--node-name", "n", "--interval", "60"], ["--interval 60", "10"]),
        (["--node-name", "n", "--listen", "nowhere"], ["--listen", "0.0.0.0:9478"]),
    ],
)
def test_a_wrong_option_ends_the_start_with_what_to_change(options, words):
    result = invoke(*options)
    assert result.exit_code == 2
    assert [word for word in words if word not in result.output] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ["grpc", "kubernetes", "google.protobuf"])
def test_a_package_that_only_the_agent_needs_is_named_with_its_extra_and_hinders_nothing_else(package):
    def run(*arguments):
        command = [sys.executable, "-c", WITHOUT.format(package=package), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    agent = run("node", "--node-name", "n")
    assert (agent.returncode, "Traceback" in agent.stderr) == (2, False)
    assert f"needs {package}" in agent.stderr
    assert "pip install 'py-kvcache[node]'" in agent.stderr
    assert run("run", "--help").returncode == 0
