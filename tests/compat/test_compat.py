"""The table of names in tools/compat covers what the connector uses, and its check notices what is missing."""

import ast
import dataclasses
import inspect
import logging
from pathlib import Path

import pytest
import tomllib

from compat.check import TABLE, Use, check_use, load_table
from compat.declarations import Package, parameters
from compat.sources import Installed

ROOT = Path(__file__).parents[2]
CONNECTOR = ROOT / "connector"
ENVIRONMENTS = ROOT / ".envs"

BASE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from .results import TransferResult

class LookupResult(Enum):
    HIT = 1
    MISS = 2

@dataclass
class Output:
    keys: list
    spec: object
    evicted: list = ()

class Root(ABC):
    @abstractmethod
    def close(self): ...

class Manager(Root):
    def __init__(self, config):
        self.seen = 0
        self.limit: int = 3

    @property
    def size(self): return 0

    @abstractmethod
    def lookup(self, key, req_context, deadline=None): ...

def make_key(block_hash, group, *, salt=b""): ...
"""


class Text:
    """A release whose files are given as text."""

    version = "1.0"

    def __init__(self, **files):
        self._files = {f"vllm/{name.replace('__', '/')}.py": text for name, text in files.items()}
        self._files["vllm/__init__.py"] = "from vllm.offload.base import Manager as Renamed\n"
        self._files["vllm/offload/__init__.py"] = ""

    def read(self, path):
        return self._files.get(path)


@pytest.fixture
def package():
    results = "class TransferResult:\n    job_id: int\n"
    return Package(Text(offload__base=BASE, offload__results=results))


def problems(package, **row):
    return check_use(package, Use(module=row.pop("module", "vllm.offload.base"), **row))


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "module"},
        {"kind": "value", "object": "TransferResult"},
        {"kind": "value", "object": "Renamed", "module": "vllm"},
        {"kind": "value", "object": "base", "module": "vllm.offload"},
        {"kind": "function", "object": "make_key", "parameters": ("block_hash", "group")},
        {"kind": "function", "object": "make_key", "parameters": ("block_hash", "group", "salt")},
        {"kind": "method", "object": "Manager.lookup", "parameters": ("key", "req_context")},
        {"kind": "override", "object": "Manager.lookup", "parameters": ("key", "req_context", "deadline")},
        {"kind": "construct", "object": "Output", "parameters": ("keys", "spec")},
        {"kind": "construct", "object": "Manager", "parameters": ("config",)},
        {"kind": "subclass", "object": "Manager", "implements": ("lookup", "close")},
        {"kind": "attribute", "object": "Manager", "names": ("seen", "limit", "size", "close")},
        {"kind": "attribute", "object": "LookupResult", "names": ("HIT", "gone | MISS")},
        {
            "kind": "attribute",
            "object": "Manager",
            "module": "vllm.old",
            "alternatives": ("vllm.offload.base:Manager",),
        },
    ],
)
def test_a_name_that_is_there_passes(package, row):
    assert [] == problems(package, **row)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"kind": "module", "module": "vllm.gone"}, "no such module"),
        ({"kind": "value", "object": "Gone"}, "no such name"),
        ({"kind": "function", "object": "make_key", "parameters": ("block_hash", "index")}, "no parameter 'index'"),
        ({"kind": "function", "object": "make_key", "parameters": ("block_hash",)}, "requires 'group'"),
        ({"kind": "method", "object": "Manager.gone"}, "no such function"),
        ({"kind": "override", "object": "Manager.lookup", "parameters": ("key", "req_context")}, "'deadline'"),
        ({"kind": "override", "object": "Manager.gone"}, "never be called"),
        ({"kind": "construct", "object": "Output", "parameters": ("keys",)}, "requires 'spec'"),
        ({"kind": "subclass", "object": "Manager", "implements": ("lookup",)}, "abstract method 'close'"),
        ({"kind": "attribute", "object": "LookupResult", "names": ("RETRY",)}, "no attribute 'RETRY'"),
        ({"kind": "attribute", "object": "Gone", "names": ("a",), "alternatives": ("Lost",)}, "no such class"),
    ],
)
def test_a_name_that_is_missing_fails(package, row, complaint):
    assert any(complaint in problem for problem in problems(package, **row))


@pytest.mark.slow
@pytest.mark.timeout(300)  # parses a release some hundred times
def test_every_name_of_the_table_is_needed_to_pass(installed):
    """Rename each thing the table asks for in the text of a real release: the row that asks for it must fail."""
    for use in (use for use in load_table() if use.applies_to(installed.version) and use.object):
        assert [] == check_use(Package(installed), use), use
        for names in demands(use):
            mutated = Package(Renaming(installed, names))
            assert check_use(mutated, use), f"{use.module}:{use.object} passes without {names}"


def demands(use):
    """Yield the sets of names of which a row needs at least one."""
    yield {use.object.rpartition(".")[2]}
    yield from ({part.strip() for part in name.split("|")} for name in use.names)
    yield from ({parameter} for parameter in use.parameters if parameter not in LATER_PARAMETERS)


LATER_PARAMETERS = {"expedited"}  # ours takes it for releases that pass it


class Renaming:
    """A release in which some names are spelled differently."""

    def __init__(self, source, names):
        self.version = source.version
        self._source, self._names = source, names

    def read(self, path):
        text = self._source.read(path)
        if text is None or not any(name in text for name in self._names):
            return text
        tree = ast.parse(text)
        for node in ast.walk(tree):
            for field in ("name", "id", "attr", "asname", "arg"):
                if (name := getattr(node, field, None)) in self._names:
                    setattr(node, field, f"{name}_renamed")
        return ast.unparse(tree)


@pytest.fixture(params=["0.22.1", "0.32.0"])
def installed(request):
    found = sorted(ENVIRONMENTS.glob(f"vllm-{request.param}/lib/python3.*/site-packages"))
    if not found:
        pytest.skip(f"needs the environment of vLLM {request.param}: make setup")
    return Installed(found[0])


def connector_trees():
    """Yield (file name, syntax tree) of every module of the connector."""
    for path in sorted(CONNECTOR.rglob("*.py")):
        yield path.name, ast.parse(path.read_text())


def vllm_imports():
    """Yield (file, module, name or "") of every import of vLLM in the connector."""
    for path, tree in connector_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((path, node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((path, a.name, "") for a in node.names if a.name.split(".")[0] == "vllm")


def test_the_table_covers_every_import_of_vllm_in_the_connector():
    uses = load_table()
    modules = {use.module for use in uses}
    names = {(use.module, use.object.partition(".")[0]) for use in uses}
    uncovered = [
        f"{path}: {module}:{name}"
        for path, module, name in vllm_imports()
        if (module, name) not in names and f"{module}.{name}".rstrip(".") not in modules
    ]
    assert [] == uncovered, "add rows to tools/compat/names.toml"


# Parameters and attributes of ours that hold objects of vLLM, in all modules but vllm_api, where nearly all do.
VLLM_OBJECTS = (
    "vllm_config",
    "request",
    "scheduler_output",
    "connector_output",
    "kv_cache_config",
    "req_context",
    "self.connector_scheduler",
    "self.connector_worker",
)


def foreign_roots(tree):
    """Return the names by which a module refers to modules that are not vLLM's."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {a.asname or a.name.split(".")[0] for node in imports for a in node.names if a.name.split(".")[0] != "vllm"}


def vllm_attributes():
    """Yield (file, attribute) of everything the connector reads from objects of vLLM, getattr included."""
    for path, tree in connector_trees():
        foreign = foreign_roots(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                written = ast.unparse(node)
                if path == "vllm_api.py" and written.partition(".")[0] not in foreign:
                    yield path, node.attr
                elif root := next((name for name in VLLM_OBJECTS if written.startswith(f"{name}.")), None):
                    yield from ((path, part) for part in written.removeprefix(f"{root}.").split("."))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
                if path == "vllm_api.py" and isinstance(node.args[1], ast.Constant):
                    yield path, node.args[1].value


# Attributes of Python's own types, which need no row.
PYTHON_TYPES = (str, bytes, int, list, dict, set, logging.Logger("x"), inspect.Signature, dataclasses.Field)


def test_the_table_covers_every_attribute_the_connector_reads():
    known = set(tomllib.loads(TABLE.read_text())["not_vllm"]["attributes"])
    known |= {name for kind in PYTHON_TYPES for name in dir(kind)}
    for use in load_table():
        known |= {use.object.rpartition(".")[2], use.module.rpartition(".")[2]}
        known |= {part.strip() for name in use.names for part in name.split("|")}
    uncovered = {f"{path}: {attribute}" for path, attribute in vllm_attributes() if attribute not in known}
    assert sorted(uncovered) == [], "add rows to tools/compat/names.toml, or the name to [not_vllm]"


# What vllm_api calls a base class whose name differs between releases.
BASES = {"WorkerBase": ("OffloadingWorker", "OffloadingHandler")}


def our_methods():
    """Yield (names of the vLLM base class, method) of every public method in a subclass of a class of vLLM."""
    inherited = {use.object for use in load_table() if use.kind == "subclass"}
    for _, tree in connector_trees():
        for node in ast.walk(tree):
            for base in (ast.unparse(base) for base in getattr(node, "bases", ())):
                names = [name for name in BASES.get(base, (base,)) if name in inherited]
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                yield from ((name, method) for name in names for method in methods if method.name[0] != "_")


def test_the_table_knows_every_method_that_vllm_calls(installed):
    """A method of ours that replaces one of vLLM's is a row of kind override, with our parameters."""
    package = Package(installed)
    uses = [use for use in load_table() if use.applies_to(installed.version)]
    modules = {use.object: use.module for use in uses if use.kind == "subclass"}
    rows = {use.object: use.parameters for use in uses if use.kind == "override"}
    for base, method in our_methods():
        found = package.find(modules[base], base) if base in modules else None
        if not found or not package.member(found, method.name):
            continue
        ours = parameters(method, is_method=True).names
        assert ours == rows.get(f"{base}.{method.name}"), f"{base}.{method.name} in tools/compat/names.toml"
