"""The chart installed in a cluster that runs pods, with our own images: what several tests build on.

There is room for one installation per cluster, so it is removed, with all that its pools keep, before another test
module installs it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.helm import Helm, HelmError
from harness.kubectl import Kubectl
from harness.settings import REPOSITORY
from harness.waiting import stage

CHART = REPOSITORY / "charts" / "py-kvcache"
RELEASE = "py-kvcache"
NAMESPACE = "pykvcache-system"
AGENT_NAMESPACE = "pykvcache-agent"
OURS = "app.kubernetes.io/name=py-kvcache"
CRDS = ("kvcachepools.pykvcache.io", "kvcachenodes.pykvcache.io")


def run_job(kubeconfig: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Do here what a pod that Helm runs does: see files/chart_jobs.py of the chart."""
    command = [sys.executable, str(CHART / "files" / "chart_jobs.py"), *arguments]
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


class PodCluster(Protocol):
    """What is needed of a cluster."""

    kubectl: Kubectl
    kubeconfig: Path
    kubelet_root: str

    def image(self, target: str) -> str: ...


class Installation:
    """The chart in one cluster. Values are dotted paths with what JSON can hold."""

    def __init__(self, cluster: PodCluster, *, cache: Path) -> None:
        self.kubectl = cluster.kubectl
        self.helm = Helm(cache, cluster.kubeconfig, namespace=NAMESPACE)
        self._values: dict[str, Any] = {"agent.kubeletDir": cluster.kubelet_root, "webhook.replicas": 1}
        self._values["webhook.timeoutSeconds"] = 30  # its longest: later, pods start without the cache, by design
        for target in ("operator", "sidecar", "connector"):
            registry, _, name = cluster.image(target).rpartition("/")
            repository, _, tag = name.partition(":")
            self._values["images.registry"] = registry
            self._values |= {f"images.{target}.repository": repository, f"images.{target}.tag": tag}

    def install(self, values: Mapping[str, Any] | None = None) -> None:
        """Install it under Pod Security `restricted`, in place of one that is there, and wait until its pods are ready.

        Raises:
            HelmError: it was refused, or is not ready after some minutes.
        """
        self.remove()
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
        self.install_again(values)

    def install_again(self, values: Mapping[str, Any] | None = None) -> None:
        """Install it over what an uninstall left, and wait until its pods are ready."""
        with stage("chart installed"):
            self.helm.run("install", RELEASE, str(CHART), "--wait", "--timeout=180s", *self._options(values))

    def upgrade(self, values: Mapping[str, Any] | None = None) -> None:
        """Change it to other values, given in full, and wait until its pods are ready."""
        self.helm.run("upgrade", RELEASE, str(CHART), "--wait", "--timeout=180s", *self._options(values))

    def uninstall(self) -> None:
        """Remove it; CRDs and pools stay."""
        self.helm.run("uninstall", RELEASE, "--wait", "--timeout=120s")

    def remove(self) -> None:
        """Remove it and everything that it leaves; pools that it could not clean up are let go."""
        if self._is_installed():
            self.kubectl.run("delete", "kvcachepools", "--all", "--timeout=180s")
            self.uninstall()
        elif self.kubectl.find("crd", CRDS[0]):
            for pool in self.kubectl.list("kvcachepools"):
                self.kubectl.patch("kvcachepool", pool["metadata"]["name"], {"metadata": {"finalizers": None}})
        for crd in CRDS:
            self.kubectl.delete("crd", crd)
        self.kubectl.delete("namespace", NAMESPACE)

    def _is_installed(self) -> bool:
        try:
            return bool(self.helm.run("status", RELEASE))
        except HelmError:
            return False

    def _options(self, values: Mapping[str, Any] | None) -> list[str]:
        all_values = {**self._values, **(values or {})}
        return [part for path, value in all_values.items() for part in ("--set-json", f"{path}={json.dumps(value)}")]
