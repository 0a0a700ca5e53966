# SPDX-License-Identifier: Apache-2.0
"""Specification of what pages are summarised by, and of the scores that this gives them; letters as in ``reference``."""

from __future__ import annotations

from typing import Literal

import torch

from sglang_freekv.config import WORD_TOKENS, PageBudget
from sglang_freekv.kernels.reference_movers import gather_pages

Box = Literal["cuboid-mean", "min-max"]  # around the keys of a page


def digest_pages(
    keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int, box: Box = "min-max"
) -> None:
    """Summarise full pages by a box around their keys.

    Args:
        keys: ``[T, H, D]`` token rows to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose digest is written, -1 to skip.
        digests: ``[n_page, H, 2, D]`` upper then lower corners, in the dtype of the keys; written in place.
        box: "min-max", the elementwise max and min (paper section 3.2); or "cuboid-mean" (ArkVale), around the centre of that as far as
            the keys are from it in the mean, summed in float64, so that a digest is the same in whatever order its keys are added.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = gather_pages(keys, starts[chosen], page_size)
    upper, lower = pages.amax(2), pages.amin(2)
    if box == "cuboid-mean":
        centre = (upper.double() + lower.double()) / 2
        radius = (pages.double() - centre[:, :, None]).abs().sum(2) / page_size
        upper, lower = centre + radius, centre - radius
    digests[host_pages[chosen]] = torch.stack((upper, lower), dim=2).to(digests.dtype)


def digest_two_bit(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """Summarise full pages by two bits for each dimension of each key: which of four levels is nearest, of equal ones the lower.

    The levels go from the smallest to the largest of the page's keys in equal steps: KIVI (Liu et al., ICML 2024) quantises keys so,
    per dimension. A dimension with a number that is not finite has codes of 0, and its page a score that is none.

    Args:
        keys, starts, host_pages: as of :func:`digest_pages`; D is even.
        digests: ``[n_page, H, E]`` the "min-max" box in the dtype of the keys, then ``[S / WORD_TOKENS, D / 2]`` words of 32 bits: bits 2 t
            and 2 t + 1 of word (w, d) are the code of token WORD_TOKENS * w + t in dimension d, and those 16 higher in dimension d + D / 2;
            written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = gather_pages(keys, starts[chosen], page_size).float()
    upper, lower = pages.amax(2), pages.amin(2)
    above, span = 6 * (pages - lower[:, :, None]), (upper - lower)[:, :, None]
    codes = sum((above > odd * span).long() for odd in (1, 3, 5))  # [N, H, S, D]
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
    scale: float,
) -> torch.Tensor:
    """Bound the attention logits of every page that is a candidate for the next step, per query head (paper section 3.2).

    A page's bound is ``scale * sum_d max(q_d * max_d, q_d * min_d)``, which is ``relu(q) . max - relu(-q) . min``.

    Args:
        queries: ``[B, Hq, D]``.
        digests: ``[n_page, H, 2, D]``.
        rows, seq_lens, page_table: ``[B]``, ``[B]``, ``[B, P]`` as in ``reference.plan_pages``.
        budget: sink and window bound the candidates.
        scale: of the layer's attention logits.

    Returns:
        ``[B, Hq, P]`` float32 of the candidates of ``seq_lens + 1`` tokens, among which are those of ``seq_lens``; anything elsewhere.
    """
    q = queries.float().unflatten(1, (digests.shape[1], -1))
    maxima, minima = digests[page_table.clamp(min=0).long()].float().unbind(3)
    bound = torch.einsum("bhgd,bphd->bhgp", q.relu(), maxima) - torch.einsum("bhgd,bphd->bhgp", (-q).relu(), minima)
    return (bound * scale).flatten(1, 2)


def score_two_bit(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """As :func:`score_pages`, by the ``digests [n_page, H, E]`` of :func:`digest_two_bit`: the logarithm of the sum of the exponentials
    of ``scale * q . k`` over the tokens of a page."""
    num_kv_heads, head_dim = digests.shape[1], queries.shape[2]
    logits = torch.empty(*queries.shape[:2], page_table.shape[1], device=queries.device)
    for q, pages, into in zip(queries.float().unflatten(1, (num_kv_heads, -1)), page_table, logits):  # the keys of one request at a time
        units = digests[pages.clamp(min=0).long()]  # [P, H, E]
        upper, lower = units[..., : 2 * head_dim].float().unflatten(-1, (2, 1, head_dim)).unbind(2)
        words = units[..., 2 * head_dim :].contiguous().view(torch.int32).unflatten(2, (page_size // WORD_TOKENS, 1, 1, -1))
        codes = (words >> _code_bits(words.device)) & 3
        keys = lower + codes.flatten(4).flatten(2, 3) * ((upper - lower) / 3)  # [P, H, S, D]
        into[:] = (torch.einsum("hgd,phsd->hgps", q, keys) * scale).logsumexp(-1).flatten(0, 1)
    return logits


def _code_bits(device: torch.device) -> torch.Tensor:
    """``[WORD_TOKENS, 2, 1]`` where in a word the codes of its tokens are, in the lower and in the upper half of the dimensions."""
    return 2 * torch.arange(2 * WORD_TOKENS, device=device).view(2, WORD_TOKENS, 1).transpose(0, 1)
