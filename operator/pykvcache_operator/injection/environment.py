"""The environment of vLLM's container. What the pod sets stays in force; ours is added to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import INJECTED_VARIABLE, TRANSFER_CONFIG_VARIABLE, VLLM_PLUGIN_NAME
from pykvcache_operator.injection.outcome import Document, Skip

PYTHONPATH = "PYTHONPATH"
VLLM_PLUGINS = "VLLM_PLUGINS"
KEPT_PREFIX = "PYKVCACHE_USER_"
"""A value that is not known here keeps its source under this name, and ours refers to it."""
HASH_SEED = ("PYTHONHASHSEED", "0")
"""Without it vLLM up to 0.26 hashes blocks differently after every start."""
FIELDS = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "NODE_NAME": "spec.nodeName"}


@dataclass(frozen=True, slots=True)
class Environment:
    """`env` of a container, read.

    Args:
        entries: as they are.
        has_sources: whether there is `envFrom`, whose variables are not known here.
    """

    entries: tuple[Document, ...]
    has_sources: bool = False

    @property
    def values(self) -> dict[str, str]:
        """By name; empty where the value comes from elsewhere. The last entry of a name counts, as for Kubernetes."""
        return {entry["name"]: "" if entry.get("valueFrom") else entry.get("value") or "" for entry in self.entries}

    @property
    def unknown(self) -> frozenset[str]:
        """Names of the variables whose value comes from elsewhere."""
        return frozenset(entry["name"] for entry in self.entries if entry.get("valueFrom"))

    @property
    def names(self) -> frozenset[str]:
        """Of all variables that `env` sets."""
        return frozenset(entry["name"] for entry in self.entries)

    def last(self, name: str) -> int | None:
        """Return the index of the entry that counts, or None."""
        found = [index for index, entry in enumerate(self.entries) if entry["name"] == name]
        return found[-1] if found else None


def read(container: Mapping[str, Any]) -> Environment:
    """Return the environment of a container.

    Raises:
        Skip: it is not what Kubernetes would accept.
    """
    raw = container.get("env")
    entries = [] if raw is None else raw
    if not isinstance(entries, list | tuple) or not all(map(_is_entry, entries)):
        message = f"container {container.get('name')}: env is not a list of names with a text or a valueFrom. Quote "
        raise Skip(SkipReason.UNSUPPORTED_POD, message + "numbers and booleans.")
    return Environment(tuple(entries), bool(container.get("envFrom")))


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return False
    return isinstance(entry.get("value"), str | None) and isinstance(entry.get("valueFrom"), Mapping | None)


def is_plugin_certain(environment: Environment) -> bool:
    """Return whether our vLLM plugin is surely loaded: no list of plugins that we cannot see may leave it out."""
    if VLLM_PLUGINS in environment.names:
        return not _may_be_missing(environment, VLLM_PLUGINS)
    return not environment.has_sources


def extend(
    environment: Environment, *, version: str, library_path: str, transfer_config: str | None
) -> tuple[list[Document], tuple[str, ...]]:
    """Return the entries with ours, and warnings.

    Args:
        library_path: goes before all else in PYTHONPATH; empty: PYTHONPATH stays as it is.
        transfer_config: for the plugin; None: vLLM has it as an argument.
    """
    entries, warnings = list(environment.entries), []
    if library_path:
        entries = _joined(entries, PYTHONPATH, library_path, f"{library_path}:{{}}", ":")
    if VLLM_PLUGINS in environment.names:
        if _may_be_missing(environment, VLLM_PLUGINS):
            warnings.append(_unknown_plugins("VLLM_PLUGINS comes from an optional key"))
        else:
            entries = _joined(entries, VLLM_PLUGINS, VLLM_PLUGIN_NAME, f"{{}},{VLLM_PLUGIN_NAME}", ",")
    if environment.has_sources:
        warnings += _about_sources(environment, library_path)
    entries += _missing(environment)
    entries.append({"name": INJECTED_VARIABLE, "value": version})
    if transfer_config is not None:
        entries.append({"name": TRANSFER_CONFIG_VARIABLE, "value": transfer_config})
    return entries, tuple(warnings)


def _joined(entries: Sequence[Document], name: str, ours: str, pattern: str, separator: str) -> list[Document]:
    """Return the entries with `ours` in the list that is the variable's value."""
    index = Environment(tuple(entries)).last(name)
    if index is None:
        return [*entries, {"name": name, "value": ours}]
    entry = entries[index]
    if entry.get("valueFrom"):
        kept = {"name": KEPT_PREFIX + name, "valueFrom": entry["valueFrom"]}
        new = [kept, {"name": name, "value": pattern.format(f"$({KEPT_PREFIX}{name})")}]
    else:
        value = entry.get("value") or ""
        if ours in value.split(separator):
            return list(entries)
        new = [{"name": name, "value": pattern.replace("{}", value) if value else ours}]
    return [*entries[:index], *new, *entries[index + 1 :]]


def _may_be_missing(environment: Environment, name: str) -> bool:
    """Return whether the variable's source may not exist. Kubernetes then leaves a reference to it as text."""
    index = environment.last(name)
    source = environment.entries[index].get("valueFrom") if index is not None else None
    return any(isinstance(part, Mapping) and bool(part.get("optional")) for part in (source or {}).values())


def _missing(environment: Environment) -> list[Document]:
    """Return what vLLM and the connector want to know and the pod does not say."""
    names = environment.names
    added: list[Document] = []
    if HASH_SEED[0] not in names:
        added.append({"name": HASH_SEED[0], "value": HASH_SEED[1]})
    for name, path in FIELDS.items():
        if name not in names:
            added.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return added


def _about_sources(environment: Environment, library_path: str) -> list[str]:
    warnings = []
    if library_path and PYTHONPATH not in environment.names:
        warnings.append("envFrom: a PYTHONPATH in it no longer counts. Set it in env, where it is kept.")
    if VLLM_PLUGINS not in environment.names:
        warnings.append(_unknown_plugins("envFrom may set VLLM_PLUGINS"))
    return warnings


def _unknown_plugins(what: str) -> str:
    return f"{what}: without `{VLLM_PLUGIN_NAME}` in it the cache stays off."
