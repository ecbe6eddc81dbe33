"""A function's text together with all that it uses of this package, so that it runs where the package is not."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_PACKAGE = "nanovllm"


class NotSelfContained(ValueError):
    """A function's text cannot be collected; the message says why."""


def self_contained(*wanted: Callable[..., Any]) -> str:
    """Python code that defines functions and classes of this package under their names, and before each what it uses.

    Functions, classes and constants of the package's modules are copied. Imports of other packages stay imports. Ops
    are copied as their references, and have the attribute `native` as an op has.

    Raises:
        NotSelfContained: the text is not in a file, or two different things of one name are used.
    """
    collector = _StatementCollector()
    for one in wanted:
        module = inspect.getmodule(one)
        if module is None or not hasattr(module, "__file__"):
            raise NotSelfContained(f"the text of {one.__name__} is not in a module's file")
        collector.add(module, one.__name__)
    imports = sorted(set(collector.imports), key=lambda line: (line.startswith("from"), line))
    return "\n".join(["from __future__ import annotations", "", *imports, "", "", *collector.parts]).rstrip() + "\n"


class _StatementCollector:
    """Collects the statements that define names, each after what it uses."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.parts: list[str] = []
        self._origin: dict[str, str] = {}
        self._trees: dict[str, dict[str, ast.stmt]] = {}
        """module -> name -> the statement of its top level that defines it."""

    def add(self, module: ModuleType, name: str) -> None:
        """The statement that defines a name at the top level of a module, and what it uses."""
        statement = self._defined(module).get(name)
        if statement is None:
            return  # a builtin, a parameter or a local variable
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._add_import(module, name, statement)
            return
        if not self._is_new(name, module.__name__):
            return
        statement, was_op = _without_op(statement)
        for used in _used(statement):
            if used != name:
                self.add(module, used)
        self.parts += [ast.unparse(statement), "" if isinstance(statement, (ast.Assign, ast.AnnAssign)) else "\n"]
        if was_op:
            self.parts += [f"{name}.native = {name}\n\n"]

    def _add_import(self, module: ModuleType, name: str, statement: ast.Import | ast.ImportFrom) -> None:
        alias = next(a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name)
        renamed = "" if alias.asname is None else f" as {alias.asname}"
        if isinstance(statement, ast.Import):
            line = f"import {alias.name}{renamed}"
        else:
            if (statement.module or "").partition(".")[0] == _PACKAGE:
                if alias.asname not in (None, alias.name):
                    raise NotSelfContained(f"{module.__name__} imports {alias.name} under another name, {alias.asname}")
                self.add(importlib.import_module(statement.module or ""), alias.name)
                return
            line = f"from {statement.module} import {alias.name}{renamed}"
        if self._is_new(name, line):
            self.imports.append(line)

    def _is_new(self, name: str, origin: str) -> bool:
        known = self._origin.get(name)
        if known not in (None, origin):
            raise NotSelfContained(f"{name} is of {known} and of {origin}")
        self._origin[name] = origin
        return known is None

    def _defined(self, module: ModuleType) -> dict[str, ast.stmt]:
        if module.__name__ not in self._trees:
            tree = ast.parse(inspect.getsource(module))
            self._trees[module.__name__] = {n: s for s in tree.body for n in _names_of(s) if n != "annotations"}
        return self._trees[module.__name__]


def _names_of(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (a.asname or a.name.partition(".")[0] for a in statement.names)
    elif isinstance(statement, ast.Assign):
        yield from (n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _without_op(statement: ast.stmt) -> tuple[ast.stmt, bool]:
    """A function without the decorator that declares an op, and whether it had it."""
    if not isinstance(statement, ast.FunctionDef):
        return statement, False
    kept = [d for d in statement.decorator_list if getattr(getattr(d, "func", d), "id", "") != "op"]
    was_op = len(kept) < len(statement.decorator_list)
    statement.decorator_list = kept
    return statement, was_op


def _used(statement: ast.stmt) -> list[str]:
    """The names that a statement reads, in order; those of annotations do not count, since they are not evaluated."""
    found: dict[str, None] = {}

    def visit(node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.Name):
                    found[child.id] = None
                if isinstance(child, ast.AST):
                    visit(child)

    visit(statement)
    return list(found)
