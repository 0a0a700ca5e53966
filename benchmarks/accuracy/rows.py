"""Results as they are on disk, and each beside dense attention on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.accuracy.intervals import LEVEL, Interval, bootstrap

DENSE = "full"  # the method that all others are compared with
CHANCE_RESAMPLES = 5  # beyond an interval's end, or it is not resolved
MOST_RESAMPLES = 400_000


@dataclass(frozen=True)
class Row:
    """One method with one budget on one cell.

    Args:
        half: ``offline`` or ``server``.
        budget: in tokens; None of dense attention.
        digest: of the prompts.
        scores: of each prompt, 0 to 1.
        generated: tokens of each answer.
        trace: as of ``Tally.summary``.
    """

    half: str
    task: str
    length: int
    budget: int | None
    method: str
    digest: str
    scores: tuple[float, ...]
    generated: tuple[int, ...]
    trace: dict

    @classmethod
    def of(cls, result: dict) -> Row:
        budget = result["budget"] and result["budget"]["total"]
        lists = (tuple(result[name]) for name in ("scores", "generated"))
        where = (result["half"], result["task"], result["length"], budget, result["method"], result["digest"])
        return cls(*where, *lists, result["trace"])

    @property
    def label(self) -> str:
        return self.method if self.half == "offline" else f"{self.method} ({self.half})"


@dataclass(frozen=True)
class Comparison:
    """A method against dense attention on one task, or on all: the differences of its scores, prompt by prompt."""

    label: str
    task: str
    length: int
    budget: int
    differences: tuple[tuple[float, ...], ...]  # of each task

    def interval(self, level: float = LEVEL, **settings) -> Interval:
        return bootstrap(self.differences, level, **settings)

    def __str__(self) -> str:
        mean, low, high = self.interval()
        return f"{self.label}, {self.task}, {self.length} tokens, budget {self.budget}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]"


class Rows:
    """All results of one model, in the order of the tables."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.by_key = {(row.label, row.length, row.budget, row.task): row for row in self.rows}
        self.labels = [label for _, label in sorted({(row.method != DENSE, row.label) for row in self.rows})]
        self.lengths = sorted({row.length for row in self.rows})
        self.budgets = sorted({row.budget for row in self.rows if row.budget})
        self.dense = {(row.half, row.length, row.task): row for row in self.rows if row.method == DENSE}

    @classmethod
    def read(cls, *paths: Path) -> Rows:
        """Of the files that are there.

        Raises:
            ValueError: they are of different models.
        """
        results = [result for path in paths if path.exists() for result in json.loads(path.read_text())["results"].values()]
        if len(models := {result["model"] for result in results}) > 1:
            raise ValueError(f"results of models {', '.join(sorted(models))} in {', '.join(map(str, paths))}: expected one")
        return cls(map(Row.of, results))

    def tasks(self, length: int) -> list[str]:
        """That dense attention was asked at a length; all of them if it was not."""
        at_length = [row for row in self.rows if row.length == length]
        return sorted({row.task for row in at_length if row.method == DENSE} or {row.task for row in at_length})

    def row(self, label: str, length: int, budget: int | None, task: str) -> Row | None:
        """Dense attention is the same at every budget."""
        return self.by_key.get((label, length, budget, task)) or self.by_key.get((label, length, None, task))

    def accuracy(self, label: str, length: int, budget: int | None, tasks: list[str]) -> Interval | None:
        """Mean over tasks, of which none may be missing."""
        rows = [self.row(label, length, budget, task) for task in tasks]
        return bootstrap([row.scores for row in rows]) if tasks and None not in rows else None

    def comparison(self, label: str, length: int, budget: int, tasks: list[str]) -> Comparison | None:
        """Against dense attention of the same half; None if a task is missing, or dense attention had other prompts."""
        differences = []
        for task in tasks:
            row = self.by_key.get((label, length, budget, task))
            dense = row and self.dense.get((row.half, length, task))
            if not dense or (dense.digest, len(dense.scores)) != (row.digest, len(row.scores)):
                return None
            differences.append(tuple(np.subtract(row.scores, dense.scores).tolist()))
        return Comparison(label, tasks[0] if len(tasks) == 1 else "all tasks", length, budget, tuple(differences)) if tasks else None

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Each method, length and budget: task by task, and all tasks."""
        found = []
        for label in self.labels:
            for length in self.lengths:
                for budget in self.budgets:
                    tasks = self.tasks(length)
                    sets = [[task] for task in tasks] + ([tasks] if len(tasks) > 1 else [])
                    found += [self.comparison(label, length, budget, each) for each in sets]
        return [comparison for comparison in found if comparison]

    @cached_property
    def suspects(self) -> list[Comparison]:
        """Better than dense attention by an interval of their own; of many comparisons some are so by chance."""
        return [each for each in self.comparisons if any(map(any, each.differences)) and each.interval().low > 0]

    @cached_property
    def faults(self) -> list[Comparison]:
        """Better than dense attention by more than noise: by an interval that holds for all comparisons together (Bonferroni)."""
        outside = (1 - LEVEL) / max(1, len(self.comparisons))
        resamples = min(MOST_RESAMPLES, int(2 * CHANCE_RESAMPLES / outside))
        return [each for each in self.suspects if each.interval(1 - outside, resamples=resamples).low > 0]
