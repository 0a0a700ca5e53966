"""Results as pictures: accuracy over budget and over tau, corrections by layer, similarity of queries."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.accuracy import svg
from benchmarks.accuracy.rows import DENSE, Rows

TAU = re.compile(r"^freekv(-tau-(?P<tau>\d*\.?\d+))?(?P<half> \(server\))?$")
DEFAULT_TAU = 0.9  # of the method, and of servers
MOST_COLUMNS = 64  # of a map; more steps are averaged


def over_budget(rows: Rows, length: int) -> str | None:
    """Each method's mean over tasks."""
    tasks, series = rows.tasks(length), []
    for label in rows.labels:
        found = [(budget, rows.accuracy(label, length, budget, tasks)) for budget in rows.budgets]
        points = [(budget, *interval) for budget, interval in found if interval]
        series += [svg.Line(label, points)] if points else []
    title = f"Accuracy at {length} tokens, mean of {len(tasks)} tasks, 95% intervals"
    return svg.lines(title, "budget, tokens", "accuracy", series, even=True) if series else None


def over_tau(rows: Rows, length: int) -> str | None:
    """FreeKV at its correction thresholds, a line for each budget."""
    tasks, series = rows.tasks(length), []
    found = [(match, label) for label in rows.labels if (match := TAU.match(label))]
    for half in sorted({match["half"] or "" for match, _ in found}):
        taus = sorted((float(match["tau"] or DEFAULT_TAU), label) for match, label in found if (match["half"] or "") == half)
        for budget in rows.budgets:
            at = [(tau, rows.accuracy(label, length, budget, tasks)) for tau, label in taus]
            points = [(tau, *interval) for tau, interval in at if interval]
            series += [svg.Line(f"budget {budget}{half}", points)] if points else []
        dense = rows.accuracy(DENSE + half, length, None, tasks)
        series += [svg.Line(DENSE + half, [(tau, dense.mean) for tau, _ in taus])] if dense and series else []
    title = f"FreeKV's accuracy by correction threshold at {length} tokens, mean of {len(tasks)} tasks"
    return svg.lines(title, "tau", "accuracy", series) if series else None


def corrections(rows: Rows) -> str | None:
    """Share of kv heads corrected in each layer, over all results weighted by generated tokens."""
    series = []
    for label in rows.labels:
        told = [row for row in rows.rows if row.label == label and "corrected" in row.trace.get("by_layer", {})]
        if told:
            weights = [sum(row.generated) for row in told]
            layers = enumerate(zip(*(row.trace["by_layer"]["corrected"] for row in told), strict=True))
            points = [(layer, np.average(shares, weights=weights)) for layer, shares in layers if None not in shares]
            series.append(svg.Line(label, points))
    title = "Corrected kv heads by layer, all tasks, lengths and budgets"
    return svg.lines(title, "layer", "share of kv heads and steps", series) if series else None


def similarity(rows: Rows, length: int) -> str | None:
    """Cosines between queries of adjacent steps of dense generation, as in the paper's figure 3."""
    panels = []
    for task in rows.tasks(length):
        row = rows.dense.get(("offline", length, task))
        watched = row and row.trace.get("query_similarity")
        if watched:
            panels.append((f"{task}, by kv head", "kv heads", watched["by_head"]))
            steps = len(watched["by_step"][0])
            width = -(-steps // MOST_COLUMNS)
            name = "decode steps" if width == 1 else f"means of {width} decode steps"
            panels.append((task, name, [_binned(layer, width) for layer in watched["by_step"]]))
    values = [value for _, _, layers in panels for layer in layers for value in layer if value is not None]
    if not values:
        return None
    low = np.floor(10 * min(values)) / 10
    return svg.maps(f"Similarity of a query to that of the step before, dense, {length} tokens", panels, low, 1.0)


def _binned(values: list[float | None], width: int) -> list[float | None]:
    bins = [[value for value in values[start : start + width] if value is not None] for start in range(0, len(values), width)]
    return [sum(each) / len(each) if each else None for each in bins]


def pictures(rows: Rows) -> dict[str, str]:
    """SVG by the end of its file name."""
    drawn = {"corrected": corrections(rows)}
    for length in rows.lengths:
        drawn |= {f"budget-{length}": over_budget(rows, length), f"tau-{length}": over_tau(rows, length)}
        drawn |= {f"similarity-{length}": similarity(rows, length)}
    return {name: picture for name, picture in drawn.items() if picture}
