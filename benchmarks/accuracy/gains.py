"""What a correction would gain: how much more of dense attention lies on what a kv head selects now than on what it selected a step ago."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace
from benchmarks.accuracy.methods.freekv import FreeKV, FreeKVCache, grouped


@dataclass(frozen=True)
class Gains:
    """FreeKV that corrects every kv head in every step, and notes what that gains.

    Args:
        settings: all but tau.
        samples: of each layer ``[N, 2]`` tensors: the cosine by which a kv head would be corrected, and the share of dense attention, group
            mean, that the correction gains.
    """

    settings: FreeKV
    samples: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    prompt_queries = FreeKV.prompt_queries

    def begin(self, prompt: Prompt, budget: Budget) -> GainsCache:
        cache = replace(self.settings, tau=1.0).begin(prompt, budget)
        return GainsCache(cache, prompt.scale, self.samples.setdefault(prompt.layer, []))


class GainsCache:
    def __init__(self, cache: FreeKVCache, scale: float, samples: list[torch.Tensor]) -> None:
        self.cache, self.scale, self.samples = cache, scale, samples
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        ahead, pages = self.cache.ahead, self.cache.pages
        output, self.trace = self.cache.attend(step), self.cache.trace
        assert self.trace is not None and self.trace.read is not None and self.trace.similarity is not None
        n, size = step.position + 1, pages.layout.page
        paid = pages.context.logits(grouped(step.query, pages.heads), self.scale).softmax(-1).mean(2)
        now = paid.where(self.trace.read, 0).sum(-1)
        pinned = paid[..., pages.layout.pinned(n, paid.device)].sum(-1)
        full = paid[..., : n // size * size].unflatten(-1, (-1, size)).sum(-1)
        gained = now - pinned - full.where(pages.marked(ahead, n)[..., : full.shape[-1]], 0).sum(-1)
        self.samples.append(torch.stack((self.trace.similarity, gained), -1).flatten(0, 1).cpu())
        return output
