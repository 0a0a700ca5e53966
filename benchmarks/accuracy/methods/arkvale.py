"""ArkVale: "Efficient Generative LLM Inference with Recallable Key-Value Eviction" (Chen et al., NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from method import Budget, Prompt, Step, Trace

from .pages import Layout, Pages, cuboid_mean, grouped


@dataclass(frozen=True)
class ArkVale:
    """Pages by the bounding volume of their keys, recalled before attention with the query of every step (section 4).

    The digest is the paper's best, cuboid-mean. The heads of a group rank pages by the mean of their scores. What is recalled evicts
    the pages of the lowest score, so a cache of the budget's size holds the best pages of the last step, and those are attended to;
    the paper's cache may be larger than what a step attends to, which changes what is fetched but not the output.
    """

    prompt_queries: ClassVar[int] = 0

    def begin(self, prompt: Prompt, budget: Budget) -> ArkValeCache:
        return ArkValeCache(Pages(prompt, Layout.of(budget), cuboid_mean))


class ArkValeCache:
    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.pages.append(step)
        scores = self.pages.scores(grouped(step.query, self.pages.heads), step.position + 1)
        output, self.trace = self.pages.attend(step.query, self.pages.best(scores.mean(2)))
        return output
