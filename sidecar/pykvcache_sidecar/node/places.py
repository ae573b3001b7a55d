"""The seam between the CSI service and the agent: which directory does a pod get of a pool?

The CSI service knows mounts and sockets and asks; the agent knows pools, disks and who is allowed, and answers. Each
side is tested without the other. `place` is called from the CSI service's threads, several at once.

Two ways to say no, and they are not the same: a `Refusal` keeps the pod waiting, and kubelet shows its message as an
event and asks again; a place without a directory lets the pod start with an empty marker directory, so that the engine
runs without cache.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Code(Enum):
    """The gRPC status that kubelet sees; the values are grpc's own names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    """The pod's volume is written wrongly; nothing but another pod spec helps."""
    NOT_FOUND = "NOT_FOUND"
    """No pool of that name."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The pod's namespace may not mount the pool."""
    UNAVAILABLE = "UNAVAILABLE"
    """Not now: it is worth asking again."""


class Refusal(Exception):
    """A pod gets no volume.

    Args:
        code: what kubelet is told.
        message: names the pool, the cause and what to do; it is read in the pod's events.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Place:
    """What to mount.

    Args:
        directory: absolute path of an existing directory without links in it; None for the empty marker directory.
        reason: why there is no directory, for the marker file; empty with a directory.
    """

    directory: str | None
    reason: str = ""


class Places(Protocol):
    """Answers where a pod's volume is; implemented by the agent."""

    def place(self, *, pool: str, namespace: str, pod: str, service_account: str) -> Place:
        """Return what this pod gets of a pool. Called from several threads; called again for a pod that restarts.

        Args:
            pool: the name in the volume's attributes, not checked further.
            namespace: of the pod, as kubelet says it; pod and service_account likewise, for messages.

        Raises:
            Refusal: the pod has to wait or is wrong.
        """
        ...
