"""A thin helper around Helm, as a cluster's administrator."""

import subprocess
from pathlib import Path

from harness.binaries import fetch_tools

COMMAND_LIMIT_S = 600


class HelmError(Exception):
    """Helm failed; the message holds its own words."""


class Helm:
    """Helm on one cluster and namespace; the program comes from the cache, where it is put once."""

    def __init__(self, cache: Path, kubeconfig: Path, *, namespace: str) -> None:
        self.program, self.kubeconfig, self.namespace = fetch_tools(cache) / "helm", kubeconfig, namespace

    def run(self, *arguments: str) -> str:
        """Run it and return its standard output.

        Raises:
            HelmError: it failed.
        """
        options = ["--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace]
        command = [str(self.program), *arguments, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S)
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
