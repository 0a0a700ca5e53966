"""LouisKV: "Efficient KV Cache Retrieval for Long Input-Output Sequences" (Wu et al., ICLR 2026, arXiv 2510.11292)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .clusters import in_order, k_means
from .gather import Growing
from .pages import Context, Reader, grouped, similarity

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class LouisKV:
    """Retrieval when the query changes; clusters of the prompt and segments of the output as units (sections 4.1, 4.2, appendix B).

    A layer retrieves when the cosine between its query and the last step's, in the mean over all query heads, is below tau; between two
    such steps it reads what the first retrieved. Generated tokens from one such step to the next are a segment, whose index is the mean
    of its keys, like a cluster's. Units are ranked by the group mean of softmax(q . index), and fill the budget without sink and window.

    Where the paper is silent: the first step retrieves; the last unit is cut off; k-means is by distance; the prompt's last tokens are in
    the window at first. The paper's window drops whole segments, this one the oldest token, which is then its unit's to bring back. As
    long as all tokens fit the budget, all are read.

    Args:
        tau: the paper's depends on model and task, for strides of about 5 steps (long input) to 16 (reasoning).
        cluster: mean tokens of a cluster.
        iterations: of k-means; the paper does not say how many.
    """

    prompt_queries: ClassVar[int | None] = 1

    tau: float = 0.85
    cluster: int = 16
    iterations: int = 10

    def __post_init__(self) -> None:
        if not -1 <= self.tau <= 1:
            raise ValueError(f"tau {self.tau}: expected -1 to 1")

    def begin(self, prompt: Prompt, budget: Budget) -> LouisKVCache:
        return LouisKVCache(self, prompt, budget)


class LouisKVCache:
    """Units are numbered clusters first, then each request's segments; every token behind the sink has one.

    A unit's index is ``sums / sizes``; clusters, which do not change, have their centroid there, and one.
    """

    def __init__(self, settings: LouisKV, prompt: Prompt, budget: Budget) -> None:
        batch, self.heads, tokens, _ = prompt.keys.shape
        device = prompt.keys.device
        self.tau, self.scale, self.window = settings.tau, prompt.scale, budget.window
        self.sink, self.room = min(budget.sink, tokens), budget.total - budget.sink - budget.window
        self.context = Context(prompt.keys, prompt.values)
        positions = torch.arange(tokens, device=device)
        self.reader = Reader(self.context, prompt.scale, (positions < self.sink) | (positions >= tokens - self.window))
        behind = prompt.keys[:, :, self.sink :]
        clusters = min(behind.shape[2], max(1, behind.shape[2] // settings.cluster))
        unit, centroids = k_means(behind, clusters, settings.iterations, cosine=False)
        first = torch.full(centroids.shape[:3], NEVER, device=device)  # token of each unit
        first.scatter_reduce_(-1, unit, positions[self.sink :].expand_as(unit), "amin")
        self.unit, self.clusters = Growing(unit), clusters
        self.sums, self.sizes, self.first = Growing(centroids), Growing(torch.ones_like(first)), Growing(first)
        self.segment = torch.full((batch,), -1, device=device)  # the open one of each request
        self.previous = grouped(prompt.queries[:, :, -1], self.heads)
        self.retrieved = torch.full((batch, self.heads, self.room), -1, device=device)  # -1 where there is none
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.context.append(step)
        n, query = self.context.count, grouped(step.query, self.heads)
        cosines = similarity(query, self.previous)
        corrected = (cosines.mean(-1) < self.tau) | (self.segment < 0)
        fits = n - self.window - self.sink <= self.room
        if fits or corrected.any():
            self.retrieved = torch.where((corrected | fits)[:, None, None], self._retrieve(query), self.retrieved)
            self._open(corrected)
        self._extend(step)
        tokens = torch.arange(n, device=query.device)
        pinned = torch.cat((tokens[: self.sink], tokens[max(self.sink, n - self.window) :])).expand(*cosines.shape, -1)
        read = torch.cat((pinned, self.retrieved), dim=-1)
        output, trace = self.reader.attend(step.query, read.clamp(min=0), read >= 0)
        self.trace = replace(trace, corrected=corrected[:, None].expand_as(cosines), similarity=cosines)
        self.previous = query
        return output

    def _retrieve(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, H, room]`` tokens between sink and window, of the best units first; -1 behind the last."""
        end = max(self.sink, self.context.count - self.window)
        index = self.sums.data / self.sizes.data[..., None]
        logits = (query @ index.mT * self.scale).masked_fill(self.first.data[:, :, None] >= end, -torch.inf)
        scores = logits.softmax(-1).nan_to_num(0.0).mean(2)
        tokens = in_order(scores, self.unit.data[..., : end - self.sink])[..., : self.room] + self.sink
        return torch.nn.functional.pad(tokens, (0, self.room - tokens.shape[-1]), value=-1)

    def _open(self, corrected: torch.Tensor) -> None:
        """Begin a segment in requests that retrieve."""
        self.segment = self.segment + corrected
        if missing := self.clusters + int(self.segment.max()) + 1 - self.first.count:
            shape, device = (*self.first.data.shape[:2], missing), self.first.data.device
            self.sums.append(torch.zeros(*shape, self.sums.data.shape[-1], device=device))
            self.sizes.append(torch.zeros(shape, dtype=torch.int64, device=device))
            self.first.append(torch.full(shape, NEVER, device=device))

    def _extend(self, step: Step) -> None:
        """The new token joins the segment that is open."""
        number = (self.clusters + self.segment)[:, None, None].expand(-1, self.heads, 1)
        self.unit.append(number)
        self.sums.data.scatter_add_(2, number[..., None].expand(-1, -1, -1, step.key.shape[-1]), step.key[:, :, None].float())
        self.sizes.data.scatter_add_(2, number, torch.ones_like(number))
        self.first.data.scatter_reduce_(2, number, torch.full_like(number, step.position), "amin")
