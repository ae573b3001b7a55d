"""What a Python package declares, found by reading and never by importing.

Answers the questions a user of a foreign API has: is there such a name, class, method, field or attribute, which
parameters does it take, which methods must a subclass define. Follows re-exports and base classes within the package.
Whatever is made at run time only (setattr, `__getattr__`) stays unseen.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from compat.sources import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_DEPTH = 12
"""Longest chain of re-exports or base classes that is followed."""


@dataclass(frozen=True)
class Found:
    """A declaration and the module that holds it."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Parameters:
    """How a function may be called, without self or cls."""

    names: tuple[str, ...]
    required: frozenset[str]
    takes_any_keyword: bool


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements that run when a module or class body runs, also those under `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _assigned(statement: ast.stmt) -> set[str]:
    """Return the plain names that a statement binds."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = [leaf for target in statement.targets for leaf in ast.walk(target) if isinstance(leaf, ast.expr)]
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


class Package:
    """The declarations of one release of vLLM."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, or None if there is no such module."""
        if name not in self._trees:
            path = name.replace(".", "/")
            text = self._source.read(f"{path}.py")
            if text is None:
                text = self._source.read(f"{path}/__init__.py")
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def _is_package(self, name: str) -> bool:
        return self._source.read(f"{name.replace('.', '/')}/__init__.py") is not None

    def find(self, module: str, name: str, depth: int = 0) -> Found | None:
        """Return the declaration of a top-level name, following `from … import`; a module counts as a name too."""
        tree = self.module(module)
        if tree is None or depth > MAX_DEPTH:
            return None
        # The last binding wins, except in `try: … except ImportError:`, where the first one is the usual case.
        for statement in _statements(tree.body):
            if name in _assigned(statement):
                return Found(module, statement)
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._origin(module, statement)
                        if found := self.find(origin, alias.name, depth + 1):
                            return found
        submodule = self.module(f"{module}.{name}")
        return Found(f"{module}.{name}", submodule) if submodule else None

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a `from … import` names."""
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        up = statement.level - 1 if self._is_package(module) else statement.level
        base = parts[: len(parts) - up]
        return ".".join(base + ([statement.module] if statement.module else []))

    def lineage(self, found: Found, depth: int = 0) -> Iterator[Found]:
        """Yield a class and its base classes inside the package, nearest first."""
        if not isinstance(found.node, ast.ClassDef) or depth > MAX_DEPTH:
            return
        yield found
        for base in found.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(expression, ast.Name) and (parent := self.find(found.module, expression.id)):
                yield from self.lineage(parent, depth + 1)

    def member(self, found: Found, name: str) -> Found | None:
        """Return the declaration of a class member: method, property, field, or attribute set on `self`."""
        for owner in self.lineage(found):
            assert isinstance(owner.node, ast.ClassDef)
            for statement in _statements(owner.node.body):
                if name in _assigned(statement):
                    return Found(owner.module, statement)
            for node in ast.walk(owner.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                    if isinstance(node.value, ast.Name) and node.value.id == "self":
                        return Found(owner.module, node)
        return None

    def abstract_methods(self, found: Found) -> set[str]:
        """Return the names that a subclass must define before it can be instantiated."""
        defined: set[str] = set()
        abstract: set[str] = set()
        for owner in self.lineage(found):
            assert isinstance(owner.node, ast.ClassDef)
            for statement in _statements(owner.node.body):
                if isinstance(statement, Function) and statement.name not in defined:
                    defined.add(statement.name)
                    if any("abstract" in ast.unparse(decorator) for decorator in statement.decorator_list):
                        abstract.add(statement.name)
        return abstract

    def fields(self, found: Found) -> Parameters:
        """Return the parameters of a dataclass, base classes' fields first, or those of `__init__` if it has one."""
        initializer = self.member(found, "__init__")
        if initializer and isinstance(initializer.node, Function):
            return parameters(initializer.node, is_method=True)
        names: dict[str, bool] = {}
        for owner in reversed(list(self.lineage(found))):
            assert isinstance(owner.node, ast.ClassDef)
            for statement in _statements(owner.node.body):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" not in ast.unparse(statement.annotation):
                        names[statement.target.id] = statement.value is None
        return Parameters(tuple(names), frozenset(name for name, required in names.items() if required), False)


def parameters(function: Function, *, is_method: bool) -> Parameters:
    """Return how a function may be called."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    required = {argument.arg for argument in positional[: len(positional) - len(arguments.defaults)]}
    required |= {a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default}
    if is_method and "staticmethod" not in decorators:
        required.discard(positional[0].arg)
        positional = positional[1:]
    names = tuple(argument.arg for argument in [*positional, *arguments.kwonlyargs])
    return Parameters(names, frozenset(required), arguments.kwarg is not None)
