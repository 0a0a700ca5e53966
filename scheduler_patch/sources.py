# SPDX-License-Identifier: Apache-2.0
"""Looks symbols of SGLang up in its source files, without importing them. So a release can be looked at that is not installed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A symbol: where it is defined, and its syntax tree. A module's is an ``ast.Module``, and a parameter's an ``ast.arg``."""

    module: str
    node: Any


class Sources:
    """A tree of Python files.

    Args:
        root: the folder that holds SGLang's folder ``sglang``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sought: set[str] = set()  # ends where modules import a name from each other

    def find(self, target: str) -> Found | None:
        """The module, class, function, attribute or parameter that a dotted path names; None if it is not there."""
        if target in self._sought:
            return None
        self._sought.add(target)
        try:
            return self._find(target.split("."))
        finally:
            self._sought.remove(target)

    def _find(self, parts: list[str]) -> Found | None:
        for length in range(len(parts), 0, -1):
            tree = self._parse(".".join(parts[:length]))
            if tree is not None:
                return self._descend(Found(".".join(parts[:length]), tree), parts[length:])
        return None

    def parameters(self, target: str) -> list[str] | None:
        """Names of a function's parameters, as ``inspect.signature`` gives them; None if it is not there, or is no function."""
        found = self.find(target)
        if found is None or not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        names = [argument.arg for argument in _arguments(found.node)]
        return names[1:] if any(_name(each) == "classmethod" for each in found.node.decorator_list) else names

    def _descend(self, found: Found | None, names: list[str]) -> Found | None:
        for name in names:
            found = found and self._member(found, name)
        return found

    def _member(self, found: Found, name: str) -> Found | None:
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return next((Found(module, argument) for argument in _arguments(node) if argument.arg == name), None)
        for statement in _statements(node):
            if name in _bound(statement):
                return Found(module, statement)
            if isinstance(statement, ast.ImportFrom) and name in (alias.asname or alias.name for alias in statement.names):
                original = next(alias.name for alias in statement.names if name == (alias.asname or alias.name))
                imported = self.find(f"{self._imported(module, statement)}.{original}")
                if imported is not None:
                    return imported
        return self._of_bases(found, name) if isinstance(node, ast.ClassDef) else None

    def _of_bases(self, found: Found, name: str) -> Found | None:
        for method in (each for each in found.node.body if isinstance(each, ast.FunctionDef)):
            for statement in ast.walk(method):
                if f"self.{name}" in _bound(statement):
                    return Found(found.module, statement)
        for base in map(_name, found.node.bases):
            inherited = self.find(f"{found.module}.{base}.{name}") if base else None
            if inherited is not None:
                return inherited
        return None

    def _imported(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module
        package = module.split(".") if self._path(module).name == "__init__.py" else module.split(".")[:-1]
        return ".".join([*package[: len(package) - statement.level + 1], *filter(None, [statement.module])])

    def _path(self, module: str) -> Path | None:
        stem = self.root.joinpath(*module.split("."))
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)

    def _parse(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else _parse(path)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _statements(node: ast.AST):
    """The statements of a module or class, with those inside ``if`` and ``try``."""
    for statement in getattr(node, "body", ()):
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement)
            yield from getattr(statement, "orelse", ())


def _bound(statement: ast.AST) -> list[str]:
    if isinstance(statement, Definition):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)]


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [argument for argument in every if argument is not None]


def _name(node: ast.AST) -> str | None:
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
