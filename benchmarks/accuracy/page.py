"""The tables of ``docs/accuracy.md`` and of ``docs/history/selection.md``, from the results alone.

A table stands between its ``<!-- table: NAME -->`` marks.

python -m benchmarks.accuracy.page
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import numpy as np

from benchmarks.accuracy import over_step
from benchmarks.accuracy.real_tables import COMPARED, compared
from benchmarks.accuracy.systems import (
    BESIDE,
    CHOICES,
    DEFAULTS,
    FAIR,
    FOUR,
    IN_8_BITS,
    LENGTH_OF,
    LENGTHS,
    OFFLINE,
    REAL,
    SMALL,
    TASKS,
    TAUS,
    TEN,
    TRIED,
    System,
)
from benchmarks.report import ROOT, markdown

PAGE, SELECTION, RESULTS = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "history" / "selection.md", ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
SERVERS = ("budget-2048-server", "budget-2048-gqa-4-server", "budget-512-server", "budget-512-gqa-4-server")
REAL_FILE, INT8_FILE, FP8_FILE = "real", "real-int8", "real-fp8"
HALVES = ("budget-512", "fair-rows", "selection", "aggregation", "dense-0", "dense-2")  # measured offline
FILES = (*SERVERS, *(f"{name}-offline" for name in HALVES), REAL_FILE, INT8_FILE, FP8_FILE)


@cache
def results(name: str) -> dict[tuple[str, int, int | None, str], float]:
    """Mean scores, by method, length, budget and task.

    Args:
        name: of a file, or of several with a ``+`` between them: what the first has not is the next one's.

    Raises:
        ValueError: the files have other prompts or models.
    """
    found, asked = {}, {}
    for each in name.split("+"):
        for result in json.loads((RESULTS / f"{each}.json").read_text())["results"].values():
            cell, prompts = (result["length"], result["task"]), (result["model"], result["digest"])
            if asked.setdefault(cell, prompts) != prompts:
                raise ValueError(f"{each}: model and prompts {prompts} of {cell}, expected {asked[cell]}, as in the rest of {name}")
            budget = result["budget"] and result["budget"]["total"]
            found.setdefault((result["method"], result["length"], budget, result["task"]), float(np.mean(result["scores"])))
    return found


def accuracy(name: str, method: str, budget: int | None, length: int, tasks: Sequence[str]) -> str:
    """Mean over tasks, of which none may be missing."""
    scores = [results(name).get((method, length, budget, task)) for task in tasks]
    return "-" if None in scores else f"{np.mean(scores):.3f}"


def systems(name: str, shown: Sequence[System], lengths: Sequence[int], tasks: dict[str, Sequence[str]] = TASKS) -> str:
    """A row for each system; cells have a figure for each length."""
    rows = []
    for system in shown:
        cells = ([accuracy(name, system.method, system.budget, length, those) for length in lengths] for those in tasks.values())
        rows.append((system.label, *system.sizes, *(" / ".join(cell) if set(cell) != {"-"} else "-" for cell in cells)))
    return markdown(("system", "budget", "sink, window", "page", *tasks), rows)


def thresholds() -> str:
    rows = [(tau, *(accuracy("budget-512-offline", method, 512, length, TEN) for length in (8192, 16384))) for tau, method in TAUS.items()]
    return markdown(("tau", "8K", "16K"), rows)


@cache
def real(name: str = REAL_FILE) -> dict[str, dict]:
    """Results of a file on real texts, by key."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def real_weights() -> str:
    rows = [(each.label, *each.sizes, *compared(real(), f"{LENGTH_OF[each.budget]}/{each.budget}/{each.method}")) for each in REAL]
    return markdown(("system", "budget", "sink, window", "page", *COMPARED), rows)


def real_lengths() -> str:
    """How far each method with a budget of 512 is from dense attention, by the length of the texts; perplexities without their intervals."""
    rows = []
    for each in REAL:
        known = [compared(real(), key)[:2] if (key := f"{length}/512/{each.method}") in real() else ("-", "-") for length in LENGTHS]
        if each.budget == 512:
            distances, perplexities = zip(*known)
            rows.append((each.label, each.sizes[2], *distances, " / ".join(cell.split()[0] for cell in perplexities)))
    lengths = [f"{length // 1024}K" for length in LENGTHS]
    header = [f"KL to dense, {length}" for length in lengths] + [f"perplexity over dense, {' / '.join(lengths)}"]
    return markdown(("system", "page", *header), rows)


def in_8_bits() -> str:
    """KV in 8 bits beside KV as computed, at each length that was measured: each kind by the file that has it."""
    rows = []
    for length, (kind, file) in product(LENGTHS, (("int8", INT8_FILE), ("fp8", FP8_FILE))):
        found = real(file)
        plain, coded = f"{length}/512/{IN_8_BITS}", f"{length}/512/{IN_8_BITS}-{kind}"
        if coded in found:
            own, (distance, further, perplexity, *_) = compared(found, plain), compared(found, coded, plain)
            told = "fp8_e4m3" if kind == "fp8" else kind
            rows.append((f"{length:,} tokens", found[coded]["documents"], told, own[0], distance, further, own[1], perplexity))
    header = (
        "length",
        "texts",
        "8 bits",
        "KL to dense",
        "KL, 8 bits",
        "8 bits minus own type",
        "perplexity over dense",
        "perplexity, 8 bits",
    )
    return markdown(header, rows)


def tried(name: str) -> str:
    """A table of ``TRIED``, beside the recipe."""
    first, *others = COMPARED
    keys = {label: f"4096/512/{method}" for label, method in TRIED[name].items()}
    rows = [(label, *compared(real(), key, f"4096/512/{BESIDE}")) for label, key in keys.items()]
    return markdown(("method", first, "minus recipe", *others), rows)


def made() -> str:
    """What each file of the page was measured on, and of which commits."""
    rows = []
    for name in FILES:
        written = json.loads((RESULTS / f"{name}.json").read_text())
        runs = [written["runs"][number] for number in sorted({result["run"] for result in written["results"].values()})]
        facts = (dict.fromkeys(map(told, runs)) for told in (lambda run: run["device"], commit_of, date_of))
        dtypes = dict.fromkeys(result["dtype"] for result in written["results"].values())
        rows.append((f"[{name}](../benchmarks/results/{name}.json)", ", ".join(dtypes), *map(", ".join, facts)))
    return markdown(("file", "dtype", "device", "commits", "dates"), rows, words=5)


def commit_of(run: dict) -> str:
    return run["commit"] + ("-dirty" if run.get("dirty") else "")


def date_of(run: dict) -> str:
    return run["date"].split("T")[0]


TABLES: dict[str, Callable[[], str]] = {
    "defaults": lambda: systems("budget-2048-server", DEFAULTS, [16384]),
    "defaults-gqa-4": lambda: systems("budget-2048-gqa-4-server", DEFAULTS, [16384]),
    "budget-512": lambda: systems("budget-512-server", SMALL, [8192, 16384]),
    "budget-512-gqa-4": lambda: systems("budget-512-gqa-4-server", SMALL, [8192, 16384]),
    "offline": lambda: systems("budget-512-offline", OFFLINE, [8192, 16384], {what: TASKS[what] for what in list(TASKS)[:4]}),
    "fair": lambda: systems("fair-rows-offline+selection-offline", FAIR, [4096], FOUR),
    "choices": lambda: systems("selection-offline", CHOICES, [4096], FOUR),
    "tau": thresholds,
    "real": real_weights,
    "real-lengths": real_lengths,
    "8-bits": in_8_bits,
    "made": made,
}
PAGES = {PAGE: TABLES, SELECTION: {name: partial(tried, name) for name in TRIED}}


def filled(text: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: a table of the page is none of ``tables``, or one of these is not on the page.
    """
    if missing := set(tables) ^ {name for _, name, _ in MARK.findall(text)}:
        raise ValueError(f"tables {', '.join(sorted(missing))}: expected each of TABLES once on the page, and no others")
    return MARK.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", text)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    over_step.draw(over_step.PATH)
    for path, tables in PAGES.items():
        path.write_text(filled(path.read_text(), tables))
        print(f"{len(tables)} tables: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
