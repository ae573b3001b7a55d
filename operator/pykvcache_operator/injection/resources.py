"""Resources of our containers, and how they and vLLM's memory fit the pod's.

Facts: a quota refuses a pod with a container that does not say what the quota counts. A pod with limits of its own
(spec.resources) shares them among its containers and is refused if these ask for more than it has. The kubelet
evicts a pod that takes more ephemeral storage than the sum of its containers' limits, as soon as one has such a limit,
and an emptyDir counts; pods have no such limit of their own. Therefore our containers say what they take, except in a
pod with resources of its own; and in every pod where somebody limited ephemeral storage, ours have a limit that pays
for the volumes that come with them.
"""

from collections.abc import Mapping
from typing import Any

from pykvcache_contract.api.quantities import parse_quantity
from pykvcache_contract.units import format_size
from pykvcache_operator.injection.annotations import STAGING_BYTES_MIN
from pykvcache_operator.injection.outcome import Document
from pykvcache_operator.injection.pod import all_containers, mapping

STORAGE = "ephemeral-storage"
STAGING_SHARE_WARNED = 0.25
"""Of the memory limit of vLLM's container; the rest of it is weights being loaded, CUDA's own and page cache."""
STAGING_SHARE_MAX = 0.5
"""More is not given: the kernel would end vLLM, again and again, because of us."""


def own_resources(spec: Mapping[str, Any], resources: Mapping[str, Any], *, storage_bytes: int) -> dict[str, Document]:
    """Return `resources` of a container of ours, as a field to add; no field where the pod is better off without.

    Args:
        resources: what the installation says.
        storage_bytes: most that its logs and the volumes take which come with it.
    """
    shared = bool(mapping(spec, "resources"))
    requests = {} if shared else dict(mapping(resources, "requests"))
    limits = {} if shared else dict(mapping(resources, "limits"))
    if any(STORAGE in mapping(mapping(container, "resources"), "limits") for container in all_containers(spec)):
        requests = {STORAGE: "0", **requests}
        limits = {STORAGE: str(storage_bytes), **limits}
    own = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {"resources": own} if own else {}


def fitting_staging(
    spec: Mapping[str, Any], container: Mapping[str, Any], staging_bytes: int
) -> tuple[int, tuple[str, ...]]:
    """Return the staging memory of one worker, less than wished where vLLM would be killed for it, and warnings.

    Args:
        container: vLLM's; its limit is never changed.
        staging_bytes: as wished, of one worker; there is one for each GPU.
    """
    limits = mapping(mapping(container, "resources"), "limits")
    of_pod = mapping(mapping(spec, "resources"), "limits")
    limit_bytes, workers = _quantity(limits.get("memory", of_pod.get("memory"))), max(1, _gpu_count(limits))
    total_bytes = staging_bytes * workers
    if not limit_bytes or total_bytes <= STAGING_SHARE_WARNED * limit_bytes:
        return staging_bytes, ()
    found = (
        f"Staging memory is {format_size(total_bytes)} ({workers} × {format_size(staging_bytes)}) of the memory limit "
        f"{format_size(limit_bytes)} of vLLM's container"
    )
    advice = "raise the limit, or set the annotation pykvcache.io/staging to less."
    most_bytes = max(STAGING_BYTES_MIN, int(STAGING_SHARE_MAX * limit_bytes) // workers)
    if staging_bytes <= most_bytes:
        return staging_bytes, (f"{found}: {advice}",)
    return most_bytes, (f"{found}, and each worker gets {format_size(most_bytes)}: {advice}",)


def _gpu_count(limits: Mapping[Any, Any]) -> int:
    """Return how many GPUs a container asks for, by the names of device plug-ins: nvidia.com/gpu, …/mig-1g.5gb."""
    names = (name for name in limits if isinstance(name, str) and (name.endswith("/gpu") or "/mig-" in name))
    return sum(_quantity(limits[name]) for name in names)


def _quantity(value: object) -> int:
    """Return a quantity; 0 for what is none, or is written as people seldom do (`1e9`)."""
    try:
        return parse_quantity(value)
    except ValueError:
        return 0
