"""What retrieval methods share: a context that keeps all tokens, what a step read of it, and pages with digests that are selected.

Letters as in ``method``; N tokens or P pages of a kv head, the same number for all, C candidate pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import Growing, Kept, logits, marked, output, pick

NONE = -1  # stands for no page in a selection
Digest = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class Context:
    """Keys and values of all tokens: the prompt's where they are, those of generated tokens beside them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.prompt = keys, values
        self.tail = Kept(keys[:, :, :0], values[:, :, :0])

    @property
    def count(self) -> int:
        """n"""
        return self.prompt[0].shape[2] + self.tail.count

    def append(self, step: Step) -> None:
        if step.position != self.count:
            raise ValueError(f"position {step.position}: expected {self.count}, behind the tokens that are there")
        self.tail.append(step.key, step.value)

    def take(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, H, N, D]`` of each kv head's token numbers ``[B, H, N]`` or ``[N]``."""
        return self._pick(0, tokens), self._pick(1, tokens)

    def keys(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._pick(0, tokens)

    def logits(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """``[B, H, G, n]`` float32 of queries ``[B, H, G, D]``."""
        parts = (self.prompt[0], self.tail.keys)
        return torch.cat([query.float() @ part.float().mT for part in parts], dim=-1) * scale

    def _pick(self, which: int, tokens: torch.Tensor) -> torch.Tensor:
        prompt, tail = self.prompt[which], (self.tail.keys, self.tail.values)[which]
        border = prompt.shape[2]
        picked = pick(prompt, tokens.clamp(max=border - 1))
        if not tail.shape[2]:
            return picked
        generated = (tokens >= border).expand(*prompt.shape[:2], -1)[..., None]
        return torch.where(generated, pick(tail, (tokens - border).clamp(min=0)), picked)


class Pseudo(NamedTuple):
    """Tokens that stand for others: ``logits [B, H, G, N]`` float32 of a step's query, and ``values [B, H, N, D]``."""

    logits: torch.Tensor
    values: torch.Tensor


class Reader:
    """Attention over chosen tokens of a context, and the record of what each step read.

    Args:
        kept: ``[..., T] bool`` tokens of the prompt whose KV is there before the first step, broadcast to ``[B, H, T]``.
    """

    def __init__(self, context: Context, scale: float, kept: torch.Tensor) -> None:
        self.context, self.scale = context, scale
        self._read = kept.expand(*context.prompt[0].shape[:3])

    def attend(
        self, query: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor | None = None, beside: Pseudo | None = None
    ) -> tuple[torch.Tensor, Trace]:
        """Output ``[B, Hq, D]`` of queries of that shape, and the counts.

        Args:
            tokens: ``[B, H, N]`` numbers, each at most once; the new token is one of them.
            valid: ``[B, H, N] bool`` which of them count; None is all.
            beside: pseudo-tokens that are attended to as well, and not counted.
        """
        keys, values = self.context.take(tokens)
        bias = None if valid is None else torch.zeros(valid.shape, device=valid.device).masked_fill_(~valid, -torch.inf)
        odds = logits(query, keys, self.scale, bias)
        if beside is not None:
            odds, values = torch.cat((odds, beside.logits), dim=-1), torch.cat((values, beside.values.to(values.dtype)), dim=2)
        return output(odds.softmax(-1), values), self._record(tokens, valid)

    def _record(self, tokens: torch.Tensor, valid: torch.Tensor | None) -> Trace:
        n = self.context.count
        read = marked(tokens if valid is None else tokens.where(valid, n), n)
        fetched = (read[..., : n - 1] & ~self._read).sum(-1)
        self._read = read
        return Trace(read.sum(-1), fetched, read=read)


def grouped(query: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, Hq, D]`` to ``[B, H, G, D]`` float32."""
    return query.unflatten(1, (heads, -1)).float()


def similarity(query: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Group-mean cosine ``[B, H]`` of two ``[B, H, G, D]``."""
    return F.cosine_similarity(query, other, dim=-1).mean(-1)


def min_max(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quest's digest: elementwise maxima and minima ``[B, H, P, D]`` of float32 keys ``[B, H, P, S, D]``."""
    return keys.amax(-2), keys.amin(-2)


def cuboid_mean(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ArkVale's digest: a box around the middle of the bounding box, as wide as keys are far from the middle in the mean."""
    middle = (keys.amax(-2) + keys.amin(-2)) / 2
    radius = (keys - middle[..., None, :]).abs().mean(-2)
    return middle + radius, middle - radius


def two_bit(keys: torch.Tensor) -> tuple[torch.Tensor]:
    """The keys ``[B, H, P, S * D]`` in two bits a dimension: on four levels from the page's smallest to its largest."""
    upper, lower = keys.amax(-2, keepdim=True), keys.amin(-2, keepdim=True)
    step = (upper - lower) / 3
    level = ((keys - lower) / step - 0.5).ceil().nan_to_num(0.0)
    return ((lower + level * step).flatten(-2),)


def box_scores(query: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """``[B, H, G, C]`` the largest q . k of a key in each box, for queries ``[B, H, G, D]``."""
    return query.clamp(min=0) @ upper.mT + query.clamp(max=0) @ lower.mT


def mass_scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[B, H, G, C]`` what, over the root of D, is the logarithm of the sum of the exponentials of a page's logits."""
    dim = query.shape[-1]
    logits = query @ keys.unflatten(-1, (-1, dim)).flatten(2, 3).mT / dim**0.5
    return logits.unflatten(-1, (keys.shape[2], keys.shape[3] // dim)).logsumexp(-1) * dim**0.5


@dataclass(frozen=True)
class Layout:
    """Which pages of a context are attended to whatever their score, and which compete; numbers of pages, but ``page`` in tokens."""

    page: int
    sink: int
    window: int
    selected: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.window < 1 or self.selected < 1:
            raise ValueError(f"{self}: expected a window and a selection of at least one page")

    @classmethod
    def of(cls, budget: Budget) -> Layout:
        if any(tokens % budget.page for tokens in (budget.total, budget.sink, budget.window)):
            raise ValueError(f"{budget}: expected total, sink and window in multiples of page")
        total, sink, window = (tokens // budget.page for tokens in (budget.total, budget.sink, budget.window))
        return cls(budget.page, sink, window, total - sink - window)

    def candidates(self, n: int) -> slice:
        """Pages of a context of n tokens that compete; all of them are full."""
        return slice(self.sink, max(self.sink, -(-n // self.page) - self.window))

    def pinned(self, n: int, device: torch.device) -> torch.Tensor:
        """Tokens of sink and window, in a context of n tokens."""
        candidates = self.candidates(n)
        tokens = torch.arange(n, device=device)
        return torch.cat((tokens[: candidates.start * self.page], tokens[candidates.stop * self.page :]))


class Pages:
    """A context in pages, with a digest of each full one.

    Args:
        digest: of the keys ``[B, H, P, S, D]`` of pages, to tensors ``[B, H, P, N]``.
        score: pages by these, for queries ``[B, H, G, D]``.
    """

    def __init__(self, prompt: Prompt, layout: Layout, digest: Digest, score: Callable[..., torch.Tensor] = box_scores) -> None:
        self.layout, self.digest, self.score, self.heads = layout, digest, score, prompt.keys.shape[1]
        self.context = Context(prompt.keys, prompt.values)
        tokens, device = prompt.keys.shape[2], prompt.keys.device
        full = prompt.keys[:, :, : tokens // layout.page * layout.page]
        self._digests = [Growing(part) for part in digest(full.unflatten(2, (-1, layout.page)).float())]
        kept = torch.zeros(tokens, dtype=torch.bool, device=device).index_fill_(0, layout.pinned(tokens, device), True)
        self._reader = Reader(self.context, prompt.scale, kept)

    def append(self, step: Step) -> None:
        self.context.append(step)
        n, page = self.context.count, self.layout.page
        if n % page == 0:
            filled = self.context.keys(torch.arange(n - page, n, device=step.key.device))
            for digests, part in zip(self._digests, self.digest(filled[:, :, None].float())):
                digests.append(part)

    def scores(self, query: torch.Tensor, n: int) -> torch.Tensor:
        """``[B, H, G, C]`` of each candidate page of n tokens, for queries ``[B, H, G, D]``."""
        return self.score(query, *(digests.data[:, :, self.layout.candidates(n)] for digests in self._digests))

    def pinned_logits(self, query: torch.Tensor, n: int) -> torch.Tensor:
        """``[B, H, G, 1]`` the logarithm of the mass of sink and window of n tokens, as far as they are there, for queries ``[B, H, G, D]``."""
        pinned = self.layout.pinned(n, query.device)
        keys = self.context.keys(pinned[: len(pinned) - (n - self.context.count)])
        return (query @ keys.float().mT * self._reader.scale).logsumexp(-1, keepdim=True)

    def marked(self, pages: torch.Tensor, n: int) -> torch.Tensor:
        """``[B, H, P]`` bool: which pages of n tokens are among the pages ``[B, H, K]``."""
        count = -(-n // self.layout.page)
        return marked(pages.where(pages != NONE, count), count)

    def kept(self, pages: torch.Tensor, before: int, n: int) -> torch.Tensor:
        """``[B, H, C]`` bool: which candidates of n tokens were attended to with the pages ``[B, H, K]`` in a context of ``before`` tokens."""
        attended = self.marked(pages, n)
        attended[..., self.layout.candidates(before).stop :] = True
        return attended[..., self.layout.candidates(n)]

    def best(self, ranking: torch.Tensor) -> torch.Tensor:
        """Pages ``[B, H, K]`` of the highest ranking ``[B, H, C]`` among the candidates."""
        return self.ordered(ranking)[..., : self.layout.selected] + self.layout.sink

    @staticmethod
    def ordered(ranking: torch.Tensor) -> torch.Tensor:
        """Places ``[B, H, C]`` from the highest ranking to the lowest; of equal ones the lower number wins."""
        return ranking.sort(dim=-1, descending=True, stable=True).indices

    def attend(self, query: torch.Tensor, pages: torch.Tensor, beside: Pseudo | None = None) -> tuple[torch.Tensor, Trace]:
        """Attention ``[B, Hq, D]`` over sink, window and the pages ``[B, H, K]``; see ``Reader.attend``."""
        size = self.layout.page
        pinned = self.layout.pinned(self.context.count, pages.device).expand(*pages.shape[:2], -1)
        chosen = (pages[..., None] * size + torch.arange(size, device=pages.device)).flatten(2)
        there = (pages != NONE).repeat_interleave(size, dim=-1)
        valid = torch.cat((torch.ones_like(pinned, dtype=torch.bool), there), dim=-1)
        attended, trace = self._reader.attend(query, torch.cat((pinned, chosen.clamp(min=0)), dim=-1), valid, beside)
        return attended, replace(trace, selected=there.sum(-1))


class Blocking:
    """The cache of a method that selects pages with every step's own query, before it attends.

    Args:
        pool: scores ``[B, H, G, C]`` of a group, to the ranking ``[B, H, C]`` of its kv head.
    """

    def __init__(self, pages: Pages, pool: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pages, self.pool = pages, pool
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.pages.append(step)
        scores = self.pages.scores(grouped(step.query, self.pages.heads), step.position + 1)
        output, self.trace = self.pages.attend(step.query, self.pages.best(self.pool(scores)))
        return output
