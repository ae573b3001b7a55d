"""Our annotations on a pod: what users wish in them, and what became of the pod.

Facts: the annotations of an object may take 256 KiB together, values may hold anything. What they mean: an annotation
of ours must be short, and must not be written where it would be the one too much: the pod would be refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.api.fields import choices
from pykvcache_contract.api.objects import MESSAGE_LENGTH_MAX
from pykvcache_contract.api.pool import KVCachePool, Library
from pykvcache_contract.api.quantities import parse_quantity
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    INJECTED_ANNOTATION,
    LIBRARY_ANNOTATION,
    SKIPPED_ANNOTATION,
    STAGING_ANNOTATION,
    WARNINGS_ANNOTATION,
)
from pykvcache_operator.injection.outcome import Document, Skip
from pykvcache_operator.injection.pod import metadata_of, shown

TOTAL_BYTES_MAX = 256 * 2**10
"""Of all keys and values of one object; the API server refuses more."""
WARNINGS_BYTES_MAX = 4096
LOCAL_VOLUMES_ANNOTATION = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""Names volumes, separated by commas. A pod with an emptyDir or hostPath that is not named keeps its node from being
removed; what is in ours is a copy or can be computed again."""
STAGING_BYTES_MIN = 2**24
"""The same as of the pool's spec.memory.stagingBytes."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the pool says, or in its place an annotation of the pod."""

    library: Library
    staging_bytes: int


def read_wishes(annotations: Mapping[str, str], pool: KVCachePool) -> Wishes:
    """Return how the library and how much staging memory the pod is to get.

    Raises:
        Skip: an annotation has a value that cannot be used.
    """
    library, staging_bytes = pool.spec.injection.library, pool.spec.memory.staging_bytes
    if (value := annotations.get(LIBRARY_ANNOTATION)) is not None:
        library = _library(value)
    if (value := annotations.get(STAGING_ANNOTATION)) is not None:
        staging_bytes = _staging_bytes(value)
    return Wishes(library, staging_bytes)


def injected(
    pod: Mapping[str, Any], *, version: str, warnings: Sequence[str], volumes: Sequence[Document] = ()
) -> Document:
    """Return the metadata of a pod that has the cache.

    Args:
        volumes: of ours.

    Raises:
        Skip: its annotations would become too large.
    """
    new = {INJECTED_ANNOTATION: version}
    if warnings:
        new[WARNINGS_ANNOTATION] = _joined(warnings)
    metadata = _annotated(pod, {**new, **_safe_to_lose(pod, volumes)}) or _annotated(pod, new)
    if metadata is None:
        raise Skip(
            SkipReason.UNSUPPORTED_POD,
            f"The annotations leave no room for ours: together at most {TOTAL_BYTES_MAX // 1024} KiB. Shorten them.",
        )
    return metadata


def skipped(pod: Mapping[str, Any], *, reason: SkipReason, message: str) -> Document | None:
    """Return the metadata of a pod that goes without; None where it cannot have one more annotation."""
    return _annotated(pod, {SKIPPED_ANNOTATION: clip(f"{reason.word}: {message}")})


def clip(text: str, *, characters_max: int = MESSAGE_LENGTH_MAX) -> str:
    """Return a text on one line, without control characters, cut at the limit.

    >>> clip("a\\nb"), clip("abcdef", characters_max=4)
    ('a b', 'abc…')
    """
    line = "".join(character if character.isprintable() else " " for character in text[: characters_max + 1])
    return line if len(line) <= characters_max else f"{line[: characters_max - 1]}…"


def _safe_to_lose(pod: Mapping[str, Any], volumes: Sequence[Document]) -> dict[str, str]:
    """Return the annotation without which the cluster autoscaler keeps a node because of our volumes."""
    local = [volume["name"] for volume in volumes if "emptyDir" in volume or "hostPath" in volume]
    listed = [name for name in metadata_of(pod, "annotations").get(LOCAL_VOLUMES_ANNOTATION, "").split(",") if name]
    missing = [name for name in local if name not in map(str.strip, listed)]
    return {LOCAL_VOLUMES_ANNOTATION: ",".join([*listed, *missing])} if missing else {}


def _library(value: str) -> Library:
    try:
        return Library(value)
    except ValueError:
        message = f"{LIBRARY_ANNOTATION} is {shown(value)}: write {choices(Library)}, or remove it."
        raise Skip(SkipReason.BAD_ANNOTATION, message) from None


def _staging_bytes(value: str) -> int:
    try:
        staging_bytes = parse_quantity(value)
    except ValueError:
        staging_bytes = 0
    if staging_bytes < STAGING_BYTES_MIN:
        message = (
            f"{STAGING_ANNOTATION} is {shown(value)}: write a quantity of at least 16Mi such as 2Gi, or remove it."
        )
        raise Skip(SkipReason.BAD_ANNOTATION, message)
    return staging_bytes


def _annotated(pod: Mapping[str, Any], new: Mapping[str, str]) -> Document | None:
    """Return the pod's metadata with what we say now in place of what we said before; None if that is too much."""
    metadata = pod.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        return None
    given = (metadata or {}).get("annotations")
    if given is not None and not isinstance(given, Mapping):
        return None
    former = {SKIPPED_ANNOTATION, WARNINGS_ANNOTATION} - new.keys()
    kept = {key: value for key, value in metadata_of(pod, "annotations").items() if key not in former}
    annotations = {**kept, **new}
    if sum(_size(key) + _size(value) for key, value in annotations.items()) > TOTAL_BYTES_MAX:
        return None
    return {**(metadata or {}), "annotations": annotations}


def _size(text: object) -> int:
    return len(str(text).encode(errors="surrogatepass"))


def _joined(warnings: Sequence[str]) -> str:
    """Return the warnings, one a line; of those that do not fit any more only how many they are."""
    lines: list[str] = []
    for warning in warnings:
        line = clip(warning)
        if _size("\n".join([*lines, line])) > WARNINGS_BYTES_MAX:
            return "\n".join([*lines, f"and {len(warnings) - len(lines)} more"])
        lines.append(line)
    return "\n".join(lines)
