"""Reading a pod that may be anything.

Facts: before admission nothing of a pod is validated, and offline input is what somebody typed. What they mean: any
field may hold a value of any kind. Therefore `check_shape` refuses what the rest of injection would stumble over, once;
what it lets through is read without further questions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.outcome import Document, Skip

SHOWN_CHARACTERS_MAX = 80
_SPEC_LISTS = ("containers", "initContainers", "volumes", "imagePullSecrets")
_CONTAINER_LISTS = ("volumeMounts", "volumeDevices", "ports")
_CONTAINER_MAPPINGS = ("resources", "securityContext")
_SPEC_MAPPINGS = ("securityContext", "nodeSelector", "os", "resources")


def metadata_of(pod: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the pod's labels or annotations; none where there is anything else in their place."""
    metadata = pod.get("metadata")
    entries = metadata.get(key) if isinstance(metadata, Mapping) else None
    return entries if isinstance(entries, Mapping) else {}


def check_shape(pod: Mapping[str, Any]) -> None:
    """Raise Skip unless what injection reads of the pod is of the kinds that the API has there."""
    for problem in _problems(pod):
        raise Skip(
            SkipReason.UNSUPPORTED_POD, f"The pod cannot be read: {problem}. `kubectl explain pod` shows what it takes."
        )


def items(parent: Mapping[str, Any], key: str) -> list[Document]:
    """Return a list of objects; empty where it is absent or null. The list is new, its objects are not."""
    return list(parent.get(key) or ())


def mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; empty where it is absent or null."""
    return parent.get(key) or {}


def all_containers(spec: Mapping[str, Any]) -> list[Document]:
    """Return containers and init containers."""
    return items(spec, "containers") + items(spec, "initContainers")


def shown(value: object) -> str:
    """Return a value of the pod for a message: quoted, on one line, in ASCII, and cut.

    >>> shown("a\\nb"), len(shown("x" * 100))
    ("'a\\\\nb'", 80)
    """
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[: SHOWN_CHARACTERS_MAX - 1]}…"


def _problems(pod: Mapping[str, Any]) -> Iterator[str]:
    yield from _strings(pod, "labels")
    yield from _strings(pod, "annotations")
    spec = pod.get("spec")
    if not isinstance(spec, Mapping):
        yield "spec is no object"
        return
    yield from _lists(spec, _SPEC_LISTS, "spec")
    yield from _mappings(spec, _SPEC_MAPPINGS, "spec")
    yield from _resources(spec, "spec")
    yield from _names(items(spec, "volumes"), "a volume")
    yield from _names(items(spec, "imagePullSecrets"), "a pull secret")
    for container in all_containers(spec):
        name = container.get("name")
        yield from _names([container], "a container")
        yield from _lists(container, _CONTAINER_LISTS, f"container {shown(name)}")
        yield from _names(items(container, "volumeMounts"), f"container {shown(name)}: a mount")
        yield from _mappings(container, _CONTAINER_MAPPINGS, f"container {shown(name)}")
        yield from _resources(container, f"container {shown(name)}")


def _strings(pod: Mapping[str, Any], key: str) -> Iterator[str]:
    """Say what is wrong with labels or annotations; metadata itself may be absent."""
    metadata = pod.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        yield "metadata is no object"
        return
    entries = (metadata or {}).get(key)
    if entries is not None and not isinstance(entries, Mapping):
        yield f"metadata.{key} is no object"
        return
    for name, value in (entries or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            yield f"metadata.{key} holds {shown(name)}: {shown(value)}, which is no text"


def _lists(parent: Mapping[str, Any], keys: Sequence[str], path: str) -> Iterator[str]:
    for key in keys:
        entries = parent.get(key)
        if entries is not None and not (isinstance(entries, list) and all(isinstance(e, Mapping) for e in entries)):
            yield f"{path}: {key} is no list of objects"


def _resources(parent: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _mappings(mapping(parent, "resources"), ("requests", "limits"), f"{path}: resources")


def _names(entries: Sequence[Document], what: str) -> Iterator[str]:
    for entry in entries:
        if not isinstance(entry.get("name"), str):
            yield f"{what} has {shown(entry.get('name'))} for a name"


def _mappings(parent: Mapping[str, Any], keys: Sequence[str], path: str) -> Iterator[str]:
    for key in keys:
        if parent.get(key) is not None and not isinstance(parent[key], Mapping):
            yield f"{path}: {key} is no object"
