"""Accuracy over step time as a picture: each method and preset whose step was timed as its accuracy was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.accuracy.intervals import Interval
from benchmarks.accuracy.rows import DENSE, Rows
from benchmarks.accuracy.systems import TWELVE
from benchmarks.pictures import INK, OTHERS, OURS, picture
from benchmarks.report import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PATH = RESULTS / "accuracy-over-step.svg"
ENGINE, PRESETS = "paper-latency-llama-3.1-8b", "bench_step-presets"
ACCURACY = ("budget-512-offline", "budget-512-server")
LENGTH, BUDGET = 16384, 512  # of the accuracy
FAST, ACCURATE = "32k-b8/freekv-staggered-fast-by-layer", "32k-b8/freekv-accurate-staggered-accurate-by-layer"
TIMED = {  # what a point is: the method of its accuracy, and of its step in the file of all methods
    "full attention": (f"{DENSE} (server)", "full"),
    "StreamingLLM": ("streaming_llm", "window"),
    "ShadowKV": ("shadowkv", "shadowkv"),
    "Quest": ("quest (server)", "quest"),
    "ArkVale": ("arkvale (server)", "arkvale"),
    "LouisKV": ("louiskv", "louiskv"),
    "RazorAttention": ("razor", "razor"),
    "FreeKV, preset fast": ("freekv (server)", "freekv"),
}
BELOW = ("FreeKV, preset fast",)  # names that have no room above their points
OURS_ACCURATE, ACCURATE_ROW = "FreeKV, preset accurate", "freekv-accurate (server)"


class Point(NamedTuple):
    """``step`` is a step's time over preset fast's, on the same card."""

    step: float
    accuracy: Interval


def points(results: Path = RESULTS) -> dict[str, Point]:
    """By label."""
    rows = Rows.read(*(results / f"{name}.json" for name in ACCURACY))
    engine, presets = (json.loads((results / f"{name}.json").read_text())["results"] for name in (ENGINE, PRESETS))

    def seconds(timed: dict, key: str) -> float:
        return timed[key]["seconds"]["median"]

    steps = {label: seconds(engine, f"long-both/b8/{method}/32768") for label, (_, method) in TIMED.items()}
    fast = seconds(engine, "long-both/b8/freekv/32768")
    found = {label: Point(steps[label] / fast, _accuracy(rows, method)) for label, (method, _) in TIMED.items()}
    ratio = seconds(presets, ACCURATE) / seconds(presets, FAST)
    return found | {OURS_ACCURATE: Point(ratio, _accuracy(rows, ACCURATE_ROW))}


def _accuracy(rows: Rows, label: str) -> Interval:
    """Mean of the twelve tasks.

    Raises:
        ValueError: a task was not measured.
    """
    interval = rows.accuracy(label, LENGTH, BUDGET, list(TWELVE))
    if interval is None:
        raise ValueError(f"{label}: expected results of {len(TWELVE)} tasks at {LENGTH} tokens and a budget of {BUDGET}, some are missing")
    return interval


def draw(path: Path) -> None:
    """Each point with its 95% interval, and its name above or below."""
    with picture(path, "Accuracy over step time, mean of 12 tasks, 95% intervals", (8, 4.6)) as ((panel,),):
        for label, (step, accuracy) in points().items():
            ours = label.startswith("FreeKV")
            colour = OURS if ours else OTHERS
            panel.plot([step, step], [accuracy.low, accuracy.high], color=colour, linewidth=1.4, alpha=0.6)
            panel.plot(step, accuracy.mean, "o", color=colour, markersize=8 if ours else 6)
            style = {"color": OURS, "weight": "bold"} if ours else {"color": INK}
            told = f"{label}\n{step:.2f}, {accuracy.mean:.3f}"
            end, offset, side = (accuracy.low, -6, "top") if label in BELOW else (accuracy.high, 5, "bottom")
            panel.annotate(told, (step, end), (0, offset), textcoords="offset points", ha="center", va=side, fontsize=8, **style)
        panel.set_xlim(0.55, 1.75)
        panel.set_ylim(0, 1.14)
        panel.grid(alpha=0.25)
        panel.set_xlabel("time of a decode step over that of preset fast", fontsize=9)
        panel.set_ylabel("accuracy", fontsize=9)
