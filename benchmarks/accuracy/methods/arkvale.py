"""ArkVale: "Efficient Generative LLM Inference with Recallable Key-Value Eviction" (Chen et al., NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.accuracy.method import Budget, Prompt

from .pages import Blocking, Layout, Pages, cuboid_mean


@dataclass(frozen=True)
class ArkVale:
    """Pages by the bounding volume of their keys, recalled before attention with the query of every step (section 4).

    The digest is the paper's best, cuboid-mean. The heads of a group rank pages by the mean of their scores. What is recalled evicts
    the pages of the lowest score, so a cache of the budget's size holds the best pages of the last step, and those are attended to;
    the paper's cache may be larger than what a step attends to, which changes what is fetched but not the output.

    Args:
        page, sink, window: tokens, in place of the budget's.
    """

    prompt_queries: ClassVar[int | None] = 0

    page: int | None = None
    sink: int | None = None
    window: int | None = None

    def begin(self, prompt: Prompt, budget: Budget) -> Blocking:
        own = {name: tokens for name in ("page", "sink", "window") if (tokens := getattr(self, name)) is not None}
        budget = replace(budget, **own)
        return Blocking(Pages(prompt, Layout.of(budget), cuboid_mean), lambda scores: scores.mean(2))
