"""What all benchmarks share: results on disk after every measurement, the environment beside them, tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = "benchmarks/results", "docs"  # by benchmarks themselves, which makes no code another
PACKAGES = ("triton", "sglang", "flashinfer-python", "sglang-freekv")


def environment() -> dict:
    """What a number depends on besides the benchmark."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        **code_of(ROOT, os.environ.get("COMMIT")),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }


def code_of(root: Path, named: str | None) -> dict:
    """The commit that a result is of, and whether the code that ran differs from it; ``dirty`` is None where nothing can tell.

    Args:
        named: the commit by the environment's ``COMMIT``, for a copy of the code without its repository.

    Raises:
        ValueError: ``named`` is no commit.
    """
    if named and not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", named):
        raise ValueError(f"COMMIT={named}: expected 7 to 40 hexadecimal digits; `git describe --always --dirty --exclude '*'` gives them")
    commit, _, marked = (named or "").partition("-")
    git = "git", "-C", str(root)
    if _output(*git, "rev-parse", "--show-toplevel") != str(root):
        return {"commit": commit or None, "dirty": True if marked else None}
    commit = commit or _output(*git, "rev-parse", "--short=12", "HEAD")
    code = "--", ".", *(f":(exclude){written}" for written in WRITTEN)
    same = _succeeds(*git, "diff", "--quiet", commit, *code) and not _output(*git, "ls-files", "--others", "--exclude-standard", *code)
    return {"commit": commit, "dirty": bool(marked) or not same}


def _command() -> str:
    """As typed, but for where the results went."""
    words = list(sys.argv[1:])
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    script = Path(sys.argv[0]).resolve()
    module = ".".join(script.with_suffix("").relative_to(ROOT).parts) if script.is_relative_to(ROOT) else None
    return " ".join(["python3", *(["-m", module] if module else [script.name]), *words])


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def summary(samples: Iterable[float]) -> dict[str, float]:
    """Median and spread of repeats."""
    samples = list(samples)
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "repeats": len(samples)}


class Report:
    """The results of one benchmark, in ``DIRECTORY/NAME.json``: a file from an earlier run is continued, measurement by measurement.

    Every result carries the number of the run that made it; ``runs`` has that run's environment. No result of an earlier run is lost:
    what is measured again takes its place in ``results``, and the earlier one is appended to ``superseded[key]``. Within a run the last
    result of a key counts.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.path = directory / f"{name}.json"
        directory.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {"runs": [], "results": {}}
        self.runs, self.results = [*earlier["runs"], environment()], earlier["results"]
        self.superseded: dict[str, list[dict]] = earlier.get("superseded", {})
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def add(self, key: str, result: dict) -> None:
        """Record one measurement and write the file; an earlier run's is kept beside it, and that is told."""
        number, before = len(self.runs) - 1, self.results.get(key)
        if before is not None and before["run"] != number:
            self.superseded.setdefault(key, []).append(before)
            commit = self.runs[before["run"]].get("commit")
            say(f"{key}: the result of run {before['run']}, commit {commit}, is replaced, and kept as superseded")
        self.results[key] = result | {"run": number}
        self._write()

    def note(self, **facts) -> None:
        """Record facts of this run beside its environment."""
        self.runs[-1].update(facts)
        self._write()

    def _write(self) -> None:
        with self._lock:
            part = self.path.with_suffix(".part")
            written = {"runs": self.runs, "results": self.results} | ({"superseded": self.superseded} if self.superseded else {})
            part.write_text(json.dumps(written, indent=1, default=str) + "\n")
            os.replace(part, self.path)

    @contextmanager
    def part(self, key: str, quiet: bool = False):
        """A part of the benchmark: if it fails, that is recorded and the next part goes on."""
        if not quiet:
            say(key)
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.failures.append(f"{key}: {text.splitlines()[0][:200]}")
            self.runs[-1].setdefault("failures", {})[key] = traceback.format_exc()[-4000:]
            self._write()
            say(f"{key} FAILED: {text[:2000]}")
        else:
            if not quiet:
                say(f"{key} took {time.monotonic() - started:.1f} s")

    def finish(self, *tables: str) -> int:
        """Print the tables and what failed; the exit status."""
        for table in tables:
            print(f"\n{table}")
        for failure in self.failures:
            print(f"FAILED {failure}")
        print(f"results: {self.path}", flush=True)
        return 1 if self.failures else 0


_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", flush=True)


def seconds_since_start() -> float:
    return time.monotonic() - _STARTED


def table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Columns of one width each; the first is text."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) if index == 0 else text.rjust(width) for index, (text, width) in enumerate(zip(row, widths)))
        for row in cells
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence], words: int = 1) -> str:
    """A table of which the first ``words`` columns are text; None is a dash."""
    lines = [header, [*["---"] * words, *["---:"] * (len(header) - words)], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def arguments(description: str, name: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help=f"directory of {name}.json")
    if parts:
        listed = ", ".join(parts)
        parser.add_argument("--only", nargs="+", default=["*"], metavar="PART", help=f"parts to run, wildcards allowed: {listed}")
        parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="parts to leave out, wildcards allowed")
    return parser


def chosen(options: argparse.Namespace) -> Callable[[str], bool]:
    """Whether a part was asked for."""

    def wanted(part: str) -> bool:
        return any(fnmatch(part, only) for only in options.only) and not any(fnmatch(part, skip) for skip in options.skip)

    return wanted
