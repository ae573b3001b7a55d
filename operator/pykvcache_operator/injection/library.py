"""How the connector reaches vLLM's image: copied by an init container, mounted as an image, or there already.

An image volume is mounted whole, because a sub-path of one needs Kubernetes 1.33 and a runtime that can: the library is
then one folder below the mount, and PYTHONPATH names it there. Runtimes may mount images noexec; then the library's one
compiled file does not load, and blocks are read and written by threads instead of io_uring.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.api.pool import Library
from pykvcache_contract.api.quantities import format_quantity
from pykvcache_contract.names import LIBRARY_NAME, LIBRARY_PATH
from pykvcache_operator.injection.outcome import Document, InjectionSettings
from pykvcache_operator.injection.resources import own_resources
from pykvcache_operator.injection.security import own_security_context

VOLUME_SIZE_BYTES = 64 * 2**20
"""Several times the library: the kubelet evicts a pod that exceeds it."""
IMAGE_FOLDER = "library"
"""Where the library lies in the connector's image."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a pod needs for the library.

    Args:
        path: where it then lies in vLLM's container; empty: wherever the image has it.
        volumes, mounts, init_containers: to add to the pod, to vLLM's container, and to the pod.
    """

    path: str = ""
    volumes: tuple[Document, ...] = ()
    mounts: tuple[Document, ...] = ()
    init_containers: tuple[Document, ...] = ()


def deliver(
    kind: Library, *, spec: Mapping[str, Any], vllm: Mapping[str, Any], settings: InjectionSettings
) -> Delivery:
    """Return what brings the library into vLLM's container.

    Args:
        spec: of the pod, for the security context and the resources.
        vllm: vLLM's container, for the security context.
    """
    if kind is Library.NONE:
        return Delivery()
    mount = {"name": LIBRARY_NAME, "mountPath": LIBRARY_PATH, "readOnly": True}
    if kind is Library.IMAGE_VOLUME:
        image = {"reference": settings.connector_image, "pullPolicy": settings.pull_policy}
        volume: Document = {"name": LIBRARY_NAME, "image": image}
        return Delivery(f"{LIBRARY_PATH}/{IMAGE_FOLDER}", (volume,), (mount,))
    volume = {"name": LIBRARY_NAME, "emptyDir": {"sizeLimit": format_quantity(VOLUME_SIZE_BYTES)}}
    return Delivery(LIBRARY_PATH, (volume,), (mount,), (_container(spec, vllm, settings),))


def _container(spec: Mapping[str, Any], vllm: Mapping[str, Any], settings: InjectionSettings) -> Document:
    return {
        "name": LIBRARY_NAME,
        "image": settings.connector_image,
        "imagePullPolicy": settings.pull_policy,
        "args": [LIBRARY_PATH],
        "securityContext": own_security_context(spec, vllm=vllm),
        **own_resources(spec, settings.library_resources, storage_bytes=VOLUME_SIZE_BYTES),
        "volumeMounts": [{"name": LIBRARY_NAME, "mountPath": LIBRARY_PATH}],
    }
