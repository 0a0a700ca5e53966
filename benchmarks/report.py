"""What all benchmarks share: results on disk after every measurement, the environment beside them, tables."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import secrets
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.stamp import ROOT, environment

RESULTS = ROOT / "benchmarks" / "results"
JOINT_RUN = "BENCHMARK_RUN"  # environment variable of processes that make one run: an id that no other run has, a space, their command


def summary(samples: Iterable[float]) -> dict[str, float]:
    """Median and spread of repeats."""
    samples = list(samples)
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "repeats": len(samples)}


class Report:
    """The results of one benchmark, in ``DIRECTORY/NAME.json``: a file from an earlier run is continued, measurement by measurement.

    Every result carries the number of the run that made it; ``runs`` has that run's environment. No result of an earlier run is lost:
    what is measured again takes its place in ``results``, and the earlier one is appended to ``superseded[key]``. Within a run the last
    result of a key counts. Processes with the same ``JOINT_RUN`` may write one file side by side, each its own keys, and are one run.

    Results of ``RESULTS`` are those of a commit. Code that differs from its commit, or whose commit nobody told, writes elsewhere only:
    there :meth:`part`, :meth:`add` and :meth:`note` raise SystemExit.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.path = directory / f"{name}.json"
        directory.mkdir(parents=True, exist_ok=True)
        earlier, mine = self._read(), environment()
        self._stamp = {name: value for name, value in mine.items() if name not in ("date", "command")}
        mine |= _run_of(os.environ.get(JOINT_RUN), mine.get("command"))
        for run in earlier["runs"]:
            if run.get("id") == mine["id"]:
                self._ensure_one_stamp(run)
        earlier["runs"] = [run for run in earlier["runs"] if run.get("id") != mine["id"]]
        self.runs, self.results = [*earlier["runs"], mine], earlier["results"]
        self.superseded: dict[str, list[dict]] = earlier["superseded"]
        self.failures: list[str] = []
        self._lock, self._keys, self._facts, self._told = threading.Lock(), set(), {}, set()  # keys and facts of this process

    def add(self, key: str, result: dict) -> None:
        """Record one measurement and write the file; an earlier run's is kept beside it, and that is told."""
        number, before = len(self.runs) - 1, self.results.get(key)
        if before is not None and before["run"] != number:
            self.superseded.setdefault(key, []).append(before)
            commit = self.runs[before["run"]].get("commit")
            say(f"{key}: the result of run {before['run']}, commit {commit}, is replaced, and kept as superseded")
        self.results[key] = result | {"run": number}
        self._keys.add(key)
        self._write()

    def note(self, **facts) -> None:
        """Record facts of this run beside its environment."""
        self.runs[-1].update(facts)
        self._facts.update(facts)
        self._write()

    def ensure_one_device(self, beside: Callable[[str], bool]) -> None:
        """Raises SystemExit if a result that this run's would stand beside, told by its key, is of another device."""
        here = self.runs[-1]["device"]
        there = {self.runs[result["run"]]["device"] for key, result in self.results.items() if beside(key)} - {here}
        if there:
            raise SystemExit(
                f"{self.path}: expected results of {here} alone to compare with, but some are of {', '.join(sorted(there))}; "
                "give --suffix NAME, and a file of its own is written"
            )

    def _ensure_of_a_commit(self) -> None:
        stamp = self.runs[-1]
        if stamp["commit"] or RESULTS not in self.path.resolve().parents:
            return
        if stamp["dirty"]:
            found, remedy = f"the code differs from {stamp['base']}: {', '.join(stamp['changed']) or 'as COMMIT says'}", "commit it"
        else:
            found, remedy = "there is no repository and no COMMIT", "set COMMIT=$(git describe --always --dirty --exclude '*')"
        raise SystemExit(f"{self.path}: expected the code of a commit, but {found}; {remedy}, or give --out DIR")

    def _read(self) -> dict:
        empty = {"runs": [], "results": {}, "superseded": {}}
        return empty | json.loads(self.path.read_text()) if self.path.exists() else empty

    @contextmanager
    def _alone(self):
        """No other process of this machine writes meanwhile."""
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        with open(Path(tempfile.gettempdir()) / f"benchmark-{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _take_from_others(self) -> None:
        """What other processes of the same run have written by now.

        Raises:
            SystemExit: another run has written, too, or the others' code or device is another.
        """
        there, number, mine = self._read(), len(self.runs) - 1, self.runs[-1]
        ours = [run for run in there["runs"][number:] if run.get("id") == mine["id"]]
        if there["runs"] != [*self.runs[:number], *ours] or len(ours) > 1:
            raise SystemExit(
                f"{self.path}: expected this run's results alone behind those of {number} earlier runs, but another run has written since; "
                "measure once it has ended, or give --out DIR"
            )
        if not ours:
            self._told |= self._facts.keys()
        for run in ours:
            self._ensure_one_stamp(run)
            facts = {name: fact for name, fact in self._facts.items() if name not in run or name in self._told}  # the first one's stay
            both = {
                "failures": run.get("failures", {}) | mine.get("failures", {}),
                "commands": sorted({*run.get("commands", ()), *mine.get("commands", ())}),
            }
            mine.update(run | facts | {name: value for name, value in both.items() if value})
            self._told |= facts.keys()
        for own, theirs in ((self.results, there["results"]), (self.superseded, there["superseded"])):
            own.update((key, value) for key, value in theirs.items() if key not in self._keys)

    def _ensure_one_stamp(self, run: dict) -> None:
        """Raises SystemExit if ``run``, which another process began, is of other code or of another device than this process."""
        differing = [name for name, value in self._stamp.items() if run.get(name) != value]
        if differing:
            told = ", ".join(f"{name} {run.get(name)} and {self._stamp[name]}" for name in differing)
            raise SystemExit(f"{self.path}: expected one code and one kind of device in a run, found {told}; begin another run")

    def _write(self) -> None:
        self._ensure_of_a_commit()
        with self._lock, self._alone():
            self._take_from_others()
            part = self.path.with_suffix(".part")
            written = {"runs": self.runs, "results": self.results} | ({"superseded": self.superseded} if self.superseded else {})
            part.write_text(line_by_line(written))
            os.replace(part, self.path)

    @contextmanager
    def part(self, key: str, quiet: bool = False):
        """A part of the benchmark: if it fails, that is recorded and the next part goes on."""
        self._ensure_of_a_commit()
        if not quiet:
            say(key)
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            text = shortened(f"{type(error).__name__}: {error}")
            self.failures.append(f"{key}: {text}")
            self.runs[-1].setdefault("failures", {})[key] = traceback.format_exc()[-4000:]
            self._write()
            say(f"{key} FAILED: {text}")
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


def _run_of(joint: str | None, mine: str | None) -> dict:
    """Of a run of several processes its id, its command and those of the processes, ``mine`` so far; of one process, an id alone."""
    if joint is None:
        return {"id": secrets.token_hex(6)}
    number, _, command = joint.partition(" ")
    if not number or not command:
        raise SystemExit(
            f"{JOINT_RUN}={joint}: expected an id that no other run has, a space and a command; leave it to benchmarks.paper.run"
        )
    return {"id": number, "command": command, "commands": [mine]}


def line_by_line(written: dict[str, list | dict]) -> str:
    """JSON with a line for each run and each result: a change is seen in a diff, and half a file's bytes are not spaces."""

    def compact(value) -> str:
        return json.dumps(value, separators=(",", ":"), default=str)

    def lines(value: list | dict) -> str:
        inside = map(compact, value) if isinstance(value, list) else (f"{compact(key)}:{compact(each)}" for key, each in value.items())
        begin, end = "[]" if isinstance(value, list) else "{}"
        return begin + "\n" + ",\n".join(inside) + "\n" + end

    return "{" + ",\n".join(f"{compact(name)}:{lines(value)}" for name, value in written.items()) + "}\n"


_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", flush=True)


def shortened(text: str, most: int = 3000) -> str:
    """The first line and the end of a long text: of a server's failure, what happened and the end of its log."""
    if len(text) <= most:
        return text
    first, _, rest = text.partition("\n")
    return f"{first[: most // 2]}\n[...]\n{rest[-most // 2 :]}"


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


def add_suffix(parser: argparse.ArgumentParser) -> None:
    """``--suffix``, for benchmarks that are run on several devices; :func:`suffixed` makes the file's name of it."""
    parser.add_argument(
        "--suffix",
        default="",
        metavar="NAME",
        help="ends the file's name: each device, each backend, and each type of stored KV has its own file",
    )


def suffixed(name: str, options: argparse.Namespace) -> str:
    return f"{name}-{options.suffix}" if options.suffix else name


def arguments(description: str, name: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"directory of {name}.json")
    if parts:
        listed = ", ".join(parts)
        parser.add_argument("--only", nargs="+", default=["*"], metavar="PART", help=f"parts to run, wildcards allowed: {listed}")
        parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="parts to leave out, wildcards allowed")
    return parser


def chosen(options: argparse.Namespace) -> Callable[..., bool]:
    """Whether a part was asked for, by any of its names."""

    def wanted(*names: str) -> bool:
        asked, left_out = (
            [name for name in names for pattern in given if fnmatch(name, pattern)] for given in (options.only, options.skip)
        )
        return bool(asked) and not left_out

    return wanted
