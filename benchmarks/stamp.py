"""What a number depends on besides its benchmark: the code, the machine and the versions that ran."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "benchmarks/results", "docs"  # by benchmarks themselves, which makes no code another
MOST_NAMED = 20  # files that differ
PACKAGES = ("triton", "sglang", "flashinfer-python", "sglang-freekv")


def environment() -> dict:
    """What a number depends on besides the benchmark."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        **code_of(ROOT, os.environ.get("COMMIT")),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }


def code_of(root: Path, named: str | None) -> dict:
    """The commit that a result is of: ``commit``, and ``commit_from``, which says who told it, ``git`` or the variable ``COMMIT``.

    ``dirty`` says whether the code that ran differs from a commit, and is None where nothing can tell. Code that differs has no commit.
    Its stamp names the commit it was made from, ``base``, and the files that differ, ``changed``.

    Args:
        named: the commit by the environment's ``COMMIT``, for a copy of the code without its repository.

    Raises:
        ValueError: ``named`` is no commit.
    """
    if named and not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", named):
        raise ValueError(f"COMMIT={named}: expected 7 to 40 hexadecimal digits; `git describe --always --dirty --exclude '*'` gives them")
    commit, _, marked = (named or "").partition("-")
    git = "git", "-C", str(root)
    has_git = _output(*git, "rev-parse", "--show-toplevel") == str(root)
    source = "git" if has_git else "COMMIT" if named else None
    if has_git:
        commit = commit or _output(*git, "rev-parse", "--short=12", "HEAD")
        written = [f":(exclude){path}" for path in WRITTEN]
        new = _output(*git, "ls-files", "--others", "--exclude-standard", "--", "*.py", *written)
        changed = [*_differing(git, commit, written), *(new or "").splitlines()]
    else:
        changed = []
    if changed or marked:
        return {"commit": None, "commit_from": source, "dirty": True, "base": commit, "changed": changed[:MOST_NAMED]}
    return {"commit": commit or None, "commit_from": source, "dirty": False if has_git else None}


def _differing(git: tuple[str, ...], commit: str, written: list[str]) -> list[str]:
    """Tracked files that differ from ``commit``; the commit itself, if the repository does not have it."""
    if not _succeeds(*git, "cat-file", "-e", f"{commit}^{{commit}}"):
        return [f"all: {commit} is not in the repository"]
    return (_output(*git, "diff", "--name-only", commit, "--", ".", *written) or "").splitlines()


def command() -> str:
    """As typed, but for where the results went."""
    words = list(sys.argv[1:])
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    script = Path(sys.argv[0]).resolve()
    module = ".".join(script.with_suffix("").relative_to(ROOT).parts) if script.is_relative_to(ROOT) else None
    return " ".join(["python3", *(["-m", module] if module else [script.name]), *words])


def _output(*words: str) -> str | None:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _succeeds(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, timeout=20).returncode == 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
