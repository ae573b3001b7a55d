"""What both kinds have in common: metadata, conditions, and the document that server-side apply of a status sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pykvcache_contract.api.fields import says, to_dict
from pykvcache_contract.names import API_GROUP, API_VERSION

UNBOUNDED = 2**31
"""For metadata, whose bounds are Kubernetes's own."""
MESSAGE_LENGTH_MAX = 1024


class ConditionStatus(Enum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The part of an object's metadata that we read; Kubernetes owns its schema."""

    name: str = field(metadata=says("Name of the object."))
    uid: str = field(default="", metadata=says("Identity of the object, new each time one of this name is created."))
    generation: int = field(default=0, metadata=says("Grows with each change of the spec."))
    resource_version: str = field(default="", metadata=says("Changes with each write."))
    creation_timestamp: datetime | None = field(default=None, metadata=says("When the object was created."))
    deletion_timestamp: datetime | None = field(default=None, metadata=says("When its deletion was asked for."))
    labels: Mapping[str, str] = field(default_factory=dict, metadata=says("Labels.", max_items=UNBOUNDED))
    annotations: Mapping[str, str] = field(
        default_factory=dict, metadata=says("Annotations.", max_items=UNBOUNDED, max_length=UNBOUNDED)
    )
    finalizers: tuple[str, ...] = field(
        default=(), metadata=says("Who must agree to the deletion.", max_items=UNBOUNDED)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One aspect of a pool's state, in the form that all Kubernetes tools understand."""

    type: str = field(metadata=says("Aspect of the state.", max_length=64))
    status: ConditionStatus = field(metadata=says("Whether it holds; Unknown: not found out yet."))
    reason: str = field(
        metadata=says(
            "Why, in one word for programs.", pattern="[A-Za-z]+", pattern_text="one word of letters", max_length=64
        )
    )
    message: str = field(metadata=says("Why, for people, and what to do.", max_length=MESSAGE_LENGTH_MAX, clipped=True))
    last_transition_time: datetime = field(metadata=says("When the status changed last."))
    observed_generation: int = field(
        default=0,
        metadata=says("The metadata.generation that this is about; an older one: not looked at yet.", minimum=0),
    )


def status_document(kind: str, *, name: str, status: Any) -> dict[str, Any]:
    """Return what server-side apply sends to an object's status.

    No uid: the API server ignores it there. A status meant for a deleted object can reach its successor of the same
    name and lasts until that is looked at.
    """
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": kind,
        "metadata": {"name": name},
        "status": to_dict(status),
    }
