"""Methods as they are run: RazorAttention first needs the retrieval heads of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from benchmarks.accuracy.method import Method
from benchmarks.accuracy.methods.razor import RazorAttention, repetition_scores, retrieval_heads
from benchmarks.accuracy.model import OfflineModel

PERIOD, REPEATS = 2500, 4  # the paper's
ORDINARY = 16  # token ids below may be special


class Fitting:
    """Makes a method of an entry of ``METHODS``, for one model.

    Args:
        dense_layers: the first layers, where no method acts.
        period: random tokens until they repeat, to tell retrieval heads by.
    """

    def __init__(self, model: OfflineModel, dense_layers: int, period: int = PERIOD) -> None:
        self.model, self.dense_layers, self.period = model, dense_layers, period

    def fit(self, entry: Method | Callable[[], Method]) -> Method:
        """A method is taken as it is, and whatever else makes one is called; RazorAttention gets its paper's share of retrieval heads, of
        the layers where it acts."""
        if entry is not RazorAttention:
            return entry() if callable(entry) else entry
        heads = retrieval_heads(self._repetition_scores)
        dense = tuple(True for _ in heads[0])
        return RazorAttention((dense,) * self.dense_layers + heads)

    @cached_property
    def _repetition_scores(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer where methods act."""
        config = self.model.config
        once = np.random.default_rng(0).integers(ORDINARY, config.vocab_size, self.period)
        first = [] if config.bos_token_id is None else [config.bos_token_id]
        prefilled = self.model.prefill(torch.tensor([first + once.tolist() * REPEATS]))
        return [repetition_scores(prompt, self.period, len(first)) for prompt in prefilled.prompts[self.dense_layers :]]
