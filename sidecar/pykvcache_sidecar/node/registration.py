"""Telling kubelet that there is a CSI driver, without the usual registrar beside it; and both sockets as one thing.

Kubelet watches `plugins_registry`: it connects to each socket that appears, asks what it is and where the driver
answers, and tells how it went. Once more after its own restart, for all that are there. It takes a driver off its list
when the registration socket goes. So nothing is to be repeated by us, as long as the socket exists: whoever runs this
calls `check` now and then, which makes sockets again that somebody removed.

What kubelet tells arrives in gRPC's thread; all else runs in the caller's.
"""

import logging
import os
from typing import Any

from pykvcache_contract.names import DRIVER_NAME
from pykvcache_sidecar.node.csi import NodeService
from pykvcache_sidecar.node.csi_messages import REGISTRATION, REGISTRATION_PACKAGE
from pykvcache_sidecar.node.sockets import Endpoint, SocketError, generic_handler

log = logging.getLogger(__name__)

THREADS = 8
"""Volumes mounted at a time. A disk that hangs keeps a thread; then kubelet's calls are refused when all are kept."""
_CSI_VERSIONS = ["1.0.0"]  # kubelet compares the major version


class Driver:
    """The CSI driver on this node, registered with kubelet.

    Args:
        service: answers the calls.
        kubelet_directory: kubelet's `--root-dir`, seen by this process at the same path.
    """

    def __init__(self, service: NodeService, *, kubelet_directory: str) -> None:
        self._plugin_folder = f"{kubelet_directory}/plugins/{DRIVER_NAME}"
        self._registry = f"{kubelet_directory}/plugins_registry"
        self._csi = Endpoint(f"{self._plugin_folder}/csi.sock", service.handlers(), threads=THREADS)
        self._registration = Endpoint(f"{self._registry}/{DRIVER_NAME}-reg.sock", [self._handler()], threads=1)
        self._is_registered = False
        self._trouble = "kubelet has not asked yet"

    @property
    def trouble(self) -> str:
        """Return why pods get no volumes; empty if kubelet has registered the driver."""
        return "" if self._is_registered else self._trouble

    def start(self) -> None:
        """Listen, and be found by kubelet.

        Raises:
            SocketError: kubelet's directory is not what it should be.
        """
        if not os.path.isdir(self._registry):
            raise SocketError(
                f"kubelet has no {self._registry}. Set the kubelet directory to kubelet's --root-dir, and mount it "
                "into the agent at the same path."
            )
        os.makedirs(self._plugin_folder, mode=0o750, exist_ok=True)
        self._csi.start()
        self._registration.start()

    def check(self) -> None:
        """Make sockets again that were removed, so that kubelet registers the driver once more.

        Raises:
            SocketError: they cannot be made; the next check tries again.
        """
        if os.path.isdir(self._registry):
            os.makedirs(self._plugin_folder, mode=0o750, exist_ok=True)
        for endpoint in (self._csi, self._registration):
            if not endpoint.check():
                log.warning("the socket %s was gone or taken over", endpoint.path)

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Take the driver off kubelet's list, then end; mounts stay as they are."""
        self._registration.stop()
        self._csi.stop(grace_seconds=grace_seconds)

    def _handler(self) -> Any:
        names = {
            "GetInfo": ("InfoRequest", "PluginInfo", self._info),
            "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse", self._note),
        }
        return generic_handler(
            f"{REGISTRATION_PACKAGE}.Registration",
            {name: (REGISTRATION[ask], REGISTRATION[tell], call) for name, (ask, tell, call) in names.items()},
        )

    def _info(self, _: Any) -> Any:
        return REGISTRATION["PluginInfo"](
            type="CSIPlugin", name=DRIVER_NAME, endpoint=self._csi.path, supported_versions=_CSI_VERSIONS
        )

    def _note(self, status: Any) -> Any:
        self._is_registered, self._trouble = status.plugin_registered, status.error or "kubelet gives no reason"
        if status.plugin_registered:
            log.info("kubelet has registered the driver %s", DRIVER_NAME)
        else:
            log.error("kubelet does not register the driver %s: %s", DRIVER_NAME, self._trouble)
        return REGISTRATION["RegistrationStatusResponse"]()
