"""RazorAttention: "Efficient KV Cache Compression Through Retrieval Heads" (Tang et al., ICLR 2025, arXiv 2407.15891)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Kept, Sliding, output, prompt_weights, weights

INDUCTION_SHARE, ECHO_SHARE = 0.14, 0.01  # of all heads: 15%, as in the speed tables (paper/methods/razor.py)


@dataclass(frozen=True)
class RazorAttention:
    """Retrieval heads keep everything, all others sink, window and one token in place of the rest (section 3, algorithm 1).

    The compensation token of a head is the mean of the keys, after RoPE, and of the values that it has dropped, and counts in the
    softmax as often as there are tokens in it (equations 4 and 5). The paper compresses a prompt once; here tokens that leave the
    window while decoding join the mean. The paper's window is a fifth of the context but at least 4000 tokens; here it is the
    budget's. Retrieval heads read everything whatever the budget, so that the mean kv head reads more than it.

    Args:
        retrieval: retrieval heads, per layer and kv head, as from ``retrieval_heads``.
        compensate: whether there is a compensation token.
    """

    prompt_queries: ClassVar[int | None] = 0

    retrieval: tuple[tuple[bool, ...], ...]
    compensate: bool = True

    def begin(self, prompt: Prompt, budget: Budget) -> RazorCache:
        if len(self.retrieval) != prompt.layers or len(self.retrieval[prompt.layer]) != prompt.keys.shape[1]:
            raise ValueError(f"retrieval: expected {prompt.layers} layers of {prompt.keys.shape[1]} kv heads")
        return RazorCache(prompt, budget, self.retrieval[prompt.layer], self.compensate)


class RazorCache:
    def __init__(self, prompt: Prompt, budget: Budget, retrieval: Sequence[bool], compensate: bool) -> None:
        heads = [[head for head, far in enumerate(retrieval) if far == wanted] for wanted in (True, False)]
        self.far, self.near = (torch.tensor(each, dtype=torch.int64, device=prompt.keys.device) for each in heads)
        self.compensate, self.scale = compensate, prompt.scale
        self.everything = Kept(prompt.keys[:, self.far], prompt.values[:, self.far])
        keys, values = prompt.keys[:, self.near], prompt.values[:, self.near]
        self.local = Sliding(keys, values, budget.sink, budget.window)
        self.dropped = max(0, keys.shape[2] - budget.sink - budget.window)
        gone = slice(budget.sink, budget.sink + self.dropped)
        self.key_sum, self.value_sum = keys[:, :, gone].float().sum(2), values[:, :, gone].float().sum(2)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        batch, heads, _ = step.key.shape
        queries = step.query.unflatten(1, (heads, -1))
        out = torch.empty_like(queries)
        attended = torch.empty(batch, heads, dtype=torch.int64, device=step.key.device)
        for chosen, attend in ((self.far, self._attend_to_all), (self.near, self._attend_locally)):
            if len(chosen):
                query = queries[:, chosen].flatten(1, 2)
                result, attended[:, chosen] = attend(query, step.key[:, chosen], step.value[:, chosen])
                out[:, chosen] = result.unflatten(1, (len(chosen), -1))
        tokens = torch.arange(step.position + 1, device=step.key.device)
        read = torch.ones(heads, len(tokens), dtype=torch.bool, device=step.key.device)
        read[self.near] = (tokens < self.local.sink) | (tokens > step.position + self.local.sink - self.local.count)
        self.trace = Trace(attended, read=read)
        return out.flatten(1, 2)

    def _attend_to_all(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        kept = self.everything
        kept.append(key, value)
        return output(weights(query, kept.keys, self.scale), kept.values), kept.count

    def _attend_locally(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        left = self.local.slide(key, value)
        if left is not None:
            self.dropped += 1
            self.key_sum, self.value_sum = self.key_sum + left[0].float(), self.value_sum + left[1].float()
        keys, values, bias = self.local.keys, self.local.values, None
        if self.compensate and self.dropped:
            mean_key, mean_value = ((each / self.dropped).unsqueeze(2) for each in (self.key_sum, self.value_sum))
            keys, values = torch.cat((keys.float(), mean_key), dim=2), torch.cat((values.float(), mean_value), dim=2)
            bias = torch.zeros(keys.shape[2], device=keys.device)
            bias[-1] = math.log(self.dropped)
        paid = weights(query, keys, self.scale, bias)
        return output(paid, values).to(query.dtype), keys.shape[2]


def repetition_scores(prompt: Prompt, period: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Echo and induction scores of one layer's kv heads on random tokens that repeat (section 3.2).

    The paper repeats 2500 tokens four times. Echo is the attention that a query pays to the earlier tokens that are its own,
    induction what it pays to the tokens after those; both are means over queries. A kv head's score is its group's maximum:
    one query head that retrieves needs the kv head's tokens.

    Args:
        prompt: of the sequence.
        period: tokens until it repeats.
        start: tokens before the first of them.

    Returns:
        ``[H]`` and ``[H]`` float32.
    """
    batch, heads, tokens, _ = prompt.keys.shape
    if period < 2 or tokens < start + 2 * period:
        raise ValueError(f"period {period}: expected at least 2, and twice in {tokens} tokens from {start}")
    positions = torch.arange(tokens, device=prompt.keys.device)
    sums = torch.zeros(2, heads, prompt.group, device=prompt.keys.device)
    for first, paid in prompt_weights(prompt, start + period):
        seen = positions[: paid.shape[-1]]
        back = seen[first:, None] - seen
        echo = (back % period == 0) & (back > 0) & (seen >= start)
        induction = echo.roll(1, dims=-1)
        sums += torch.stack([(paid * each).sum((0, 3, 4)) for each in (echo, induction)])
    echo, induction = (sums / (batch * (tokens - start - period))).amax(-1)
    return echo, induction


def retrieval_heads(
    scores: Iterable[tuple[torch.Tensor, torch.Tensor]], induction_share: float = INDUCTION_SHARE, echo_share: float = ECHO_SHARE
) -> tuple[tuple[bool, ...], ...]:
    """The heads with the highest induction scores of the model and those with the highest echo scores, per layer and kv head.

    Args:
        scores: echo and induction ``[H]`` of each layer, in order.
        induction_share, echo_share: of all kv heads of the model, rounded; at least one head is chosen by induction.
    """
    echo, induction = (torch.stack(each) for each in zip(*scores))
    chosen = torch.zeros(echo.numel(), dtype=torch.bool, device=echo.device)
    for each, count in ((induction, max(1, round(induction_share * echo.numel()))), (echo, round(echo_share * echo.numel()))):
        chosen[each.flatten().topk(count).indices] = True
    return tuple(tuple(layer) for layer in chosen.view_as(echo).tolist())
