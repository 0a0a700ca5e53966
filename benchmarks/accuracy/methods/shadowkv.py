"""ShadowKV: "KV Cache in Shadows for High-Throughput Long-Context LLM Inference" (Sun et al., ICML 2025, arXiv 2410.21465)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .pages import Context, Reader, grouped


@dataclass(frozen=True)
class ShadowKV:
    """Chunks by the mean of their keys; their values are fetched, their keys rebuilt of a low rank (section 4, algorithms 1 and 2).

    The prompt's keys before RoPE, all kv heads side by side, keep their largest singular directions; the chunks whose keys differ most
    from their mean, and the last ones, are kept as they are. All generated tokens are kept, beside the budget. Outliers and last chunks
    are part of the budget, where the authors' release adds them to it, so that all methods read equally much of the prompt.

    Args:
        chunk: tokens.
        outliers: chunks kept for their smallest cosine between a key and the mean, at a budget of 2048 tokens; of others the same share.
        local: last chunks kept, and what is left of the prompt behind them.
        rank: of all kv heads together, but at most ``rank_share`` of their dimensions: the paper's 160 of 1024, for smaller models.
    """

    prompt_queries: ClassVar[int | None] = 0

    chunk: int = 8
    outliers: int = 48
    local: int = 4
    rank: int = 160
    rank_share: float = 160 / 1024

    def begin(self, prompt: Prompt, budget: Budget) -> ShadowKVCache:
        outliers = round(self.outliers * budget.total / 2048)
        selected = (budget.total - prompt.keys.shape[2] % self.chunk) // self.chunk - outliers - self.local
        if selected < 1:
            raise ValueError(f"{budget}: expected total of {outliers + self.local + 2} chunks of {self.chunk} tokens")
        return ShadowKVCache(self, prompt, outliers, selected)


class ShadowKVCache:
    def __init__(self, settings: ShadowKV, prompt: Prompt, outliers: int, selected: int) -> None:
        batch, heads, tokens, dim = prompt.keys.shape
        chunks, self.size = max(0, tokens // settings.chunk - settings.local), settings.chunk
        self.selected, self.heads, self.scale = selected, heads, prompt.scale
        body = prompt.keys[:, :, : chunks * self.size].unflatten(2, (chunks, self.size)).float()
        landmarks = body.mean(-2)
        order = F.cosine_similarity(body, landmarks[..., None, :], dim=-1).amin(-1).sort(dim=-1, stable=True).indices
        odd, self.competing = order[..., :outliers], order[..., outliers:].sort(dim=-1).values
        self.landmarks = landmarks.take_along_dim(self.competing[..., None], 2)
        behind = torch.arange(chunks * self.size, tokens, device=odd.device).expand(batch, heads, -1)
        self.kept = torch.cat((self._tokens(odd), behind), dim=-1)
        exact = torch.zeros(batch, heads, tokens, dtype=torch.bool, device=odd.device).scatter_(-1, self.kept, True)
        rebuilt = low_rank(prompt, min(settings.rank, math.ceil(settings.rank_share * heads * dim)))
        self.context = Context(torch.where(exact[..., None], prompt.keys, rebuilt), prompt.values)
        self.reader = Reader(self.context, prompt.scale, exact)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.context.append(step)
        logits = grouped(step.query, self.heads) @ self.landmarks.mT * self.scale
        ranking = logits.softmax(-1).amax(2).sort(dim=-1, descending=True, stable=True).indices
        chosen = self._tokens(self.competing.gather(-1, ranking[..., : self.selected]))
        prompt, n = self.context.prompt[0].shape[2], self.context.count
        generated = torch.arange(prompt, n, device=chosen.device).expand(*chosen.shape[:2], -1)
        output, self.trace = self.reader.attend(step.query, torch.cat((self.kept, chosen, generated), dim=-1))
        return output

    def _tokens(self, chunks: torch.Tensor) -> torch.Tensor:
        """``[B, H, N]`` of chunks ``[B, H, N / chunk]``."""
        return (chunks[..., None] * self.size + torch.arange(self.size, device=chunks.device)).flatten(2)


def low_rank(prompt: Prompt, rank: int) -> torch.Tensor:
    """The prompt's keys ``[B, H, T, D]`` as rebuilt from the truncated SVD of ``[T, H * D]`` keys before RoPE, and rotated."""
    _, heads, tokens, dim = prompt.plain_keys.shape
    joint = prompt.plain_keys.transpose(1, 2).flatten(2).float()
    directions = torch.linalg.eigh(joint.mT @ joint).eigenvectors[..., -rank:]  # right singular vectors, the largest last
    rebuilt = (joint @ directions @ directions.mT).unflatten(2, (heads, dim)).transpose(1, 2)
    positions = torch.arange(tokens, device=joint.device)[None, None]
    return prompt.rotate(rebuilt, positions).to(prompt.keys.dtype)
