"""Figures of accuracy and of queries: FreeKV's 1 on the left, 2(b) and 3."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from benchmarks.accuracy import over_step
from benchmarks.accuracy.over_step import BUDGET, LENGTH
from benchmarks.accuracy.rows import DENSE, Rows
from benchmarks.accuracy.systems import NINE, STATE, WORDS
from benchmarks.profiles import EMULATED, PROFILES
from benchmarks.report import markdown

from .published import ACCURACY, MOST_SIMILAR, SIMILAR, kept
from .speed import speed

SHORTER, WATCHED = 4096, 8192  # tokens of the rows on equal terms and of the texts; of the queries that were watched
TASKS = {"facts in few places": NINE, "most frequent words": (WORDS,), "running state": (STATE,)}
DROPPED = {"RazorAttention": "razor", "RaaS, within the budget": "raas-at-budget", "Quest, its own sizes": "quest"}
TRADED = {"full attention": "full", "RazorAttention": "razor", "Quest": "quest", "ArkVale": "arkvale", "ShadowKV": "shadowkv"}
TRADED |= {"FreeKV, preset fast": "freekv"}  # what the paper's tables have, too
MODELS = {"first model": "budget-512-offline", "second model": "budget-512-gqa-4-offline"}
PUBLISHED = tuple(f"{name}, published" for name in ACCURACY)


def by_task(results: Path) -> str:
    """Accuracies over full attention's, and the distance on real texts."""
    rows, fair = (Rows.read(results / f"{name}.json") for name in ("budget-512-offline", "fair-rows-offline"))
    real, lines = _results(results, "real"), []
    for label, method in DROPPED.items():
        shares = [_over_full(rows, method, LENGTH, tasks) for tasks in TASKS.values()]
        shares.append(_over_full(fair, method, SHORTER, ("variable-3",)))
        distance = np.mean(real[f"{SHORTER}/{BUDGET}/{method}"]["kl"])
        lines.append((label, *shares, f"{distance:.3f}", *kept(method.removesuffix("-at-budget"))))
    return markdown(("method", *TASKS, "a variable, 3 hops, 4K", "KL, real texts, 4K", *PUBLISHED), lines)


def _over_full(rows: Rows, method: str, length: int, tasks: Sequence[str]) -> str | None:
    mine, full = (rows.accuracy(name, length, budget, list(tasks)) for name, budget in ((method, BUDGET), (DENSE, None)))
    return None if mine is None or full is None else f"{mine.mean / full.mean:.2f}"


def traded(results: Path) -> str:
    """Our picture's points from fast to slow; RaaS has a step alone."""
    points, llama = over_step.points(results), speed(results, "llama-3.1-8b")
    full = points["full attention"].accuracy.mean
    rows = [(label, step, f"{accuracy.mean / full:.2f}", *kept(TRADED.get(label, ""))) for label, (step, accuracy) in points.items()]
    steps = [llama.cells["long-both", 8, 32768, method].seconds for method in ("raas", "freekv")]
    rows.append(("RaaS", steps[0] / steps[1], None, *kept("raas")))
    ordered = [(label, f"{step:.2f}", *rest) for label, step, *rest in sorted(rows, key=lambda row: row[1])]
    return markdown(("method", "step / preset fast's", "accuracy / full attention's", *PUBLISHED), ordered)


def frontier(results: Path) -> str:
    """Which presets are behind faster and more accurate methods."""
    told, points = [], over_step.points(results)
    for label in (name for name in points if name.startswith("FreeKV")):
        mine = points[label]
        better = [name for name, each in points.items() if each.step < mine.step and each.accuracy.mean > mine.accuracy.mean]
        ahead = (
            f"{' and '.join(better)} {'are' if better[1:] else 'is'} faster and more accurate"
            if better
            else "none is faster and as accurate"
        )
        told.append(f"{label.removeprefix('FreeKV, ').capitalize()}: {ahead}.")
    return " ".join(told)


def by_head(results: Path) -> str:
    """A row for each layer, as in the picture."""
    heads = {name: _queries(results, file)["by_head"] for name, file in MODELS.items()}
    widths = {name: len(layers[0]) for name, layers in heads.items()}
    rows = []
    for layer, of_models in enumerate(zip_longest(*heads.values())):
        cells = (cosine for name, found in zip(heads, of_models) for cosine in found or [None] * widths[name])
        rows.append((layer, *(None if cosine is None else f"{cosine:.2f}" for cosine in cells)))
    return markdown(("layer", *(f"{name}, head {head}" for name, width in widths.items() for head in range(width))), rows)


def similarity(results: Path) -> str:
    """Means over generation beside the paper's two numbers, and what is known of another model of its size."""
    cells = {f"{name}, running state": ("kv heads", _flat(_queries(results, file)["by_head"])) for name, file in MODELS.items()}
    layers = _results(results, "real")[f"{WATCHED}/2048/freekv"]["trace"]["by_layer"]["similarity"]
    cells["SmolLM2-135M, real texts"] = ("layers", _flat([layers]))
    rows = [("published, section 3.1", "query heads", f"over {SIMILAR}", None, "all", "most")]
    for name, (kind, each) in cells.items():
        rows.append(
            (name, kind, f"{min(each):.2f}", f"{np.mean(each):.2f}", *(f"{_over(each, bound):.0%}" for bound in (SIMILAR, MOST_SIMILAR)))
        )
    profile = PROFILES[EMULATED]
    above = 1 - profile["corrected_kv_heads"][f"{MOST_SIMILAR}"]
    rows.append((f"{profile['model']}, a fork's analyses", "steps of kv heads", None, None, None, f"{above:.0%}"))
    return markdown(("mean over generation", "cells", "lowest", "mean", f"over {SIMILAR}", f"over {MOST_SIMILAR}"), rows, words=2)


def over_steps(results: Path) -> str:
    """Means over heads and prompts, by layer and step."""
    rows = []
    for name, file in MODELS.items():
        steps = _queries(results, file)["by_step"]
        cosines = _flat(steps)
        rows.append((name, len(steps[0]), f"{min(cosines):.2f}", f"{max(cosines):.2f}", f"{_over(cosines, SIMILAR):.0%}"))
    return markdown(("over the steps of an answer", "steps", "lowest", "highest", f"over {SIMILAR}"), rows)


def _results(results: Path, name: str) -> dict:
    return json.loads((results / f"{name}.json").read_text())["results"]


def _queries(results: Path, file: str) -> dict:
    """Cosines of the longest answers of dense attention."""
    return _results(results, file)[f"{STATE}/{WATCHED}/all/{DENSE}"]["trace"]["query_similarity"]


def _flat(rows: Iterable[Iterable[float | None]]) -> list[float]:
    return [value for row in rows for value in row if value is not None]


def _over(values: list[float], bound: float) -> float:
    return sum(value > bound for value in values) / len(values)
