# SPDX-License-Identifier: Apache-2.0
"""Specification of digests, and of the scores that pages get from them; letters as in ``reference``."""

from __future__ import annotations

from typing import Literal

import torch

from sglang_freekv.config import WORD_TOKENS, PageBudget
from sglang_freekv.kernels.reference_movers import gather_pages

Box = Literal["cuboid-mean", "min-max"]  # how a box around a page's keys is made


def digest_pages(
    keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int, box: Box = "min-max"
) -> None:
    """Summarise full pages by a box around their keys.

    Args:
        keys: ``[T, H, D]`` token rows to read: numbers, or floats of 8 bits, which are numbers, too.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose digest is written, -1 to skip.
        digests: ``[n_page, H, 2, D]`` upper then lower corners, in a dtype that holds the keys; written in place.
        page_size: S.
        box: "min-max" is the elementwise max and min (paper section 3.2). "cuboid-mean" (ArkVale, NeurIPS 2024) has the same centre, and
            the keys' mean distance from it as half width. The distances are summed in float64, so the order of the keys does not matter.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = gather_pages(keys, starts[chosen], page_size).float()
    upper, lower = pages.amax(2), pages.amin(2)
    if box == "cuboid-mean":
        centre = (upper.double() + lower.double()) / 2
        radius = (pages.double() - centre[:, :, None]).abs().sum(2) / page_size
        upper, lower = centre + radius, centre - radius
    digests[host_pages[chosen]] = torch.stack((upper, lower), dim=2).to(digests.dtype)


def digest_two_bit(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """Summarise full pages by two bits for each dimension of each key: the nearest of four levels, or the lower of two equally near.

    In each dimension the levels divide the range of the page's keys into equal steps. KIVI (Liu et al., ICML 2024) quantises keys so.
    If a dimension has a number that is not finite, its codes are 0 and the page's score is NaN.

    Args:
        keys, starts, host_pages, page_size: as in :func:`digest_pages`; D is even.
        digests: ``[n_page, H, E]`` written in place: the "min-max" box in a dtype that holds the keys, then ``[S / WORD_TOKENS, D / 2]`` words of
            32 bits. Bits 2 t and 2 t + 1 of word (w, d) are the code of token WORD_TOKENS * w + t in dimension d. The bits 16 places
            higher are its code in dimension d + D / 2.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = gather_pages(keys, starts[chosen], page_size).float()
    upper, lower = pages.amax(2), pages.amin(2)
    above, span = 6 * (pages - lower[:, :, None]), (upper - lower)[:, :, None]
    codes = torch.stack([above > odd * span for odd in (1, 3, 5)]).sum(0)  # [N, H, S, D]
    codes = codes.unflatten(3, (2, -1)).unflatten(2, (-1, WORD_TOKENS)) << _code_bits(keys.device)
    words = codes.sum((3, 4)).to(torch.int32).flatten(2)
    box = torch.cat((upper, lower), dim=2).to(digests.dtype)
    digests[host_pages[chosen]] = torch.cat((box, words.view(digests.dtype)), dim=2)


def score_pages(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    *,
    scale: float,
    selects: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every candidate page for the next step, per query head, by the largest logit of a point in its box (paper section 3.2).

    A score is ``scale * sum_d max(q_d * upper_d, q_d * lower_d)``, which is ``relu(q) . upper - relu(-q) . lower``.
    With min-max boxes it bounds the logits of the page's keys from above.

    Args:
        queries: ``[B, Hq, D]`` post-RoPE.
        digests: ``[n_page, H, 2, D]`` of :func:`digest_pages`.
        rows, seq_lens, page_table: ``[B]``, ``[B]``, ``[B, P]`` as in ``reference.plan_pages``.
        budget: its sink and window delimit the candidates.
        page_size: S.
        scale: factor of the layer's attention logits.
        selects: ``[B, H]`` bool kv heads whose pages are scored. None means all.

    Returns:
        ``[B, Hq, P]`` float32 scores, higher is better, of the candidates of ``seq_lens + 1`` tokens, which include those of ``seq_lens``.
        Other elements are undefined.
    """
    q = queries.float().unflatten(1, (digests.shape[1], -1))
    maxima, minima = digests[page_table.clamp(min=0).long()].float().unbind(3)
    bound = torch.einsum("bhgd,bphd->bhgp", q.relu(), maxima) - torch.einsum("bhgd,bphd->bhgp", (-q).relu(), minima)
    return _without_others((bound * scale).flatten(1, 2), selects)


def score_two_bit(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    *,
    scale: float,
    selects: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`score_pages`, from the ``digests [n_page, H, E]`` of :func:`digest_two_bit`.

    A page's score is the log-sum-exp of ``scale * q . k`` over its tokens.
    """
    num_kv_heads, head_dim = digests.shape[1], queries.shape[2]
    logits = torch.empty(*queries.shape[:2], page_table.shape[1], device=queries.device)
    for q, pages, into in zip(queries.float().unflatten(1, (num_kv_heads, -1)), page_table, logits):  # one request's keys at a time
        units = digests[pages.clamp(min=0).long()]  # [P, H, E]
        upper, lower = units[..., : 2 * head_dim].float().unflatten(-1, (2, 1, head_dim)).unbind(2)
        words = units[..., 2 * head_dim :].contiguous().view(torch.int32).unflatten(2, (page_size // WORD_TOKENS, 1, 1, -1))
        codes = (words >> _code_bits(words.device)) & 3
        keys = lower + codes.flatten(4).flatten(2, 3) * ((upper - lower) / 3)  # [P, H, S, D]
        into[:] = (torch.einsum("hgd,phsd->hgps", q, keys) * scale).logsumexp(-1).flatten(0, 1)
    return _without_others(logits, selects)


def _without_others(logits: torch.Tensor, selects: torch.Tensor | None) -> torch.Tensor:
    """``logits [B, Hq, P]`` with NaN for kv heads that are not scored: no plan may need them."""
    if selects is None:
        return logits
    return logits.where(selects.repeat_interleave(logits.shape[1] // selects.shape[1], 1)[..., None], torch.nan)


def _code_bits(device: torch.device) -> torch.Tensor:
    """``[WORD_TOKENS, 2, 1]`` first bit of each token's code in a word, for the lower and for the upper half of the dimensions."""
    return 2 * torch.arange(2 * WORD_TOKENS, device=device).view(2, WORD_TOKENS, 1).transpose(0, 1)
