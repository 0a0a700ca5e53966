"""Quest: "Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., ICML 2024, arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.accuracy.method import Budget, Prompt

from .pages import Blocking, Layout, Pages, min_max


@dataclass(frozen=True)
class Quest:
    """The pages whose keys can give the largest logits, chosen anew with the query of every step (section 3.3).

    The paper has neither sink nor window: the page of the new token is attended to, and the rest of the budget is for the best full
    pages. It selects for each query head; here the heads of a group share what is best for one of them, by the maximum of their
    scores, as comparisons on GQA models do (FreeKV, section 5.1).

    Args:
        page: tokens.
    """

    prompt_queries: ClassVar[int | None] = 0

    page: int = 16

    def begin(self, prompt: Prompt, budget: Budget) -> Blocking:
        return Blocking(Pages(prompt, Layout(self.page, 0, 1, budget.total // self.page - 1), min_max), lambda scores: scores.amax(2))
