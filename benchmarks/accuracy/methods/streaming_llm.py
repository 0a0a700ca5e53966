"""StreamingLLM: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., ICLR 2024, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Sliding, counted, output, weights


@dataclass(frozen=True)
class StreamingLLM:
    """The sink and the most recent tokens, which take all of the budget but the sink (section 3.2).

    The paper's sink is 4 tokens; here it is the budget's, as for every method, and what is not sink is recent.

    Args:
        reindexed: positions are those inside the cache, without a gap between the sink and the rest, as in the paper; keys are kept
            before RoPE and rotated anew in every step. Otherwise, as in most comparisons, each token keeps its position in the text.
    """

    prompt_queries: ClassVar[int | None] = 0

    reindexed: bool = True

    def begin(self, prompt: Prompt, budget: Budget) -> StreamingCache:
        return StreamingCache(prompt, budget, self.reindexed)


class StreamingCache:
    def __init__(self, prompt: Prompt, budget: Budget, reindexed: bool) -> None:
        self.rotate, self.scale, self.reindexed = prompt.rotate, prompt.scale, reindexed
        keys = prompt.plain_keys.float() if reindexed else prompt.keys
        self.kept = Sliding(keys, prompt.values, budget.sink, budget.total - budget.sink)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        query, key = step.query, step.key
        if self.reindexed:
            query, key = (self._turn(each.float(), -step.position) for each in (query, key))
        self.kept.slide(key, step.value)
        keys = self.kept.keys
        if self.reindexed:
            query = self._turn(query, self.kept.count - 1)
            keys = self.rotate(keys, self.kept.ranks().expand(keys.shape[:3]))
        tokens = torch.arange(step.position + 1, device=keys.device)
        read = (tokens < self.kept.sink) | (tokens > step.position + self.kept.sink - self.kept.count)
        self.trace = counted(step.key, self.kept.count, read)
        return output(weights(query, keys, self.scale), self.kept.values)

    def _turn(self, heads: torch.Tensor, by: int) -> torch.Tensor:
        """``[B, heads, D]`` moved by so many positions; moved back by its own, it is as before RoPE."""
        positions = torch.full((*heads.shape[:2], 1), by, device=heads.device)
        return self.rotate(heads.unsqueeze(2), positions).squeeze(2)
