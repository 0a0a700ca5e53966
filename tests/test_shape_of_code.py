"""Functions of the product stay short, and take few enough positional arguments that none is swapped unseen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sglang_freekv", "kernels", "memory_pool", "scheduler_patch", "launch")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
MOST_LINES, MOST_ARGUMENTS = 60, 7


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def too_long(source: str) -> list[str]:
    lines = {function.name: function.end_lineno - function.lineno + 1 for function in functions(source)}
    return [f"{name} has {count} lines" for name, count in lines.items() if count > MOST_LINES]


def too_many(source: str) -> list[str]:
    """A hook begins with ``original``, and its other arguments are those of SGLang's function. Triton passes no structures to a kernel."""
    found = []
    for function in functions(source):
        names = positional(function)
        kernel = any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)
        if len(names) > MOST_ARGUMENTS and not kernel and names[0] != "original":
            found.append(f"{function.name} takes {len(names)} positional arguments")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_functions_are_short_and_take_few_arguments(file):
    source = file.read_text()
    assert not too_long(source), f"expected at most {MOST_LINES} lines; give its parts names"
    assert not too_many(source), f"expected at most {MOST_ARGUMENTS}; group them by what they mean, or make some keyword-only"


def test_the_limits_find_what_is_beyond_them():
    body, many = "\n    pass" * MOST_LINES, ", ".join(f"a{n}" for n in range(MOST_ARGUMENTS + 1))
    assert too_long(f"def long():{body}") == ["long has 61 lines"]
    for source in (f"def wide({many}): ...", f"class A:\n    async def wide(self, {many}): ..."):
        assert too_many(source) == ["wide takes 8 positional arguments"]
    for source in (f"@triton.jit\ndef kernel({many}): ...", f"def hook(original, {many}): ...", f"def keywords(*, {many}): ..."):
        assert not too_many(source)
