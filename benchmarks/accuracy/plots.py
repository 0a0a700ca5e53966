"""Results as pictures: accuracy over budget and over tau, corrections by layer, similarity of queries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.rows import DENSE, Rows
from benchmarks.pictures import DASHES, INK, MARKERS, OTHERS, OURS, name_rows, picture

TAU = re.compile(r"^freekv(-tau-(?P<tau>\d*\.?\d+))?(?P<half> \(server\))?$")
DEFAULT_TAU = 0.9  # of the method, and of servers
MOST_COLUMNS = 64  # of a map; more steps are averaged


class Similarity(NamedTuple):
    """Cosines of a task: ``by_head`` ``[L, H]``, ``by_step`` ``[L, N]`` in means of ``steps`` decode steps; NaN where there is none."""

    name: str
    by_head: np.ndarray
    by_step: np.ndarray
    steps: int


def over_budget(path: Path, rows: Rows, length: int) -> None:
    """Each method's mean over tasks: a row for a method, a marker for a budget."""
    tasks, found = rows.tasks(length), {}
    for label in rows.labels:
        intervals = [(budget, interval) for budget in rows.budgets if (interval := rows.accuracy(label, length, budget, tasks))]
        found |= {label: intervals} if intervals else {}
    if not found:
        return
    title = f"Accuracy at {length} tokens, mean of {len(tasks)} tasks, 95% intervals"
    with picture(path, title, (8, 1.2 + 0.24 * len(found))) as ((panel,),):
        for number, budget in enumerate(rows.budgets):
            for where, (label, intervals) in enumerate(found.items()):
                for interval in (interval for other, interval in intervals if other == budget):
                    y = where + (number - (len(rows.budgets) - 1) / 2) * 0.24
                    colour = OURS if label.startswith("freekv") else OTHERS
                    panel.plot([interval.low, interval.high], [y, y], color=colour, linewidth=1.2, alpha=0.6)
                    panel.plot(interval.mean, y, MARKERS[number % len(MARKERS)], color=colour, markersize=4.5)
            panel.plot([], [], MARKERS[number % len(MARKERS)], color=INK, markersize=4.5, label=f"budget {budget}")
        panel.set_xlim(0, 1.02)
        panel.grid(axis="x", alpha=0.25)
        panel.set_xlabel("accuracy", fontsize=9)
        panel.figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(rows.budgets))
        name_rows(panel, list(found), 8)


def over_tau(path: Path, rows: Rows, length: int) -> None:
    """FreeKV at its correction thresholds, a line for each budget, beside dense attention."""
    tasks, series = rows.tasks(length), {}
    found = [(match, label) for label in rows.labels if (match := TAU.match(label))]
    for half in sorted({match["half"] or "" for match, _ in found}):
        taus = sorted((float(match["tau"] or DEFAULT_TAU), label) for match, label in found if (match["half"] or "") == half)
        for budget in rows.budgets:
            at = [(tau, rows.accuracy(label, length, budget, tasks)) for tau, label in taus]
            points = [(tau, interval.mean) for tau, interval in at if interval]
            series |= {f"budget {budget}{half}": points} if points else {}
        dense = rows.accuracy(DENSE + half, length, None, tasks)
        series |= {DENSE + half: [(tau, dense.mean) for tau, _ in taus]} if dense and series else {}
    if not any(len(points) > 1 for points in series.values()):
        return
    title = f"FreeKV's accuracy by correction threshold at {length} tokens, mean of {len(tasks)} tasks"
    with picture(path, title, (8, 4.2)) as ((panel,),):
        for number, (label, points) in enumerate(series.items()):
            style = {"color": OTHERS} if label.startswith(DENSE) else {"color": OURS, "linewidth": 2.2}
            ends = {"linestyle": DASHES[number % len(DASHES)], "marker": MARKERS[number % len(MARKERS)]}
            panel.plot(*zip(*points), label=label, **style, **ends)
        panel.set_ylim(0, 1.02)
        panel.grid(axis="y", alpha=0.25)
        panel.set(xlabel="tau", ylabel="accuracy")
        panel.legend(fontsize=8, frameon=False, loc="lower right")


def corrections(path: Path, rows: Rows) -> None:
    """Share of kv heads corrected in each layer, over all results weighted by generated tokens."""
    shares = {}
    for label in rows.labels:
        told = [row for row in rows.rows if row.label == label and "corrected" in row.trace.get("by_layer", {})]
        if told:
            weights = [sum(row.generated) for row in told]
            layers = zip(*(row.trace["by_layer"]["corrected"] for row in told), strict=True)
            shares[label] = [np.nan if None in layer else np.average(layer, weights=weights) for layer in layers]
    if not shares:
        return
    values = np.array(list(shares.values()), dtype=float)
    with picture(path, "Corrected kv heads by layer, all tasks, lengths and budgets", (8, 1.2 + 0.24 * len(shares))) as ((panel,),):
        panel.imshow(values, cmap="Greys", vmin=0, vmax=2.4, aspect="auto")  # figures stay readable on the darkest
        for (row, layer), share in np.ndenumerate(values):
            if not np.isnan(share):
                panel.text(layer, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color=INK)
        panel.set_xticks(range(values.shape[1]))
        panel.set_xlabel("layer; the share of its kv heads and steps", fontsize=9)
        panel.set_yticks(range(len(shares)), list(shares), fontsize=8)


def similarity(path: Path, rows: Rows, length: int) -> None:
    """Cosines between queries of adjacent steps of dense generation, as in the paper's figure 3: a row for a task, light is low."""
    tasks = similarities(rows, length)
    if not tasks:
        return
    low = np.floor(10 * min(np.nanmin(each) for task in tasks for each in (task.by_head, task.by_step))) / 10
    title = f"Similarity of a query to that of the step before, dense, {length} tokens"
    with picture(path, title, (8, 1 + 0.95 * len(tasks)), len(tasks), 2, width_ratios=(1, 4)) as panels:
        for task, row in zip(tasks, panels):
            for panel, values in zip(row, (task.by_head, task.by_step)):
                drawn = panel.imshow(values, cmap="Greys", vmin=low, vmax=1, aspect="auto", interpolation="none")
                panel.set_xticks((0, values.shape[1] - 1) if values.shape[1] > 1 else (0,))
                panel.set_yticks((0, len(values) - 1))
                panel.tick_params(labelsize=7)
            row[0].set_ylabel("layer", fontsize=7)
            row[0].set_title(task.name, fontsize=8, loc="left")
            row[1].set_xlabel("decode steps" if task.steps == 1 else f"means of {task.steps} decode steps", fontsize=7)
        panels[-1, 0].set_xlabel("kv head", fontsize=7)
        panels[0, 0].figure.colorbar(drawn, ax=list(panels.flat), location="right", shrink=0.4)


def similarities(rows: Rows, length: int) -> list[Similarity]:
    """Of each task that was watched."""
    found = []
    for task in rows.tasks(length):
        row = rows.dense.get(("offline", length, task))
        watched = row and row.trace.get("query_similarity")
        if watched:
            steps = -(-len(watched["by_step"][0]) // MOST_COLUMNS)
            by_step = [_binned(layer, steps) for layer in watched["by_step"]]
            found.append(Similarity(task, np.array(watched["by_head"], dtype=float), np.array(by_step, dtype=float), steps))
    return [each for each in found if not (np.isnan(each.by_head).all() or np.isnan(each.by_step).all())]


def _binned(values: Sequence[float | None], width: int) -> list[float]:
    bins = [[value for value in values[start : start + width] if value is not None] for start in range(0, len(values), width)]
    return [sum(each) / len(each) if each else np.nan for each in bins]


def draw(rows: Rows, directory: Path, name: str) -> list[str]:
    """Write NAME-*.svg; the names of the files."""
    wanted = {"corrected": (corrections,)}
    for length in rows.lengths:
        by_length = {"budget": over_budget, "tau": over_tau, "similarity": similarity}
        wanted |= {f"{what}-{length}": (drawing, length) for what, drawing in by_length.items()}
    written = []
    for ending, (drawing, *length) in wanted.items():
        path = directory / f"{name}-{ending}.svg"
        path.unlink(missing_ok=True)
        drawing(path, rows, *length)
        written += [path.name] if path.exists() else []
    return written
