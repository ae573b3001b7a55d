"""Our part in a kv-transfer-config, found and taken out: pure functions on vLLM's object, on JSON, on a command line.

Syntax of Python 3.8, see `plugin`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pykvcache_contract.names import (
    CONNECTOR_CLASS,
    HASH_ALGORITHM,
    HASH_FLAG,
    MULTI_CONNECTOR,
    TRANSFER_CONFIG_FLAG,
)


def connector(config: Any) -> str:
    """Return the connector that a configuration names, empty for none."""
    return str(_get(config, "kv_connector") or "")


def has_ours(config: Any) -> bool:
    """Return whether a configuration (vLLM's object, its JSON as a dictionary, or None) makes vLLM load us."""
    name = connector(config)
    return name == CONNECTOR_CLASS or (name == MULTI_CONNECTOR and any(has_ours(child) for child in _children(config)))


def without_ours(config: Any) -> Any:
    """Return a configuration of the same type without us, None if nothing is left; the given one does not change.

    A MultiConnector with one connector left becomes that one.
    """
    if not has_ours(config):
        return config
    rest = [child for child in _children(config) if not has_ours(child)] if connector(config) == MULTI_CONNECTOR else []
    if not rest:
        return None
    if len(rest) == 1:
        return dict(rest[0]) if isinstance(config, Mapping) else type(config)(**rest[0])
    extra = {**_get(config, "kv_connector_extra_config"), "connectors": rest}
    if isinstance(config, Mapping):
        return {**config, "kv_connector_extra_config": extra}
    left = copy.copy(config)
    left.kv_connector_extra_config = extra
    return left


def without_our_arguments(arguments: list[str]) -> list[str]:
    """Return a command line without what injection appended: its flag with our JSON, and just before it our hash.

    vLLM takes the last of several equal flags, so ours is the last; a user's own, before it, counts again.
    """
    positions = [index for index, argument in enumerate(arguments[:-1]) if argument == TRANSFER_CONFIG_FLAG]
    if not positions:
        return list(arguments)
    at = positions[-1]
    try:
        config = json.loads(arguments[at + 1])
    except ValueError:
        return list(arguments)
    if not isinstance(config, dict) or not has_ours(config):
        return list(arguments)
    rest = without_ours(config)
    start = at - 2 if arguments[max(0, at - 2) : at] == [HASH_FLAG, HASH_ALGORITHM] else at
    kept = [] if rest is None else [TRANSFER_CONFIG_FLAG, json.dumps(rest)]
    return arguments[:start] + kept + arguments[at + 2 :]


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _children(config: Any) -> list[Any]:
    extra = _get(config, "kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    return [child for child in children if isinstance(child, Mapping)] if isinstance(children, list) else []
