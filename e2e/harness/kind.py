"""A cluster made by kind, for machines with docker and without root. One node, gone after the run."""

import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from harness import images
from harness.binaries import MissingError
from harness.kubeconfig import PUBLIC_BUSYBOX
from harness.kubectl import Kubectl
from harness.node import KUBELET_ROOT
from harness.waiting import stage


class KindCluster:
    """One of them, from `start` to `stop`."""

    kubelet_root = KUBELET_ROOT
    busybox = PUBLIC_BUSYBOX

    def __init__(self, cache: Path, *, kubectl: Path) -> None:
        """Choose a name.

        Raises:
            MissingError: kind is not installed, or no docker daemon answers.
        """
        if not shutil.which("kind"):
            raise MissingError("PYKVCACHE_E2E=kind needs the program kind: https://kind.sigs.k8s.io")
        if not images.has_docker():
            raise MissingError("PYKVCACHE_E2E=kind needs docker, and no daemon answers `docker version`")
        self._cache, self._name = cache, f"pykvcache-{uuid.uuid4().hex[:6]}"
        self._state = Path(tempfile.mkdtemp(prefix="kind-"))
        self.kubeconfig = self._state / "admin.conf"
        self.kubectl = Kubectl(kubectl, self.kubeconfig)

    def start(self) -> None:
        """Make it and wait until its node is Ready."""
        with stage("kind cluster ready"):
            self._kind("create", "cluster", f"--kubeconfig={self.kubeconfig}", "--wait=180s")

    def stop(self) -> None:
        """Delete it."""
        self._kind("delete", "cluster", f"--kubeconfig={self.kubeconfig}")
        shutil.rmtree(self._state)

    def image(self, target: str) -> str:
        """Build an image, give it to the node, and return its name."""
        archive = images.build(target, self._cache)
        self._kind("load", "image-archive", str(archive))
        return images.local_name(target)

    def logs(self) -> list[Path]:
        """Return the logs of its node's programs, fetched now."""
        self._kind("export", "logs", str(self._state / "logs"))
        return sorted((self._state / "logs").rglob("*.log"))

    def _kind(self, *arguments: str) -> None:
        command = ["kind", *arguments, f"--name={self._name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
