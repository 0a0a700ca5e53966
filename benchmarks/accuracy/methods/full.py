"""Every token: what all other methods are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Kept, counted, output, weights


@dataclass(frozen=True)
class Full:
    """Dense attention; the budget is not looked at."""

    prompt_queries: ClassVar[int | None] = 0

    def begin(self, prompt: Prompt, budget: Budget) -> FullCache:
        return FullCache(prompt)


class FullCache:
    def __init__(self, prompt: Prompt) -> None:
        self.kept, self.scale = Kept(prompt.keys, prompt.values), prompt.scale
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.kept.append(step.key, step.value)
        self.trace = counted(step.key, self.kept.count, torch.ones(1, dtype=torch.bool, device=step.key.device))
        return output(weights(step.query, self.kept.keys, self.scale), self.kept.values)
