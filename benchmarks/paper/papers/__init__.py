"""The tables of ``docs/papers.md``: the papers' figures in their own layout, ours beside the published numbers, from the results alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import accuracy, speed
from .published import FACTORS, LOUISKV_FACTORS

BOTH = ("long-input", "long-generation")
FREEKV_SHAPES = ("llama-3.1-8b", "qwen2.5-7b")
TABLES: dict[str, Callable[[Path], str]] = {
    "reached": speed.reached,
    "machines": partial(speed.machine, shapes=(*FREEKV_SHAPES, "qwen3-8b")),
    "1-left": accuracy.by_task,
    "1-right": speed.breakdown,
    "2b-told": accuracy.frontier,
    "2b": accuracy.traded,
    "3a": accuracy.similarity,
    "3a-heads": accuracy.by_head,
    "3c": accuracy.over_steps,
    "7": partial(speed.factors, published=FACTORS, over="freekv"),
    **{f"7-{shape}": partial(speed.whole_answers, shape=shape, scenarios=BOTH, methods=speed.FIGURE_7) for shape in FREEKV_SHAPES},
    "8": speed.ablated,
    "louiskv-7": partial(speed.factors, published=LOUISKV_FACTORS, over="louiskv"),
    **{
        f"louiskv-{name}": partial(speed.whole_answers, shape=shape, scenarios=(name,), methods=speed.FIGURE_7_LOUISKV)
        for shape, name, _ in LOUISKV_FACTORS
    },
    "louiskv-parts": speed.breakdown_of_louiskv,
}


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """By their names on the page."""
    return {name: partial(table, results) for name, table in TABLES.items()}
