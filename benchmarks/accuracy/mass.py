"""How much of dense attention lies on the tokens that a method read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.accuracy.coded import kv_dtype_of
from benchmarks.accuracy.method import Budget, Cache, Method, Prompt, Step, Trace
from benchmarks.accuracy.methods.gather import Growing, weights


@dataclass(frozen=True)
class Watched:
    """A method whose traces have ``mass``: its own query's dense attention, group mean, summed over the tokens that it read."""

    method: Method

    @property
    def prompt_queries(self) -> int | None:
        return self.method.prompt_queries

    @property
    def kv_dtype(self) -> str:
        return kv_dtype_of(self.method)

    def begin(self, prompt: Prompt, budget: Budget) -> WatchedCache:
        return WatchedCache(self.method.begin(prompt, budget), prompt)


class WatchedCache:
    def __init__(self, cache: Cache, prompt: Prompt) -> None:
        self.cache, self.keys, self.scale = cache, Growing(prompt.keys), prompt.scale
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        output, trace = self.cache.attend(step), self.cache.trace
        self.keys.append(step.key.unsqueeze(2))
        if trace is None or trace.read is None:
            raise ValueError(f"{type(self.cache).__name__}: expected a trace with the tokens that were read, got {trace}")
        paid = weights(step.query, self.keys.data, self.scale).mean(2)
        self.trace = replace(trace, mass=paid.where(trace.read, 0).sum(-1))
        return output
