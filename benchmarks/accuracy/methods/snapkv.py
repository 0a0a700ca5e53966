"""SnapKV: "LLM Knows What You are Looking for Before Generation" (Li et al., NeurIPS 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Kept, counted, marked, output, pick, prompt_weights, weights


@dataclass(frozen=True)
class SnapKV:
    """What the last queries of the prompt look at is kept of it (section 4); what is generated is all kept and never chosen again.

    The prompt is cut to the budget, the observation window included, and every generated token comes on top, as in the paper. Sink
    and window of the budget mean nothing to it. A token's score is the attention of the observed queries, summed, then pooled with
    its neighbours. The paper has no groups: the query heads of a kv head choose by their mean, taken after pooling.

    Args:
        observed: queries in the observation window, 64 unless told in the authors' release, whose experiments have 32.
        kernel: tokens that are pooled, odd; the paper has 5 and 7.
        pooling: the paper's listing leaves it open; the authors' experiments take the maximum, their release averages unless told.
    """

    observed: int = 64
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        if self.observed < 1 or self.kernel < 1 or self.kernel % 2 == 0 or self.pooling not in ("max", "avg"):
            raise ValueError(f"{self}: expected observed of at least 1, an odd kernel, pooling max or avg")

    @property
    def prompt_queries(self) -> int:
        return self.observed

    def begin(self, prompt: Prompt, budget: Budget) -> SnapCache:
        if self.observed >= budget.total:
            raise ValueError(f"observed {self.observed}: expected less than the budget of {budget.total} tokens")
        return SnapCache(prompt, budget.total, self)


class SnapCache:
    def __init__(self, prompt: Prompt, total: int, settings: SnapKV) -> None:
        keys, values, self.scale = prompt.keys, prompt.values, prompt.scale
        prefix = keys.shape[2] - settings.observed
        self.read = torch.ones(1, dtype=torch.bool, device=keys.device).expand(keys.shape[:3])  # of the prompt
        if keys.shape[2] > total:
            # sorted, not topk: maxima make neighbours equal, and of equals the first in the text is kept
            chosen = scores(prompt, settings).sort(descending=True, stable=True).indices[..., : total - settings.observed]
            self.read = F.pad(marked(chosen, prefix), (0, settings.observed), value=True)
            keys, values = (torch.cat((pick(each, chosen), each[:, :, prefix:]), dim=2) for each in (keys, values))
        self.kept = Kept(keys, values)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.kept.append(step.key, step.value)
        self.trace = counted(step.key, self.kept.count, F.pad(self.read, (0, step.position + 1 - self.read.shape[-1]), value=True))
        return output(weights(step.query, self.kept.keys, self.scale), self.kept.values)


def scores(prompt: Prompt, settings: SnapKV) -> torch.Tensor:
    """``[B, H, T - observed]`` float32, higher is kept: attention of the observed queries to the tokens before them, pooled."""
    batch, heads, tokens, _ = prompt.keys.shape
    paid = torch.zeros(batch, heads, prompt.group, tokens, device=prompt.keys.device)
    for _, each in prompt_weights(prompt, start=tokens - settings.observed):
        paid[..., : each.shape[-1]] += each.sum(-2)
    paid = paid[..., : tokens - settings.observed]
    pool = F.max_pool1d if settings.pooling == "max" else F.avg_pool1d
    return pool(paid.flatten(0, 2).unsqueeze(1), settings.kernel, 1, settings.kernel // 2).view_as(paid).mean(2)
