"""InfiniGen: "Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management" (Lee et al., OSDI 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .pages import Context, Reader, grouped


@dataclass(frozen=True)
class InfiniGen:
    """Tokens whose speculated logit is near the largest, by a query made of the input of the layer before (section 4).

    Query and key of a head are rotated to the singular directions of its prompt's queries; logits are speculated with the columns of the
    largest sum of |q| over the prompt. Every head fetches as many tokens as are above its largest logit less alpha in the mean over
    heads, its best ones, and the budget at most. The new token is attended to as well, and is part of the budget.

    The paper skews weights offline, on a sample; here each prompt is its own sample, with the queries that the harness kept of it. The
    paper has no groups: a token's logit in a kv head is by how much it falls short of the largest in the query head where that is
    least, so what one head of a group would fetch counts for all.

    Args:
        columns: share of them.
        alpha: in logits.
    """

    prompt_queries: ClassVar[int | None] = None

    columns: float = 0.2
    alpha: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.columns <= 1 or self.alpha < 0:
            raise ValueError(f"{self}: expected columns above 0, at most 1, and alpha of at least 0")

    def begin(self, prompt: Prompt, budget: Budget) -> InfiniGenCache:
        return InfiniGenCache(self, prompt, budget.total - 1)


class InfiniGenCache:
    def __init__(self, settings: InfiniGen, prompt: Prompt, room: int) -> None:
        self.alpha, self.room, self.heads, self.scale = settings.alpha, room, prompt.keys.shape[1], prompt.scale
        columns = max(1, int(prompt.keys.shape[-1] * settings.columns))
        self.partial = torch.stack([partial(queries, columns) for queries in prompt.queries]).unflatten(1, (self.heads, -1))
        self.context = Context(prompt.keys, prompt.values)
        self.reader = Reader(self.context, prompt.scale, torch.zeros((), dtype=torch.bool, device=prompt.keys.device))
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        query = (grouped(step.early_query, self.heads)[..., None, :] @ self.partial).squeeze(-2)
        logits = self.context.logits(query, self.scale)
        shortfall = (logits.amax(-1, keepdim=True) - logits).amin(2)
        count = (shortfall < self.alpha).sum(-1).float().mean(-1).long()
        chosen = shortfall.sort(dim=-1, stable=True).indices[..., : self.room]
        valid = torch.arange(chosen.shape[-1], device=chosen.device) < count[:, None, None]
        self.context.append(step)
        new = torch.full_like(chosen[..., :1], step.position)
        valid = torch.cat((valid, torch.ones_like(valid[..., :1])), dim=-1).expand(-1, self.heads, -1)
        output, self.trace = self.reader.attend(step.query, torch.cat((chosen, new), dim=-1), valid)
        return output


def partial(queries: torch.Tensor, columns: int) -> torch.Tensor:
    """``[Hq, D, D]`` projections of each head's query to its heaviest skewed columns and back, so that q @ it @ k is a partial product.

    Args:
        queries: ``[Hq, T, D]`` of one prompt.
    """
    queries = queries.float()
    skew = torch.linalg.eigh(queries.mT @ queries).eigenvectors  # right singular vectors of the queries
    heaviest = (queries @ skew).abs().sum(1).topk(columns).indices
    kept = skew.take_along_dim(heaviest[:, None], 2)
    return kept @ kept.mT
