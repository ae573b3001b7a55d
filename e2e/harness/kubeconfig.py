"""The cluster of a kubeconfig file, made and kept by others; tests make and delete their own objects in it.

Its nodes get our images from a registry, or have them already: it is the one mode where names must be given.
"""

from pathlib import Path

from harness import images
from harness.kubectl import Kubectl
from harness.node import KUBELET_ROOT
from harness.settings import Settings, SettingsError

PUBLIC_BUSYBOX = "docker.io/library/busybox:stable"


class ExternalCluster:
    """A running cluster that we only use."""

    kubelet_root = KUBELET_ROOT
    busybox = PUBLIC_BUSYBOX

    def __init__(self, settings: Settings, *, kubectl: Path) -> None:
        assert settings.kubeconfig is not None, "checked when the settings were read"
        self._settings, self.kubeconfig = settings, settings.kubeconfig
        self.kubectl = Kubectl(kubectl, self.kubeconfig)

    def start(self) -> None:
        """Check that it answers; KubectlError if not."""
        self.kubectl.run("get", "--raw", "/readyz")

    def stop(self) -> None:
        """Leave it as it is."""

    def image(self, target: str) -> str:
        """Return a name that its nodes can pull.

        Raises:
            SettingsError: neither a name nor a registry is given.
        """
        if name := self._settings.images.get(target):
            return name
        if not self._settings.registry:
            raise SettingsError(
                f"where does this cluster get image {target} from? Set PYKVCACHE_E2E_REGISTRY=example.com/team to "
                f"build and push it, or PYKVCACHE_E2E_IMAGES={target}=NAME to use one that exists"
            )
        return images.push(target, self._settings.cache, registry=self._settings.registry)

    def logs(self) -> list[Path]:
        """Return none: its programs are not ours to read."""
        return []
