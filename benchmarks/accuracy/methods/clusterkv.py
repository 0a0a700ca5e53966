"""ClusterKV: "Manipulating LLM KV Cache in Semantic Space for Recallable Compression" (Liu et al., DAC 2025, arXiv 2412.03213)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .clusters import in_order, k_means
from .pages import Context, Reader, grouped


@dataclass(frozen=True)
class ClusterKV:
    """Tokens by semantic clusters of keys, the clusters with the largest q . centroid first, the last one cut off (section III).

    Generated tokens are all attended to, beside the budget, until there are enough of them to be clustered; then they compete with the
    prompt's. The heads of a group rank clusters by the mean of their products; the paper has no groups.

    Args:
        sink: first tokens, never clustered; the paper's own, not the budget's.
        cluster: mean tokens of a cluster: the paper makes 400 of 32K.
        iterations: of k-means; the paper does not say how many.
        period: generated tokens that are clustered together.
    """

    prompt_queries: ClassVar[int | None] = 0

    sink: int = 16
    cluster: int = 80
    iterations: int = 10
    period: int = 320

    def begin(self, prompt: Prompt, budget: Budget) -> ClusterKVCache:
        if budget.total <= self.sink:
            raise ValueError(f"{budget}: expected total above the sink of {self.sink}")
        return ClusterKVCache(self, prompt, budget.total)


class ClusterKVCache:
    def __init__(self, settings: ClusterKV, prompt: Prompt, total: int) -> None:
        tokens, device = prompt.keys.shape[2], prompt.keys.device
        self.settings, self.heads = settings, prompt.keys.shape[1]
        self.sink, self.room = min(settings.sink, tokens), total - min(settings.sink, tokens)
        self.context = Context(prompt.keys, prompt.values)
        self.reader = Reader(self.context, prompt.scale, torch.arange(tokens, device=device) < self.sink)
        self.unit, self.centroids = self._cluster(prompt.keys[:, :, self.sink :])
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.context.append(step)
        n, clustered = self.context.count, self.sink + self.unit.shape[-1]
        scores = (grouped(step.query, self.heads) @ self.centroids.mT).mean(2)
        chosen = in_order(scores, self.unit)[..., : self.room] + self.sink
        tokens = torch.arange(n, device=chosen.device)
        others = torch.cat((tokens[: self.sink], tokens[clustered:])).expand(*chosen.shape[:2], -1)
        output, self.trace = self.reader.attend(step.query, torch.cat((others, chosen), dim=-1))
        if n - clustered == self.settings.period:
            unit, centroids = self._cluster(self.context.keys(tokens[clustered:]))
            self.unit = torch.cat((self.unit, unit + self.centroids.shape[2]), dim=-1)
            self.centroids = torch.cat((self.centroids, centroids), dim=2)
        return output

    def _cluster(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = keys.shape[2]
        return k_means(keys, min(tokens, max(1, tokens // self.settings.cluster)), self.settings.iterations, cosine=True)
