"""Adding what is ours to a pod: names of ours that the user has taken, the order of lists, the size of the result.

Ours come behind the user's. Init containers: the user's may run for minutes and want much memory, and what runs beside
them counts; behind them the sidecar counts beside vLLM only, and a pod that fails in its own init containers fails as
before. Nothing given is changed; what is new is a copy.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import INJECTED_VARIABLE, LIBRARY_NAME, LIBRARY_PATH, POOL_VOLUME, SIDECAR_CONTAINER
from pykvcache_operator.injection.outcome import Document, Skip
from pykvcache_operator.injection.pod import all_containers, items, shown

SIZE_BYTES_MAX = 1_400_000
"""Of an injected pod as JSON. etcd takes 1.5 MiB, and the API server adds what it notes about fields."""
_PUNCTUATION_BYTES = 3
"""Of a value: two quotes and a comma or colon, or a short number."""
CONTAINER_NAMES = frozenset((LIBRARY_NAME, SIDECAR_CONTAINER))
VOLUME_NAMES = frozenset((LIBRARY_NAME, POOL_VOLUME))
PARENT_PATH = posixpath.dirname(LIBRARY_PATH)
"""All that we mount lies below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What a pod gets.

    Args:
        vllm: the container that replaces the user's.
    """

    vllm: Document
    init_containers: Sequence[Document]
    volumes: Sequence[Document]


def without_own(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pod's spec without what an earlier injection made, where its annotation was lost.

    The variable PYKVCACHE_INJECTED tells that there was one; without it what has one of our names is the user's.
    """
    if not any(_is_injected(container) for container in items(spec, "containers")):
        return spec
    containers = [_without(container, "volumeMounts", VOLUME_NAMES) for container in items(spec, "containers")]
    rest = _without(_without(spec, "volumes", VOLUME_NAMES), "initContainers", CONTAINER_NAMES)
    return {**rest, "containers": containers}


def with_own(spec: Mapping[str, Any], index: int, own: Own, pull_secrets: Sequence[str]) -> Document:
    """Return a pod's spec with what is ours in it.

    Args:
        index: of vLLM's container.
        pull_secrets: names of secrets for our images.
    """
    containers = items(spec, "containers")
    containers[index] = own.vllm
    new = {**spec, "containers": containers, "volumes": [*items(spec, "volumes"), *own.volumes]}
    if own.init_containers:
        new["initContainers"] = [*items(spec, "initContainers"), *own.init_containers]
    if any("image" in part for part in (*own.init_containers, *own.volumes)):
        present = {secret.get("name") for secret in items(spec, "imagePullSecrets")}
        missing = [{"name": name} for name in dict.fromkeys(pull_secrets) if name not in present]
        if missing:
            new["imagePullSecrets"] = items(spec, "imagePullSecrets") + missing
    return new


def with_mounts(container: Document, mounts: Sequence[Document]) -> Document:
    """Return a container with our volumes mounted."""
    return {**container, "volumeMounts": [*items(container, "volumeMounts"), *mounts]}


def check_names(spec: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """Raise Skip if a name or path that we need is in use.

    Args:
        spec: of the pod, without what an earlier injection made.
        container: vLLM's.
    """
    for what in _taken(spec, container):
        raise Skip(SkipReason.NAME_TAKEN, f"The pod has {what}, which injection needs. Rename it.")


def _taken(spec: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"a container {c['name']}" for c in all_containers(spec) if c["name"] in CONTAINER_NAMES)
    yield from (f"a volume {v.get('name')}" for v in items(spec, "volumes") if v.get("name") in VOLUME_NAMES)
    mounts = [mount.get("mountPath") for mount in items(container, "volumeMounts")]
    mounts += [device.get("devicePath") for device in items(container, "volumeDevices")]
    for path in mounts:
        if isinstance(path, str) and _is_ours(path):
            yield f"a volume at {shown(path)} in vLLM's container"


def _is_ours(path: str) -> bool:
    normal = "/" + posixpath.normpath("/" + path).lstrip("/")  # POSIX gives two slashes a meaning, mounts do not
    return posixpath.commonpath((normal, PARENT_PATH)) == PARENT_PATH


def _is_injected(container: Mapping[str, Any]) -> bool:
    environment = container.get("env")
    entries = environment if isinstance(environment, list) else ()
    return any(isinstance(entry, Mapping) and entry.get("name") == INJECTED_VARIABLE for entry in entries)


def _without(parent: Mapping[str, Any], key: str, names: AbstractSet[str]) -> Document:
    if not parent.get(key):  # absent, null or empty: it stays that way
        return dict(parent)
    return {**parent, key: [entry for entry in items(parent, key) if entry.get("name") not in names]}


def check_size(pod: Mapping[str, Any]) -> None:
    """Raise Skip if the API server might refuse the pod for its size."""
    if size_bytes(pod) > SIZE_BYTES_MAX:
        raise Skip(
            SkipReason.UNSUPPORTED_POD,
            f"The pod is too large to add anything: at most {SIZE_BYTES_MAX} bytes as JSON. Move what is large into a "
            "ConfigMap or the image.",
        )


def has_room(pod: Mapping[str, Any]) -> bool:
    """Say whether a pod that was only annotated is surely accepted, where it was without."""
    return size_bytes(pod) <= SIZE_BYTES_MAX


def size_bytes(document: object) -> int:
    """Return about the size of a document as compact JSON, before anything in it is escaped.

    Written out it would take 25 ms a megabyte, which is more than all the rest; etcd keeps no JSON anyway.
    """
    total, pending = 0, [document]
    while pending:  # no recursion: a document may be nested as deeply as its parser can
        value = pending.pop()
        total += _PUNCTUATION_BYTES
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            pending += value
    return total
