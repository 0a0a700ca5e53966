"""H2O: "Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (Zhang et al., NeurIPS 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Kept, counted, marked, output, pick, prompt_weights, weights


@dataclass(frozen=True)
class H2O:
    """Heavy hitters and recent tokens; the lightest token outside the recent ones makes room for the next (section 4, algorithm 1).

    A token's weight is the attention that all queries since have paid to it. The budget has no sink of its own: sinks are heavy.
    The paper evicts during prefill too and lets a step attend to one token more than it then keeps. Prefill is dense here, as in the
    authors' release, so that the prompt's weights are those of all its queries, and a token makes room before a step attends.
    The paper has no groups: the query heads of a kv head keep what is heavy in their mean.

    Args:
        recent_share: of the budget; the paper halves it.
    """

    prompt_queries: ClassVar[int | None] = None

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.recent_share <= 1:
            raise ValueError(f"recent_share {self.recent_share}: expected above 0, at most 1")

    def begin(self, prompt: Prompt, budget: Budget) -> H2OCache:
        return H2OCache(prompt, budget.total, max(1, round(budget.total * self.recent_share)))


class H2OCache:
    def __init__(self, prompt: Prompt, total: int, recent: int) -> None:
        self.total, self.recent, self.scale = total, recent, prompt.scale
        self.heaviness = heaviness(prompt)
        batch, heads, tokens = self.heaviness.shape
        self.positions = torch.arange(tokens, device=prompt.keys.device).expand(batch, heads, tokens)
        if tokens > total:
            heavy = self.heaviness[..., : tokens - recent].topk(total - recent).indices
            self.positions = torch.cat((heavy, self.positions[..., tokens - recent :]), dim=-1)
            self.heaviness = self.heaviness.gather(-1, self.positions)
        self.kept = Kept(pick(prompt.keys, self.positions), pick(prompt.values, self.positions))
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        if self.kept.count < self.total:
            self.kept.append(step.key, step.value)
            self.positions, self.heaviness = (F.pad(each, (0, 1)) for each in (self.positions, self.heaviness))
            slots = torch.full_like(self.positions[..., :1], self.kept.count - 1)
        else:
            safe = self.positions > step.position - self.recent
            slots = self.heaviness.masked_fill(safe, torch.inf).argmin(-1, keepdim=True)
            self.kept.replace(slots.squeeze(-1), step.key, step.value)
        self.positions = self.positions.scatter(-1, slots, step.position)
        paid = weights(step.query, self.kept.keys, self.scale)
        self.heaviness = self.heaviness.scatter(-1, slots, 0.0) + paid.mean(2)
        self.trace = counted(step.key, self.kept.count, marked(self.positions, step.position + 1))
        return output(paid, self.kept.values)


def heaviness(prompt: Prompt) -> torch.Tensor:
    """``[B, H, T]`` float32 attention that all queries of a prompt pay to each token, group mean."""
    total = torch.zeros(prompt.keys.shape[:3], device=prompt.keys.device)
    for _, paid in prompt_weights(prompt):
        total[..., : paid.shape[-1]] += paid.sum(-2).mean(2)
    return total
