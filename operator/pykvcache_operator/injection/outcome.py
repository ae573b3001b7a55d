"""What injection is told about the installation, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pykvcache_contract.injection import SkipReason

Document = dict[str, Any]
"""A Kubernetes object as JSON."""

# The chart's values say the same. Limits equal requests: so a pod of class Guaranteed stays one, and the ratio of a
# LimitRange holds. The CPUs are no whole ones, or a node with static CPU assignment would give them away exclusively.
LIBRARY_RESOURCES: Mapping[str, Any] = {
    "requests": {"cpu": "200m", "memory": "64Mi"},
    "limits": {"cpu": "200m", "memory": "64Mi"},
}
"""It runs before vLLM, which asks for more: a pod's requests do not grow by it."""
SIDECAR_RESOURCES: Mapping[str, Any] = {
    "requests": {"cpu": "500m", "memory": "256Mi"},
    "limits": {"cpu": "500m", "memory": "256Mi"},
}
"""Its start takes half a second of a CPU, and vLLM waits for it. Memory peaks at 99 MiB (docs/benchmarks.md, eviction);
pages that it caches while it reads count, but leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionSettings:
    """What an installation says, the same for all pods.

    Args:
        version: of this py-kvcache; goes into the annotation `injected`.
        connector_image, sidecar_image: whole names of images.
        pull_policy: of both.
        pull_secrets: names of secrets that must exist in the pod's namespace.
        library_resources, sidecar_resources: `requests` and `limits` of the injected containers, for quotas.
            A namespace's LimitRange must admit them.
    """

    version: str
    connector_image: str
    sidecar_image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    library_resources: Mapping[str, Any] = field(default_factory=lambda: LIBRARY_RESOURCES)
    sidecar_resources: Mapping[str, Any] = field(default_factory=lambda: SIDECAR_RESOURCES)


class Skip(Exception):
    """Raised inside injection to leave a pod without the cache."""

    def __init__(self, reason: SkipReason, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Reject(Exception):
    """Raised inside injection when the pod itself asks to be refused rather than run without the cache."""


class Result(Enum):
    """What became of a pod."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    """Labelled, but goes without; the reason stands in its annotation."""
    UNCHANGED = "unchanged"
    """Not labelled, or injected already."""
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer for one pod.

    Args:
        pod: a new object for INJECTED and SKIPPED, the given one else. Parts that did not change may be shared with it.
        reason: of SKIPPED.
        message: why, and what to do, of SKIPPED and REJECTED.
        warnings: for whoever creates the pod; also in its annotation.
    """

    result: Result
    pod: Document
    reason: SkipReason | None = None
    message: str = ""
    warnings: tuple[str, ...] = ()
