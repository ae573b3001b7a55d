"""vLLM's kv-transfer-config: ours, and one that the pod has already."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    CONNECTOR_CLASS,
    HASH_FLAG,
    LIBRARY_PATH,
    MULTI_CONNECTOR,
    POOL_PATH,
    TRANSFER_CONFIG_FLAG,
    TRANSFER_CONFIG_VARIABLE,
)
from pykvcache_contract.transfer_config import transfer_config
from pykvcache_operator.injection.commands import Command
from pykvcache_operator.injection.outcome import Skip

_OFFLOADING_FLAG = "--kv-offloading-size"
_SHORTEST = {TRANSFER_CONFIG_FLAG: "--kv-t", HASH_FLAG: "--prefix-cachi", _OFFLOADING_FLAG: "--kv-offloading-s"}
"""vLLM's parser accepts abbreviations; shorter ones are ambiguous (0.22.1, 0.32.0)."""
_IN_TEXT = re.compile(r"--kv[-_](?:t[a-z_-]*|offloading[-_]s[a-z_-]*)")
_NO_VALUE = "(none)"
"""A flag without a value, with which vLLM ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What vLLM's container is told about its pool.

    Args:
        staging_bytes: host memory of each worker between disk and GPU.
        block_tokens: of one stored block; the connector rounds it up to vLLM's own.
        create_pool: whether vLLM may make a pool of an empty directory: where a sidecar cares for it, or nobody.
        capacity_bytes: most that vLLM stores, also without its sidecar; 0: what the sidecar allows.
        pool_path: where the pool is mounted in the container.
        library_path: where the library is mounted; empty: the image has it, and PYTHONPATH stays as it is.
    """

    staging_bytes: int
    block_tokens: int
    create_pool: bool
    capacity_bytes: int = 0
    pool_path: str = POOL_PATH
    library_path: str = LIBRARY_PATH


@dataclass(frozen=True, slots=True)
class Present:
    """A kv-transfer-config, or what amounts to one, that the pod has.

    Args:
        place: where it stands, for people.
        value: the JSON text, where an argument at the end can take its place; None elsewhere.
        why_fixed: why nothing can take its place, where `value` is None.
    """

    place: str
    value: str | None = None
    why_fixed: str = ""
    names_us: bool = False


def ours(options: TransferOptions) -> dict[str, Any]:
    """Return the kv-transfer-config of a pool. vLLM starts with it whether or not the pool can be used."""
    told = {
        "pool": options.pool_path,
        "staging": options.staging_bytes,
        "block_size": options.block_tokens,
        "when_unfit": "adapt",
        "create_pool": options.create_pool,
    }
    if options.capacity_bytes:
        told["capacity"] = options.capacity_bytes
    return transfer_config(told)


def find(command: Command, variables: Mapping[str, str]) -> Present | None:
    """Return the kv-transfer-config that vLLM is given without us.

    Args:
        variables: all of the container; empty where the value is not known.
    """
    named = [name for name, value in variables.items() if name == TRANSFER_CONFIG_VARIABLE or _IN_TEXT.search(value)]
    if named:
        why = "A variable is never changed."
        return Present(f"the variable {named[0]}", None, why, CONNECTOR_CLASS in variables[named[0]])
    if command.arguments is not None:
        return _among(command.arguments)
    for token in command.tokens:
        if match := _IN_TEXT.search(token):
            why = "It stands in the text of a command, which is never changed."
            return Present(match[0], None, why, CONNECTOR_CLASS in token)
    return None


def _among(arguments: Sequence[str]) -> Present | None:
    """Return what vLLM's parser would take: dotted forms override the others, and else the last one counts."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if is_flag(name, _OFFLOADING_FLAG):
            return Present(name, None, "It makes vLLM use another connector whatever else is given.")
        if "." in name and is_flag(name.partition(".")[0], TRANSFER_CONFIG_FLAG):
            return Present(name, None, "Its dotted form would override ours. Give it as one JSON value.")
    value = value_of(arguments, TRANSFER_CONFIG_FLAG)
    return Present(TRANSFER_CONFIG_FLAG, value, "", CONNECTOR_CLASS in value) if value else None


def value_of(arguments: Sequence[str], flag: str) -> str:
    """Return the value that vLLM's parser takes for a flag: the last one; empty if there is none."""
    found = ""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, separator, value = argument.partition("=")
        if is_flag(name, flag):
            found = (value if separator else following) or _NO_VALUE
    return found


def is_flag(name: str, flag: str) -> bool:
    """Return whether vLLM's parser reads a name as this flag: with underscores, or abbreviated.

    >>> is_flag("--kv_transfer_conf", "--kv-transfer-config"), is_flag("--kv", "--kv-transfer-config")
    (True, False)
    """
    name = name.replace("_", "-")
    return flag.startswith(name) and name.startswith(_SHORTEST[flag])


def merged(present: Present, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a MultiConnector of the pod's connectors and, behind them, ours.

    It loads from the first that has a prefix and stores to all. What vLLM reads only from the outermost
    configuration moves there: the engine's id, and that blocks which fail to load are computed again.

    Raises:
        Skip: the pod's configuration cannot be read or changed.
    """
    if present.value is None:
        raise _unmergeable(f"{present.place} cannot be merged: {present.why_fixed}")
    if "\\u0024" in present.value.lower():  # written again it would be `$`, which Kubernetes expands in `$(…)`
        raise _unmergeable(f"{present.place} cannot be merged: it has \\u0024. Write $$ instead.")
    theirs = _parse(present)
    if theirs["kv_connector"] == MULTI_CONNECTOR:
        return _appended(theirs, config, present.place)
    outer = {"kv_connector": MULTI_CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if "engine_id" in theirs:
        outer["engine_id"] = theirs.pop("engine_id")
    return {**outer, "kv_connector_extra_config": {"connectors": [theirs, dict(config)]}}


def _parse(present: Present) -> dict[str, Any]:
    try:
        theirs = json.loads(present.value or "")
    except (ValueError, RecursionError):
        theirs = None
    if not isinstance(theirs, dict) or not isinstance(theirs.get("kv_connector"), str):
        raise _unmergeable(f"{present.place} cannot be merged: it is not a JSON object with kv_connector.")
    return theirs


def _appended(theirs: dict[str, Any], config: Mapping[str, Any], place: str) -> dict[str, Any]:
    extra = theirs.get("kv_connector_extra_config")
    connectors = extra.get("connectors") if isinstance(extra, dict) else None
    if not isinstance(extra, dict) or not isinstance(connectors, list):
        raise _unmergeable(f"{place} cannot be merged: its {MULTI_CONNECTOR} has no list `connectors`.")
    extra = {**extra, "connectors": [*connectors, dict(config)]}
    return {**theirs, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


def _unmergeable(message: str) -> Skip:
    return Skip(SkipReason.CONFIGURATION_PRESENT, message)
