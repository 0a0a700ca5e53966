"""Methods as they are run: RazorAttention first needs the retrieval heads of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from benchmarks.accuracy.method import Budget, Method
from benchmarks.accuracy.methods.razor import (
    ECHO_SHARE,
    INDUCTION_SHARE,
    RazorAttention,
    comparable_share,
    repetition_scores,
    retrieval_heads,
)
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

    def fit(self, entry: Method | Callable[[], Method], budget: Budget, tokens: int) -> Method:
        """A method is taken as it is, and whatever else makes one is called; RazorAttention gets as many retrieval heads as let the
        mean kv head read the budget of so many tokens."""
        if entry is not RazorAttention:
            return entry() if callable(entry) else entry
        share, scores = comparable_share(budget, tokens), self._repetition_scores
        count = sum(len(echo) for echo, _ in scores)
        by_echo = 0 if share == 1 else round(share * count * ECHO_SHARE / (INDUCTION_SHARE + ECHO_SHARE))
        heads = retrieval_heads(scores, share - by_echo / count, by_echo / count)
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
