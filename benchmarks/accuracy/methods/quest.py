"""Quest: "Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., ICML 2024, arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from method import Budget, Prompt, Step, Trace

from .pages import Layout, Pages, grouped, min_max


@dataclass(frozen=True)
class Quest:
    """The pages whose keys can give the largest logits, chosen anew with the query of every step (section 3.3).

    The paper has neither sink nor window: the page of the new token is attended to, and the rest of the budget is for the best full
    pages. It selects for each query head; here the heads of a group share what is best for one of them, by the maximum of their
    scores, as comparisons on GQA models do (FreeKV, section 5.1).

    Args:
        page: tokens.
    """

    prompt_queries: ClassVar[int] = 0

    page: int = 16

    def begin(self, prompt: Prompt, budget: Budget) -> QuestCache:
        return QuestCache(Pages(prompt, Layout(self.page, 0, 1, budget.total // self.page - 1), min_max))


class QuestCache:
    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.pages.append(step)
        scores = self.pages.scores(grouped(step.query, self.pages.heads), step.position + 1)
        output, self.trace = self.pages.attend(step.query, self.pages.best(scores.amax(2)))
        return output
