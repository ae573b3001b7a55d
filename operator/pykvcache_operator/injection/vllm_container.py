"""vLLM's container with the cache: its arguments and its environment. Volumes are the pod's matter."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    CONNECTOR_CLASS,
    HASH_ALGORITHM,
    HASH_FLAG,
    INJECTED_VARIABLE,
    LIBRARY_ANNOTATION,
    ON_CONFLICT_ANNOTATION,
    TRANSFER_CONFIG_FLAG,
    TRANSFER_CONFIG_VARIABLE,
)
from pykvcache_contract.transfer_config import to_json
from pykvcache_operator.injection import commands, environment
from pykvcache_operator.injection.outcome import Document, Reject, Skip
from pykvcache_operator.injection.transfer_config import Present, TransferOptions, find, merged, ours, value_of

_REPLACES = {
    name: re.compile(rf"{name}=(?<!\w{name}=)(?!\S{{0,200}}\$\{{?{name})")
    for name in (environment.PYTHONPATH, environment.VLLM_PLUGINS)
}
"""In a shell's text, without the value that is there. Bounded, so that no text takes long."""
_RAY_START = re.compile(r"ray(?<!\wray)\s+start\b")
_SEVERAL_PODS_SCRIPT = "multi-node-serving.sh"
"""In vLLM's images: starts Ray on the pods of one engine."""

_MERGE_NEEDS_LIBRARY = (
    "A merged kv-transfer-config ends a vLLM whose image lacks the library, and with library None nobody knows whether "
    f"it has it. Set the annotation {LIBRARY_ANNOTATION}: InitContainer."
)


APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
"""On what `kubectl apply` made itself. A second apply of such a pod would fail at arguments of ours: it takes the list
as a whole, and a pod's cannot change. Variables are merged by their names and stay."""


class OnConflict(Enum):
    """What becomes of a pod that has a kv-transfer-config of its own."""

    SKIP = "Skip"
    MERGE = "Merge"
    REJECT = "Reject"


@dataclass(frozen=True, slots=True)
class Configured:
    """A container whose vLLM will use the pool. The container is new; what did not change in it is shared."""

    container: Document
    warnings: tuple[str, ...] = ()


def configure(
    container: Mapping[str, Any], *, options: TransferOptions, annotations: Mapping[str, Any], version: str
) -> Configured:
    """Return the container with vLLM told about its pool.

    Args:
        annotations: of the pod.
        version: of what injects; goes into PYKVCACHE_INJECTED.

    Raises:
        Skip: it has a kv-transfer-config already, or the library would not reach it.
        Reject: as Skip, and the pod's annotation asks for that.
    """
    on_conflict = _on_conflict(annotations)
    bare = _without_ours(container)
    command, variables = commands.read(bare), environment.read(bare)
    if command.cut_off:
        raise Skip(SkipReason.UNSUPPORTED_POD, _cut_off_message(command.cut_off))
    present = find(command, variables.values)
    config = ours(options) if present is None else _resolve(present, on_conflict, options)
    is_certain = bool(options.library_path) and _is_certain(command, variables)
    is_certain = is_certain and APPLIED_ANNOTATION not in annotations
    as_arguments = command.arguments is not None and (present is not None or is_certain)
    entries, warnings = environment.extend(
        variables,
        version=version,
        library_path=options.library_path,
        transfer_config=None if as_arguments else to_json(config),
    )
    changed: Document = {**bare, "env": entries}
    if as_arguments:
        changed["args"] = [*(bare.get("args") or ()), *_arguments(command, to_json(config))]
    return Configured(changed, (*_warnings(command, present), *warnings))


def _is_certain(command: commands.Command, variables: environment.Environment) -> bool:
    """Return whether arguments of ours can do no harm.

    They need our plugin, which takes them away where the library does not suit this vLLM (so an image that may or may
    not have the library gets none); and they must not hide a kv-transfer-config that comes by a variable which we
    cannot see.
    """
    unknown = tuple(f"$({name})" for name in variables.unknown)
    is_hidden = any(argument.startswith(unknown) for argument in command.arguments or ())
    return environment.is_plugin_certain(variables) and not is_hidden


def _on_conflict(annotations: Mapping[str, Any]) -> OnConflict:
    value = annotations.get(ON_CONFLICT_ANNOTATION, OnConflict.SKIP.value)
    try:
        return OnConflict(value)
    except ValueError:
        message = f"{ON_CONFLICT_ANNOTATION} is {str(value)[:40]!r}: it can be Skip, Merge or Reject."
        raise Skip(SkipReason.BAD_ANNOTATION, message) from None


def _without_ours(container: Mapping[str, Any]) -> Document:
    """Return the container without what an earlier injection, perhaps of another version, told vLLM."""
    bare = dict(container)
    entries = environment.read(container)
    if INJECTED_VARIABLE not in entries.names:
        return bare
    bare["env"] = [entry for entry in entries.entries if not _is_our_variable(entry)]
    arguments = list(commands.strings(container, "args"))
    pairs = enumerate(pairwise(arguments))
    places = [index for index, (flag, value) in pairs if flag == TRANSFER_CONFIG_FLAG and CONNECTOR_CLASS in value]
    if places:
        start = places[-1]
        del arguments[start : start + 2]
        if arguments[max(start - 2, 0) : start] == [HASH_FLAG, HASH_ALGORITHM]:
            del arguments[start - 2 : start]
        bare["args"] = arguments or None
    return bare


def _is_our_variable(entry: Mapping[str, Any]) -> bool:
    if entry["name"] == TRANSFER_CONFIG_VARIABLE:
        return not entry.get("valueFrom") and CONNECTOR_CLASS in (entry.get("value") or "")
    return bool(entry["name"] == INJECTED_VARIABLE)


def _resolve(present: Present, on_conflict: OnConflict, options: TransferOptions) -> dict[str, Any]:
    """Return the configuration for a pod that has one."""
    if present.names_us:
        message = f"{present.place} names {CONNECTOR_CLASS} already. Remove it, or the label."
        raise Skip(SkipReason.CONFIGURATION_PRESENT, message)
    if on_conflict is OnConflict.MERGE and not options.library_path:
        raise Skip(SkipReason.CONFIGURATION_PRESENT, _MERGE_NEEDS_LIBRARY)
    if on_conflict is OnConflict.MERGE:
        return merged(present, ours(options))
    found = f"vLLM is given {present.place} already"
    if on_conflict is OnConflict.REJECT:
        raise Reject(f"{found}, and {ON_CONFLICT_ANNOTATION} is Reject. Remove it, or the label.")
    advice = "Remove it, or merge both" if present.value is not None else f"{present.why_fixed} Remove it"
    message = f"{found}. {advice}"
    if present.value is not None:
        message += f" by the annotation {ON_CONFLICT_ANNOTATION}: Merge"
    raise Skip(SkipReason.CONFIGURATION_PRESENT, message + ".")


def _arguments(command: commands.Command, config: str) -> list[str]:
    algorithm = value_of(command.arguments or (), HASH_FLAG)
    return [*([] if algorithm else [HASH_FLAG, HASH_ALGORITHM]), TRANSFER_CONFIG_FLAG, config]


def _cut_off_message(what: str) -> str:
    return (
        f"vLLM is started by `{what}`, so that Python does not see the variables which bring the library. Start it "
        "without that; set variables in the container's env."
    )


def _warnings(command: commands.Command, present: Present | None) -> list[str]:
    warnings = [] if present is None else ["Merged into a MultiConnector, which needs vLLM 0.26 or later."]
    if not command.runs_vllm and not command.mentions_vllm:
        warnings.append("Nothing in the container names vLLM. If it runs something else, the cache does nothing.")
    if command.arguments is None:
        warnings += _about_texts(command.tokens)
    elif value_of(command.arguments, HASH_FLAG).startswith("xxhash"):
        warnings.append(
            f"{HASH_FLAG} xxhash can be made to collide: a prompt may then get another's blocks. Use {HASH_ALGORITHM}."
        )
    if any(_SEVERAL_PODS_SCRIPT in token or _RAY_START.search(token) for token in command.tokens):
        warnings.append(
            "One engine over several pods runs without the cache: each of its pods would need the library. Engines "
            "that stay within a pod have it."
        )
    return warnings


def _about_texts(tokens: Sequence[str]) -> list[str]:
    text = "The command sets {0}: the cache works only if it keeps what is there, as in …${0}."
    return [text.format(name) for name, pattern in _REPLACES.items() if any(map(pattern.search, tokens))]
