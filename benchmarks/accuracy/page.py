"""The tables of ``docs/accuracy.md``, from the results alone: what stands between its ``<!-- table: NAME -->`` marks.

python -m benchmarks.accuracy.page
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.rows import DENSE
from benchmarks.report import ROOT, markdown

PAGE, RESULTS = ROOT / "docs" / "accuracy.md", ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
COPYING, STATE, WORDS = "long-copy", "running-state", "aggregation"
NINE = ("magic-number", "code-word", "multi-value", "multi-key", "multi-query", "variable-1", "variable-2", "variable-3", "variable-4")
TEN, TWELVE = (*NINE, WORDS), (*NINE, WORDS, COPYING, STATE)
TASKS = {"mean of 12": TWELVE, "copying": (COPYING,), "running state": (STATE,), "most frequent words": (WORDS,), "other nine": NINE}


class System(NamedTuple):
    """A row.

    Args:
        sizes: budget, sink and window, and pages, in tokens, as shown.
        method: as results call it.
        budget: tokens, None of dense attention.
    """

    label: str
    sizes: tuple[str, str, str]
    method: str
    budget: int | None


NONE, WIDE = ("all", "-", "-"), ("2,048", "512, 512", "32")
NARROW, OWN = ("512", "16, 32", "8"), ("512", "128, 128", "32")
STOCK = System("stock SGLang", NONE, DENSE, None)
TWO_BIT = "FreeKV, two-bit digests"
DEFAULTS = (
    STOCK,
    System("**FreeKV, preset fast**", WIDE, "freekv", 2048),
    System(TWO_BIT, WIDE, "freekv-two-bit", 2048),
    System(TWO_BIT, ("2,048", "16, 32", "8"), "freekv-two-bit-narrow-page-8", 2048),
    System("FreeKV", OWN, "freekv", 512),
)
SMALL = (
    STOCK,
    System("FreeKV", OWN, "freekv", 512),
    System("FreeKV, never corrected", OWN, "freekv-no-correction", 512),
    System(TWO_BIT, NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("FreeKV, max pooling", NARROW, "freekv-max-narrow-page-8", 512),
    System("Quest", OWN, "quest", 512),
    System("ArkVale", OWN, "arkvale", 512),
)
OFFLINE = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV, two-bit digests", NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("LouisKV", ("512", "128, 128", "clusters"), "louiskv", 512),
    System("Quest, its own sizes", ("512", "0, 16", "16"), "quest", 512),
    System("ClusterKV", ("512", "16, -", "clusters"), "clusterkv", 512),
    System("ArkVale", OWN, "arkvale", 512),
    System("RazorAttention, one of 14 kv heads", ("512", "128, 128", "-"), "razor", 512),
    System("ShadowKV", ("512", "-", "8"), "shadowkv", 512),
    System("SnapKV", ("512", "-", "-"), "snapkv", 512),
    System("InfiniGen, 20% of the dimensions", ("512", "-", "1"), "infinigen", 512),
    System("StreamingLLM", ("512", "128, 384", "-"), "streaming_llm", 512),
    System("H2O", ("512", "-", "-"), "h2o", 512),
    System("RaaS, every prompt kept", ("all", "-", "32"), "raas", 512),
)
FAIR = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV, two-bit digests", NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("FreeKV", NARROW, "freekv-narrow-page-8", 512),
    System("ArkVale", NARROW, "arkvale-narrow-page-8", 512),
    System("Quest", ("512", "0, 8", "8"), "quest-page-8", 512),
    System("Quest, its own sizes", ("512", "0, 16", "16"), "quest", 512),
    System("InfiniGen, 30% of the dimensions", ("512", "-", "1"), "infinigen-0.30", 512),
    System("InfiniGen, 20% of the dimensions", ("512", "-", "1"), "infinigen", 512),
    System("RaaS, within the budget", OWN, "raas-at-budget", 512),
    System("RaaS, every prompt kept", ("all", "-", "32"), "raas", 512),
)
CHOICES = (
    System("full attention", NONE, DENSE, None),
    System("FreeKV", OWN, "freekv", 512),
    System("FreeKV, min-max digests", OWN, "freekv-min-max", 512),
    System("FreeKV", ("512", "128, 128", "16"), "freekv-page-16", 512),
    System("FreeKV", ("512", "128, 128", "8"), "freekv-page-8", 512),
    System("FreeKV", NARROW, "freekv-narrow-page-8", 512),
    System(TWO_BIT, OWN, "freekv-two-bit", 512),
    System(TWO_BIT, ("512", "128, 128", "8"), "freekv-two-bit-page-8", 512),
    System(TWO_BIT, NARROW, "freekv-two-bit-narrow-page-8", 512),
    System("Quest, its own sizes", ("512", "0, 16", "16"), "quest", 512),
    System("ArkVale", OWN, "arkvale", 512),
    System("ClusterKV", ("512", "16, -", "clusters"), "clusterkv", 512),
    System("LouisKV", ("512", "128, 128", "clusters"), "louiskv", 512),
)
FOUR = {"variable, 3 hops": ("variable-3",), "many keys": ("multi-key",), "most frequent words": (WORDS,), "copying": (COPYING,)}
TAUS = {"never": "freekv-no-correction", "0.7": "freekv-tau-0.70", "0.8": "freekv-tau-0.80", "0.85": "freekv-tau-0.85", "0.9": "freekv"}
TAUS |= {"0.95": "freekv-tau-0.95", "1": "freekv-tau-1.00"}


SERVERS = ("budget-2048-server", "budget-2048-gqa-4-server", "budget-512-server", "budget-512-gqa-4-server")
HALVES = ("budget-512", "fair-rows", "selection", "aggregation", "dense-0", "dense-2")  # measured offline
FILES = (*SERVERS, *(f"{name}-offline" for name in HALVES))


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
    "made": made,
}


def filled(text: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: a table of the page is none of ``TABLES``, or one of these is not on the page.
    """
    if missing := set(TABLES) ^ {name for _, name, _ in MARK.findall(text)}:
        raise ValueError(f"tables {', '.join(sorted(missing))}: expected each of TABLES once on the page, and no others")
    return MARK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(filled(PAGE.read_text()))
    print(f"{len(TABLES)} tables: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
