"""Resources of our containers, and how they and vLLM's memory fit the pod's.

Facts: a quota refuses a pod with a container that does not say what the quota counts. A pod with limits of its own
(spec.resources) shares them among its containers and is refused if these ask for more than it has. The kubelet
evicts a pod that takes more ephemeral storage than the sum of its containers' limits, as soon as one has such a limit,
and an emptyDir counts; pods have no such limit of their own. Therefore our containers say what they take, except in a
pod with resources of its own; and in every pod where somebody limited ephemeral storage, ours have a limit that pays
for the volumes that come with them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pykvcache_contract.api.quantities import parse_quantity
from pykvcache_contract.units import format_size
from pykvcache_operator.injection.outcome import Document
from pykvcache_operator.injection.pod import all_containers, mapping

STORAGE = "ephemeral-storage"
STAGING_SHARE_MAX = 0.25
"""Of the memory limit of vLLM's container; the rest of it is weights being loaded, CUDA's own and page cache."""


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


def memory_warnings(spec: Mapping[str, Any], container: Mapping[str, Any], staging_bytes: int) -> Iterator[str]:
    """Say if staging memory takes much of what vLLM's container may have; its limit is never changed.

    Args:
        staging_bytes: of one worker; there is one for each GPU.
    """
    limits = mapping(mapping(container, "resources"), "limits")
    of_pod = mapping(mapping(spec, "resources"), "limits")
    limit_bytes, workers = _quantity(limits.get("memory", of_pod.get("memory"))), max(1, _gpu_count(limits))
    total_bytes = staging_bytes * workers
    if limit_bytes and total_bytes > STAGING_SHARE_MAX * limit_bytes:
        yield (
            f"Staging memory is {format_size(total_bytes)} ({workers} × {format_size(staging_bytes)}) of the memory "
            f"limit {format_size(limit_bytes)} of vLLM's container: raise the limit, or set the annotation "
            "pykvcache.io/staging to less."
        )


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
