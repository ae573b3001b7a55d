"""Which container of a pod runs vLLM."""

from collections.abc import Mapping
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import CONTAINER_ANNOTATION
from pykvcache_operator.injection import commands
from pykvcache_operator.injection.outcome import Skip

USUAL_NAMES = frozenset({"vllm", "kserve-container"})
"""Names that platforms give to the container of the model's server."""
NAMES_MAX = 5
NAME_LENGTH_MAX = 63


def choose(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> int:
    """Return the index in spec.containers of the one that runs vLLM.

    The one that the annotation names; else the one that starts vLLM; else the one that is about vLLM by its image, its
    arguments or its name; else the only one.

    Raises:
        Skip: none is known to, or several could; or the annotation names none of them.
    """
    containers = spec.get("containers")
    if not isinstance(containers, list | tuple) or not all(isinstance(item, Mapping) for item in containers):
        raise Skip(SkipReason.UNSUPPORTED_POD, "spec.containers is not a list of containers.")
    names = [str(item.get("name"))[:NAME_LENGTH_MAX] for item in containers]
    if CONTAINER_ANNOTATION in annotations:
        return _named(containers, names, annotations[CONTAINER_ANNOTATION])
    candidates = _candidates(containers)
    if len(candidates) == 1:
        return candidates[0]
    which = "several containers could run vLLM" if candidates else "no container is known to run vLLM"
    shown = _listed([names[index] for index in candidates or range(len(names))])
    message = f"{which}: {shown}. Name the one that does by the annotation {CONTAINER_ANNOTATION}."
    raise Skip(SkipReason.NO_VLLM_CONTAINER, message[0].upper() + message[1:])


def is_evident(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> bool:
    """Return whether anything but being the only container says that the one which `choose` returns runs vLLM.

    Raises:
        Skip: as `choose`.
    """
    containers = spec.get("containers") or []
    return CONTAINER_ANNOTATION in annotations or choose(spec, annotations) in _with_signs(containers)


def _named(containers: Any, names: list[str], wanted: Any) -> int:
    found = [index for index, item in enumerate(containers) if item.get("name") == wanted]
    if not found:
        text = str(wanted)[:NAME_LENGTH_MAX]
        message = f"{CONTAINER_ANNOTATION} names {text!r}, but the containers of the pod are {_listed(names)}."
        raise Skip(SkipReason.BAD_ANNOTATION, message)
    return found[0]


def _candidates(containers: Any) -> list[int]:
    """Return those with the strongest sign of vLLM that any of them shows; where none shows any, the only one."""
    return _with_signs(containers) or ([0] if len(containers) == 1 else [])


def _with_signs(containers: Any) -> list[int]:
    read = [commands.read(item) for item in containers]
    starting = [index for index, command in enumerate(read) if command.runs_vllm]
    if starting:
        return starting
    usual = [item.get("name") in USUAL_NAMES for item in containers]
    return [index for index, command in enumerate(read) if command.mentions_vllm or usual[index]]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
