"""Compares the table of names we use (`names.toml`) with what one release of vLLM declares.

Kinds of use, each with what it demands:
    module      it exists
    value       a top-level name of any sort
    function    we call it: our `parameters` exist, and it requires no others
    method      the same for `Class.method`
    construct   we build it: the same for a dataclass or a class with `__init__`
    override    vLLM calls ours: for each of `methods`, theirs has no parameter that ours lacks
    subclass    we inherit: it has no abstract method outside `implements`
    attribute   the class has each of `names`: field, property, method, enum member, or set on self
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from compat.declarations import Found, Function, Package, Parameters, parameters

TABLE = Path(__file__).with_name("names.toml")
KEYS_OF_USE = {"module", "object", "kind", "parameters", "implements", "names", "alternatives", "since", "until", "why"}
KNOWN_KEYS = KEYS_OF_USE | {"methods"}


@dataclass(frozen=True)
class Use:
    """One row of the table.

    Args:
        alternatives: other `module:object` that serve as well; one of them must pass.
        since, until: the row holds for releases from `since` on, and before `until`.
    """

    module: str
    kind: str
    object: str = ""
    parameters: tuple[str, ...] = ()
    implements: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    why: str = ""

    def applies_to(self, version: str) -> bool:
        number = release(version)
        return (not self.since or number >= release(self.since)) and (not self.until or number < release(self.until))


def release(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare."""
    return tuple(int(part) for part in version.split("+")[0].split("."))


def load_table(path: Path = TABLE) -> list[Use]:
    """Read the table; an unknown key or kind is an error."""
    uses = []
    for row in tomllib.loads(path.read_text())["use"]:
        if unknown := set(row) - KNOWN_KEYS:
            raise ValueError(f"{path.name}: unknown keys {sorted(unknown)} in {row}")
        if row["kind"] not in CHECKS:
            raise ValueError(f"{path.name}: unknown kind in {row}")
        uses += [Use(**values) for values in expand(row)]
    return uses


def expand(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each use in a row: one, or one for each of its methods."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key != "methods"}
    methods = row.get("methods")
    if methods is None:
        yield values
        return
    for name, names in methods.items():
        yield {**values, "object": f"{row['object']}.{name}", "parameters": tuple(names)}


def check(package: Package, version: str, uses: list[Use]) -> tuple[int, list[str]]:
    """Return how many rows hold for this release, and one sentence for each that does not."""
    rows = [use for use in uses if use.applies_to(version)]
    failures = [problem for use in rows for problem in check_use(package, use)]
    return len(rows), failures


def check_use(package: Package, use: Use) -> list[str]:
    """Return what is wrong with one row; an alternative that is fine makes all fine."""
    places = [(use.module, use.object)]
    for alternative in use.alternatives:
        module, _, name = alternative.rpartition(":")
        places.append((module or use.module, name))
    problems: list[str] = []
    for module, name in places:
        found = list(CHECKS[use.kind](package, use, module, name))
        if not found:
            return []
        problems += [f"{module}:{name} ({use.kind}): {problem}" for problem in found]
    return problems


def _locate(package: Package, module: str, name: str) -> Found | None:
    """Find `name` or `Class.member` in a module."""
    owner, _, member = name.partition(".")
    found = package.find(module, owner)
    return package.member(found, member) if found and member else found


def _module(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    if package.module(module) is None:
        yield "no such module"


def _value(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    if not _locate(package, module, name):
        yield "no such name"


def _call(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    found = _locate(package, module, name)
    if not found or not isinstance(found.node, Function):
        yield "no such function"
        return
    yield from _compare_call(parameters(found.node, is_method="." in name), use.parameters)


def _construct(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    found = _locate(package, module, name)
    if not found:
        yield "no such class"
        return
    yield from _compare_call(package.fields(found), use.parameters)


def _compare_call(theirs: Parameters, ours: tuple[str, ...]) -> Iterator[str]:
    for parameter in ours:
        if parameter not in theirs.names and not theirs.takes_any_keyword:
            yield f"no parameter {parameter!r}, it has {list(theirs.names)}"
    for parameter in sorted(theirs.required - set(ours)):
        yield f"requires {parameter!r}, which we do not pass"


def _override(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    found = _locate(package, module, name)
    if not found or not isinstance(found.node, Function):
        yield "no such method, so ours would never be called"
        return
    for parameter in parameters(found.node, is_method=True).names:
        if parameter not in use.parameters:
            yield f"has the parameter {parameter!r}, which ours does not take"


def _subclass(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    found = _locate(package, module, name)
    if not found:
        yield "no such class"
        return
    for method in sorted(package.abstract_methods(found) - set(use.implements)):
        yield f"has the abstract method {method!r}, which ours does not define"


def _attribute(package: Package, use: Use, module: str, name: str) -> Iterator[str]:
    found = _locate(package, module, name)
    if not found:
        yield "no such class"
        return
    for wanted in use.names:
        if not any(package.member(found, alternative.strip()) for alternative in wanted.split("|")):
            yield f"no attribute {wanted!r}"


CHECKS: dict[str, Callable[[Package, Use, str, str], Iterator[str]]] = {
    "module": _module,
    "value": _value,
    "function": _call,
    "method": _call,
    "construct": _construct,
    "override": _override,
    "subclass": _subclass,
    "attribute": _attribute,
}
