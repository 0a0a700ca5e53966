"""Types and style: what mypy and ruff find fault with. Both are configured in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUBPACKAGES = ("kernels", "memory_pool", "scheduler_patch", "launch")
SWAPPED = """
import torch
from sglang_freekv import kernels
from sglang_freekv.kernels import Candidates, Heads, Misses, Tables


def plan(candidates: Candidates, heads: Heads, tables: Tables, misses: Misses, counts: torch.Tensor) -> None:
    kernels.plan_rest(candidates, tables, heads, misses, counts, ahead_first=True)
    kernels.plan_rest(candidates, heads, tables, misses, counts)
    candidates.page_tables
"""


def found_by(*command: object, cwd: Path = ROOT) -> str:
    plain = {name: value for name, value in os.environ.items() if "FORCE_COLOR" not in name}  # colours would stand within the words
    words = [sys.executable, "-P", "-m", *map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=plain, text=True, capture_output=True, timeout=300)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def types() -> Path:
    """The package as it is installed, of links: mypy does not follow an editable install."""
    package = ROOT / ".out" / "types" / "sglang_freekv"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {file.name: file for file in (ROOT / "sglang_freekv").iterdir()} | {name: ROOT / name for name in SUBPACKAGES}
    for stale in package.iterdir():
        stale.unlink()
    for name, target in wanted.items():
        (package / name).symlink_to(target)
    return package.parent


def mypy(types: Path, *what: object) -> str:
    return found_by("mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".out" / "mypy", *what, cwd=types)


def test_types(types):
    assert not (found := mypy(types, "-p", "sglang_freekv")), found


def test_a_swapped_argument_is_found(types, tmp_path):
    (tmp_path / "swapped.py").write_text(SWAPPED)
    found = mypy(types, tmp_path / "swapped.py").splitlines()
    expected = ['Argument 2 has incompatible type "Tables"', 'Argument 3 has incompatible type "Heads"', 'Missing named argument "ahead_first"',
                '"Candidates" has no attribute "page_tables"']  # fmt: skip
    assert len(found) == len(expected) + 1 and all(fault in line for fault, line in zip(expected, found)), "\n".join(found)


def test_style():
    assert not (found := found_by("ruff", "check", "--no-cache", ".")), found


def test_format():
    assert not (found := found_by("ruff", "format", "--no-cache", "--check", ".")), f"{found}\nruff format . mends this"
