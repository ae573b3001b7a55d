"""The style guide as tests: limits, banned calls, where files may lie, and no module that nobody imports.

Each rule is a function from a file to complaints, and each has a test that shows what it accepts and what it catches.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600

PRINTS = ("cli/", "bench/", "tools/", "e2e/harness/__main__.py")
READS_ENVIRONMENT = (
    "bench/",  # hands it on to the engines it starts
    "cli/",
    "connector/pykvcache_connector/plugin.py",  # runs where settings cannot be imported
    "connector/pykvcache_connector/settings.py",
    "connector/pykvcache_connector/vllm_api.py",
    "e2e/",
    "tests/",
    "tools/",
)
# Modules that only the outside names; everything else must be imported by some other module, be named in a string, or,
# in bench, be a program of its own.
ENTRY_MODULES = {"pykvcache_connector.connector"}


@dataclass
class File:
    """One file of the repository, by its path from the root."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds)) if self.is_python else iter(())


def repository_files() -> list[File]:
    """Return every text file that is or could be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = []
    for name in sorted(set(names)):
        try:
            files.append(File(name, (ROOT / name).read_text()))
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # a picture, or a file that was just deleted
    return files


def called(node: ast.AST) -> str:
    """Return the dotted name of an expression, as written."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


# ---- rules ----


def long_functions(file: File) -> Iterator[str]:
    for node in file.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        length = node.end_lineno - node.lineno + 1
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            length -= first.end_lineno - first.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield f"{file.path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"


def long_files(file: File) -> Iterator[str]:
    count = len(file.text.splitlines())
    if file.is_python and count > FILE_LINES_MAX:
        yield f"{file.path}: {count} lines, at most {FILE_LINES_MAX}"


def prints(file: File) -> Iterator[str]:
    if not file.path.startswith(PRINTS):
        for node in file.nodes(ast.Call):
            if called(node.func) == "print":
                yield f"{file.path}:{node.lineno}: print; log instead"


def environment_reads(file: File) -> Iterator[str]:
    if not file.path.startswith(READS_ENVIRONMENT):
        for node in file.nodes(ast.Attribute):
            if called(node) in {"os.environ", "os.environb", "os.getenv", "os.putenv"}:
                yield f"{file.path}:{node.lineno}: {called(node)}; parse it once, in settings"


def sleeping_tests(file: File) -> Iterator[str]:
    if file.path.startswith(("tests/", "e2e/test_")):
        for node in file.nodes(ast.Call):
            if called(node.func) in {"time.sleep", "sleep"}:
                yield f"{file.path}:{node.lineno}: sleep; wait for an event or pass a clock"


def loose_todos(file: File) -> Iterator[str]:
    marker = re.compile(r"#.*\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")
    if file.is_python:
        for number, line in enumerate(file.text.splitlines(), 1):
            if marker.search(line):
                yield f"{file.path}:{number}: name an issue, (#123), or do it now"


def packages_at_roots(file: File) -> Iterator[str]:
    if re.fullmatch(r"[a-z]+/__init__\.py", file.path):
        yield f"{file.path}: a source root is no package; as one it would shadow modules of the same name"


def private_paths(file: File) -> Iterator[str]:
    private = re.compile(
        r"(?<![\w.-])/wor" + r"k\b(?!space)|/tmp/ven" + r"vs|(?<!\w)\.libr" + r"ary\b|\.\./sha" + r"red"
    )
    for number, line in enumerate(file.text.splitlines(), 1):
        if match := private.search(line):
            yield f"{file.path}:{number}: names {match[0]}, which exists on one machine only"


RULES = [
    long_functions,
    long_files,
    prints,
    environment_reads,
    sleeping_tests,
    loose_todos,
    packages_at_roots,
    private_paths,
]


@pytest.fixture(scope="module")
def files():
    found = repository_files()
    assert len(found) > 20, "git lists no files here"
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(files, rule):
    assert [] == [complaint for file in files for complaint in rule(file)]


def function_of(lines: int, *, docstring: int = 0) -> str:
    text = "def f():\n"
    if docstring:
        text += '    """' + "\n" * (docstring - 1) + '    """\n'
    return text + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("rule", "path", "good", "bad"),
    [
        (long_functions, "storage/a.py", function_of(70), function_of(71)),
        (long_functions, "storage/a.py", function_of(70, docstring=9), function_of(71, docstring=9)),
        (long_files, "storage/a.py", "x = 1\n" * 600, "x = 1\n" * 601),
        (prints, "storage/a.py", "log('x')", "print('x')"),
        (environment_reads, "storage/a.py", "import os\nos.sep", "import os\nos.environ['A']"),
        (environment_reads, "connector/a.py", "getenv = 1", "import os\nos.getenv('A')"),
        (sleeping_tests, "tests/a.py", "event.wait(1)", "import time\ntime.sleep(1)"),
        (loose_todos, "storage/a.py", "# TO" + "DO(#12): later", "# TO" + "DO: later"),
        (private_paths, "docs/a.md", "/var/work, framework/work and injection.libr" + "ary", "see /wor" + "k/main"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rule_accepts_the_valid_and_catches_the_invalid(rule, path, good, bad):
    assert [] == list(rule(File(path, good)))
    assert len(list(rule(File(path, bad)))) == 1


@pytest.mark.parametrize("path", ["storage/__init__.py", "operator/__init__.py", "tests/__init__.py"])
def test_a_root_that_becomes_a_package_is_caught(path):
    assert list(packages_at_roots(File(path, "")))
    assert [] == list(packages_at_roots(File("storage/pykvcache_storage/__init__.py", "")))


@pytest.mark.parametrize("path", ["cli/pykvcache_cli/main.py", "tools/x.py", "bench/pykvcache_bench/x.py"])
def test_programs_may_print(path):
    assert [] == list(prints(File(path, "print(1)")))


# ---- modules that nobody imports ----


def module_name(path: str) -> str:
    """Return the importable name of a product file, "" for others."""
    match = re.fullmatch(r"[a-z]+/(pykvcache_\w+(?:/\w+)*)\.py", path)
    return match[1].replace("/", ".").removesuffix(".__init__") if match else ""


def mentions(file: File) -> Iterator[str]:
    """Yield the modules that a file imports, or names in a string as entry points do."""
    for node in file.nodes(ast.Import, ast.ImportFrom, ast.Constant):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def orphans(files: list[File], entries: set[str]) -> list[str]:
    """Return the product modules that no product file mentions; simulations may be for tests only."""
    products = {module_name(file.path): file for file in files if module_name(file.path)}
    mentioned = set(entries)
    for file in files:
        own = module_name(file.path)
        if own or file.path.startswith("tests/"):
            found = set(mentions(file)) - {own}
            mentioned |= found if own else {name for name in found if ".testing" in name}
    packages = {name for name, file in products.items() if file.path.endswith("__init__.py")}
    lost = set(products) - packages - mentioned
    return sorted(name for name in lost if not is_program(products[name]))


def is_program(file: File) -> bool:
    """Say whether a file is meant to be run by `python -m`."""
    return file.path.endswith("/__main__.py") or (
        file.path.startswith("bench/") and '__name__ == "__main__"' in file.text
    )


def test_every_module_is_imported_by_something_or_is_an_entry_point(files):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    entries = {target.partition(":")[0] for group in groups for target in group.values()}
    assert [] == orphans(files, entries | ENTRY_MODULES)


def test_a_module_that_only_tests_import_is_an_orphan():
    files = [
        File("storage/pykvcache_storage/__init__.py", ""),
        File("storage/pykvcache_storage/used.py", "import pykvcache_storage.used"),
        File("storage/pykvcache_storage/lost.py", "from pykvcache_storage import used"),
        File("storage/pykvcache_storage/named.py", ""),
        File("storage/pykvcache_storage/main.py", "x = 'pykvcache_storage.named:run'"),
        File("storage/pykvcache_storage/testing/disk.py", ""),
        File("tests/a.py", "import pykvcache_storage.lost, pykvcache_storage.testing.disk"),
    ]
    assert orphans(files, {"pykvcache_storage.main"}) == ["pykvcache_storage.lost"]
