"""The CSI node service: kubelet asks for a pod's volume, the agent says where it is, and it is mounted.

Only inline volumes of pods (`csi:` in the pod's spec) are served; nothing is attached, staged or provisioned. Who asks
is known from what kubelet adds to the volume's attributes, if the CSIDriver object has `podInfoOnMount: true`. Without
that a pod could write these attributes itself. So the pod's uid among them must be the one in the target's path, which
kubelet chooses and no pod knows beforehand.

Kubelet repeats a call that failed or took more than two minutes; a call for a target where another is still at work is
refused. NOT_FOUND, PERMISSION_DENIED and INVALID_ARGUMENT end kubelet's attempt, UNAVAILABLE leaves it unsure, and it
will ask to unmount. Messages reach the pod's events. Handlers run in gRPC's threads.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from pykvcache_contract.names import DRIVER_NAME, POOL_ATTRIBUTE
from pykvcache_sidecar.node.csi_messages import CSI, CSI_PACKAGE
from pykvcache_sidecar.node.mounts import Target
from pykvcache_sidecar.node.places import Code, Places, Refusal
from pykvcache_sidecar.node.sockets import Method, generic_handler

log = logging.getLogger(__name__)

_KUBELET_PREFIX = "csi.storage.k8s.io/"
_EPHEMERAL = f"{_KUBELET_PREFIX}ephemeral"
_NAMESPACE = f"{_KUBELET_PREFIX}pod.namespace"
_POD = f"{_KUBELET_PREFIX}pod.name"
_POD_UID = f"{_KUBELET_PREFIX}pod.uid"
_SERVICE_ACCOUNT = f"{_KUBELET_PREFIX}serviceAccount.name"
_CSI_VOLUME = re.compile(r"pods/([^/]+)/volumes/kubernetes\.io~csi/[^/]+/mount")


@dataclass(frozen=True, slots=True)
class Wish:
    """A checked request for a volume.

    Args:
        target: where it is to be mounted.
        pool: as the pod names it.
        namespace: of the pod; pod and service_account likewise.
        read_only: the pod asks for no more.
    """

    target: Target
    pool: str
    namespace: str
    pod: str
    service_account: str
    read_only: bool


class NodeService:
    """Answers kubelet.

    Args:
        places: knows pools and who is allowed.
        node_name: of the Node object.
        kubelet_directory: where pods' volumes are; seen by the agent at the same path.
        version: of this program.
    """

    def __init__(self, places: Places, *, node_name: str, kubelet_directory: str, version: str) -> None:
        self._places = places
        self._node_name = node_name
        self._kubelet_directory = kubelet_directory
        self._version = version
        self._lock = threading.Lock()
        self._targets_at_work: set[str] = set()
        """Guarded by the lock."""

    def handlers(self) -> "list[grpc.GenericRpcHandler]":
        """Return what a gRPC server needs."""
        identity = {
            "GetPluginInfo": self._plugin_info,
            "GetPluginCapabilities": _nothing("GetPluginCapabilitiesResponse"),
            "Probe": _nothing("ProbeResponse"),
        }
        node = {
            "NodeGetInfo": self._node_info,
            "NodeGetCapabilities": _nothing("NodeGetCapabilitiesResponse"),
            "NodePublishVolume": self._publish,
            "NodeUnpublishVolume": self._unpublish,
        }
        return [
            generic_handler(
                f"{CSI_PACKAGE}.{service}",
                {name: (CSI[f"{name}Request"], CSI[f"{name}Response"], method) for name, method in methods.items()},
            )
            for service, methods in (("Identity", identity), ("Node", node))
        ]

    def _plugin_info(self, _: Any) -> Any:
        return CSI["GetPluginInfoResponse"](name=DRIVER_NAME, vendor_version=self._version)

    def _node_info(self, _: Any) -> Any:
        return CSI["NodeGetInfoResponse"](node_id=self._node_name)

    def _publish(self, request: Any) -> Any:
        wish = parse(request, kubelet_directory=self._kubelet_directory)
        with self._alone(wish.target.path), _mount_errors(wish.target.path):
            place = self._places.place(
                pool=wish.pool, namespace=wish.namespace, pod=wish.pod, service_account=wish.service_account
            )
            if place.directory is None:
                log.warning("pod %s/%s starts without pool %s: %s", wish.namespace, wish.pod, wish.pool, place.reason)
                wish.target.mount_marker(place.reason)
            else:
                wish.target.mount_directory(place.directory, read_only=wish.read_only)
        return CSI["NodePublishVolumeResponse"]()

    def _unpublish(self, request: Any) -> Any:
        target, _ = _target(request.target_path, kubelet_directory=self._kubelet_directory)
        with self._alone(target.path), _mount_errors(target.path):
            target.unmount()
        return CSI["NodeUnpublishVolumeResponse"]()

    @contextlib.contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        with self._lock:
            if path in self._targets_at_work:
                raise Refusal(Code.UNAVAILABLE, f"an earlier call for {path} is still at work; it is asked again")
            self._targets_at_work.add(path)
        try:
            yield
        finally:
            with self._lock:
                self._targets_at_work.remove(path)


def parse(request: Any, *, kubelet_directory: str) -> Wish:
    """Return what a NodePublishVolumeRequest asks for.

    Raises:
        Refusal: INVALID_ARGUMENT; the message says what the pod, or the CSIDriver object, has to change.
    """
    attributes = dict(request.volume_context)
    target, pod_uid = _target(request.target_path, kubelet_directory=kubelet_directory)
    if not request.volume_id:
        raise _invalid("the request has no volume_id")
    _check_capability(request)
    _check_attributes(attributes)
    if pod_uid != attributes[_POD_UID]:
        raise _invalid(
            f"the volume's {_POD_UID} is not the pod's of {target.path}. Remove attributes that begin with "
            f"{_KUBELET_PREFIX} from the pod, and set podInfoOnMount: true in CSIDriver {DRIVER_NAME}."
        )
    return Wish(
        target=target,
        pool=attributes[POOL_ATTRIBUTE],
        namespace=attributes[_NAMESPACE],
        pod=attributes.get(_POD, ""),
        service_account=attributes.get(_SERVICE_ACCOUNT, ""),
        read_only=request.readonly,
    )


def _target(path: str, *, kubelet_directory: str) -> tuple[Target, str]:
    """Return the target and the pod's uid in its path."""
    try:
        target = Target(path, kubelet_directory=kubelet_directory)
    except ValueError as error:
        raise _invalid(f"target_path: {error}. Is the agent's kubelet directory kubelet's --root-dir?") from None
    match = _CSI_VOLUME.fullmatch("/".join(target.parts))
    if match is None:
        raise _invalid(
            f"target_path: {path!r} is no CSI volume of a pod. Is a PersistentVolume used, or a block volume?"
        )
    return target, match[1]


def _check_capability(request: Any) -> None:
    capability = request.volume_capability
    if capability.HasField("block") or not capability.HasField("mount"):
        raise _invalid("a pool is mounted as a directory; volumeMode: Block is not possible")
    if capability.mount.fs_type:
        raise _invalid("a pool has the filesystem of its disk. Remove fsType from the pod's csi volume.")
    if capability.mount.mount_flags:
        raise _invalid(f"a pool takes no mount options ({', '.join(capability.mount.mount_flags)}). Remove them.")
    if request.secrets:
        raise _invalid("a pool needs no secret. Remove nodePublishSecretRef from the pod's csi volume.")


def _check_attributes(attributes: dict[str, str]) -> None:
    own = {name for name in attributes if not name.startswith(_KUBELET_PREFIX)}
    if unknown := sorted(own - {POOL_ATTRIBUTE}):
        raise _invalid(
            f"unknown volumeAttributes: {', '.join(unknown)}. Known are: {POOL_ATTRIBUTE}. Remove the others."
        )
    if not attributes.get(POOL_ATTRIBUTE):
        raise _invalid(f"volumeAttributes has no {POOL_ATTRIBUTE}. Name a KVCachePool: {POOL_ATTRIBUTE}: <name>")
    if not attributes.get(_NAMESPACE) or not attributes.get(_POD_UID):
        raise _invalid(f"kubelet does not say whose volume it is. Set podInfoOnMount: true in CSIDriver {DRIVER_NAME}.")
    if attributes.get(_EPHEMERAL) != "true":
        raise _invalid(
            "a pool is mounted inline only: use csi: in the pod's volumes, not a PersistentVolume, and "
            f"volumeLifecycleModes: [Ephemeral] in CSIDriver {DRIVER_NAME}."
        )


def _nothing(response: str) -> Method:
    return lambda _: CSI[response]()


def _invalid(message: str) -> Refusal:
    return Refusal(Code.INVALID_ARGUMENT, message)


@contextlib.contextmanager
def _mount_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise Refusal(
            Code.UNAVAILABLE, f"{path}: {error.strerror or error}{name}; the agent's log on the node says more"
        ) from error
