"""RaaS: "Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning" (Hu et al., Findings of ACL 2025, arXiv 2502.11147)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .gather import counted, marked, output, pick, weights


@dataclass(frozen=True)
class RaaS:
    """Pages of generated tokens, of which the one that has mattered to no query for longest makes room (sections 3.2 and 3.3).

    A page matters when its estimated attention is above ``alpha``: the softmax, over all pages that the cache holds, of the bound that
    Quest takes from the elementwise maximum and minimum of a page's keys. Of equally old pages the first in the text goes. The paper
    has no groups: a page matters to a kv head if it does to one of its query heads, the group maximum of FreeKV's comparison (its
    section 5.1); the code released with that takes a group mean, and a softmax of logits that are not scaled. Pages are the budget's;
    the paper's have 16 tokens.

    The paper never drops a token of the prompt and counts the prompt in the budget, so a prompt that is longer leaves nothing to
    generated tokens. Here they then have what a window has, and a step reads the prompt and that: with a prompt of 16384 tokens this
    is no sparse method. ``keep_prompt=False`` is the variant that FreeKV was compared with: sink, window, and a fixed number of
    pages, at first those of the prompt, or, if they do not suffice, made of its tokens with the largest dot product, group mean,
    with its last query.

    Args:
        alpha: the paper's threshold.
        top_share: instead of the threshold, the share of pages with the highest estimates that matter; the paper gives 0.5 as what
            ``alpha`` comes to. In a small budget few pages are ever below ``alpha``, and the first in the text goes.
        keep_prompt: whether all of the prompt is kept.
    """

    prompt_queries: ClassVar[int | None] = 1

    alpha: float = 1e-4
    top_share: float | None = None
    keep_prompt: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1 or self.top_share is not None and not 0 < self.top_share <= 1:
            raise ValueError(f"{self}: expected alpha in [0, 1), top_share in (0, 1]")

    def begin(self, prompt: Prompt, budget: Budget) -> RaaSCache:
        tokens, page = prompt.keys.shape[2], budget.page
        if self.keep_prompt:
            held = page
            pages = max(1, max(budget.total - tokens, budget.window) // page - 1)
            return RaaSCache(prompt, self, page, held, pages, fixed=tokens)
        pages = (budget.total - budget.sink - budget.window) // page
        if pages == 0:
            raise ValueError(f"{budget}: expected a page more than sink and window")
        return RaaSCache(prompt, self, page, budget.window, pages, fixed=min(budget.sink, tokens))


class RaaSCache:
    """Slots of ``fixed`` tokens that stay, then of the pages, then of the ``held`` most recent tokens in the order of the text."""

    def __init__(self, prompt: Prompt, settings: RaaS, page: int, held: int, pages: int, fixed: int) -> None:
        self.settings, self.scale, self.page, self.held, self.pages, self.fixed = settings, prompt.scale, page, held, pages, fixed
        self.edge = fixed + pages * page
        tokens, device = prompt.keys.shape[2], prompt.keys.device
        kept = torch.arange(tokens, device=device).expand(*prompt.keys.shape[:2], -1)
        if tokens > self.edge + held:
            chosen = fixed + likely(prompt, fixed, tokens - held).topk(pages * page).indices.sort().values
            kept = torch.cat((kept[..., :fixed], chosen, kept[..., tokens - held :]), dim=-1)
        self.used = max(0, -(-(kept.shape[-1] - fixed - held) // page))
        self.recent = kept.shape[-1] - fixed - self.used * page
        self.keys, self.values = (self._laid_out(pick(each, kept)) for each in (prompt.keys, prompt.values))
        self.positions = self._laid_out(kept[..., None])
        self.fixed_digests, self.digests = digests(self.keys[:, :, :fixed], page), digests(self.keys[:, :, fixed : self.edge], page)
        self.came = pages  # so many pages so far, which numbers them
        self.numbers = torch.arange(pages, device=device).repeat(*kept.shape[:2], 1)
        self.stamps = torch.full_like(self.numbers, tokens - 1)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        if self.recent == self.held:
            self._page_out(step.position)
        slot = self.edge + self.recent
        self.keys[:, :, slot], self.values[:, :, slot], self.positions[:, :, slot] = step.key, step.value, step.position
        self.recent += 1
        hidden = torch.full(self.keys.shape[2:3], -torch.inf, device=step.key.device)
        hidden[: self.fixed + self.used * self.page] = hidden[self.edge : slot + 1] = 0
        paid = weights(step.query, self.keys, self.scale, hidden)
        self._stamp(step)
        n, there = step.position + 1, self.positions[..., 0].masked_fill(hidden < 0, step.position + 1)
        self.trace = counted(step.key, self.fixed + self.used * self.page + self.recent, marked(there, n))
        return output(paid, self.values)

    def _laid_out(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens ``[B, H, N, D]`` in their slots."""
        paged = self.fixed + self.used * self.page
        slots = tokens.new_zeros(*tokens.shape[:2], self.edge + self.held, tokens.shape[-1])
        slots[:, :, :paged], slots[:, :, self.edge : self.edge + self.recent] = tokens[:, :, :paged], tokens[:, :, paged:]
        return slots

    def _page_out(self, now: int) -> None:
        """Make a page of the oldest recent tokens, in a free place or in that of the page with the oldest stamp."""
        if self.used < self.pages:
            place = torch.full_like(self.stamps[..., :1], self.used)
            self.used += 1
        else:
            place = (self.stamps * self.came + self.numbers).argmin(-1, keepdim=True)
        leaving = self.keys[:, :, self.edge : self.edge + self.page]
        self.digests.scatter_(2, place[..., None, None].expand(-1, -1, -1, 2, leaving.shape[-1]), digests(leaving, self.page))
        for tensor in (self.keys, self.values, self.positions):
            paged, recent = tensor[:, :, self.fixed : self.edge].unflatten(2, (self.pages, self.page)), tensor[:, :, self.edge :]
            new = recent[:, :, None, : self.page]
            paged.scatter_(2, place[..., None, None].expand_as(new), new)
            recent.copy_(recent.roll(-self.page, dims=2))
        self.stamps.scatter_(2, place, now)
        self.numbers.scatter_(2, place, self.came)
        self.came += 1
        self.recent -= self.page

    def _stamp(self, step: Step) -> None:
        """Stamp the pages that matter to the step's query."""
        recent = digests(self.keys[:, :, self.edge : self.edge + self.recent], self.page)
        held = torch.cat((self.fixed_digests, self.digests[:, :, : self.used], recent), dim=2).float()
        query = step.query.unflatten(1, (held.shape[1], -1)).float()
        bounds = query.clamp(min=0) @ held[..., 0, :].mT + query.clamp(max=0) @ held[..., 1, :].mT
        estimates = (bounds * self.scale).softmax(-1).amax(2)
        least = self.settings.alpha
        if self.settings.top_share is not None:
            below = int(estimates.shape[-1] * (1 - self.settings.top_share))
            least = estimates.sort(-1).values[..., below - 1 : below] if below else -1.0
        first = self.fixed_digests.shape[2]
        matters = (estimates > least)[..., first : first + self.used]
        self.stamps[..., : self.used].masked_fill_(matters, step.position)


def digests(keys: torch.Tensor, page: int) -> torch.Tensor:
    """``[B, H, P, 2, D]`` elementwise maxima and minima of pages of keys ``[B, H, N, D]``, of which the last may not be full."""
    short = -keys.shape[2] % page
    pages = torch.cat((keys, keys[:, :, -1:].expand(-1, -1, short, -1)), dim=2).unflatten(2, (-1, page))
    return torch.stack((pages.amax(3), pages.amin(3)), dim=3)


def likely(prompt: Prompt, start: int, stop: int) -> torch.Tensor:
    """``[B, H, stop - start]`` group mean of the dot product of the prompt's last query with these keys."""
    query = prompt.queries[:, :, -1].unflatten(1, (-1, prompt.group)).float().mean(2, keepdim=True)
    return (query @ prompt.keys[:, :, start:stop].float().mT).squeeze(2)
