# SPDX-License-Identifier: Apache-2.0
"""Specification of attention; letters as in ``reference``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.shares import Shares


def attend_pages(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float
) -> torch.Tensor:
    """Decode attention over the pages in ``reads``, all of them there.

    Args:
        queries: ``[B, Hq, D]``.
        keys, values: ``[R * C, S, H, D]``.
        seq_lens: ``[B]`` tokens of context, the new one included; masks the partial last page.

    Returns:
        ``[B, Hq, D]``, zeros for a request of padding.
    """
    result = torch.zeros_like(queries)
    _attend(queries, keys, values, seq_lens, reads.slots, reads.pages, scale, result)
    return result


def allocate_shares(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> Shares:
    """Room for an attention in parts: ``attend_present`` and ``attend_rest``, in any order or at once, and ``merge_shares`` behind both."""
    batch, num_heads, head_dim = queries.shape
    return Shares(queries.new_empty(batch, num_heads, 2, head_dim), queries.new_empty(batch, num_heads, 2, dtype=torch.float32))


def attend_present(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float, shares: Shares
) -> None:
    """The part of ``attend_pages`` over the pages at the head of each list, which are there."""
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, ~_coming(reads), 0)


def attend_rest(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float, shares: Shares
) -> None:
    """The part over the others, which were on their way and are there now."""
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, _coming(reads), 1)


def merge_shares(outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, Hq, D]`` of ``dtype``, as of ``attend_pages``, from what ``Shares`` holds."""
    top = weights.amax(2, keepdim=True)
    parts = (weights - top.where(top > -torch.inf, 0)).exp2()[..., None]
    total = parts.sum(2)
    return ((outputs.masked_fill(parts == 0, 0) * parts).sum(2) / total.where(total != 0, 1)).to(dtype)


def _coming(reads: Reads) -> torch.Tensor:
    """``[B, H, A]``: entries of the lists whose pages are on their way."""
    if reads.present is None:
        return torch.zeros_like(reads.slots, dtype=torch.bool)
    return torch.arange(reads.slots.shape[2], device=reads.slots.device) >= reads.present[..., None]


def _attend_share(queries, keys, values, seq_lens, reads, scale, shares: Shares, whose: torch.Tensor, share: int) -> None:
    """Over the entries ``whose [B, H, A]``."""
    shares.outputs[:, :, share], shares.weights[:, :, share] = 0, -torch.inf
    slots = reads.slots.where(whose, -1)
    _attend(queries, keys, values, seq_lens, slots, reads.pages, scale, shares.outputs[:, :, share], shares.weights[:, :, share])


def _attend(queries, keys, values, seq_lens, slots, pages, scale, result: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    """Of the kv heads with a slot in ``slots [B, H, A]``, into ``result [B, Hq, D]``; and what it weighs, into ``weights [B, Hq]``."""
    page_size, num_kv_heads = keys.shape[1:3]
    b, h = (slots >= 0).any(-1).nonzero(as_tuple=True)
    if not len(b):
        return
    width = int((slots[b, h] >= 0).any(0).nonzero()[-1]) + 1
    slots, pages = (x[b, h, :width].long() for x in (slots, pages))
    position = pages[..., None] * page_size + torch.arange(page_size, device=b.device)
    visible = ((slots >= 0)[..., None] & (position < seq_lens[b, None, None])).flatten(1)[:, None]
    k, v = (cache[slots.clamp(min=0), :, h[:, None]].flatten(1, 2) for cache in (keys, values))
    k, v = (x.masked_fill_(~visible[:, 0, :, None], 0) for x in (k, v))  # what lies there may be another request's, even NaN
    q = queries.unflatten(1, (num_kv_heads, -1))[b, h]
    result.unflatten(1, (num_kv_heads, -1))[b, h] = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    if weights is not None:
        logits = (q.float() @ k.mT.float()).mul_(scale).masked_fill_(~visible, -torch.inf)
        weights.unflatten(1, (num_kv_heads, -1))[b, h] = logits.logsumexp(-1) / math.log(2)


def extend_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_lens: list[int],
    key_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens over ``[prefix | new]``, request after request.

    Args:
        queries: ``[sum(query_lens), Hq, D]``.
        keys, values: ``[sum(key_lens), H, D]``; a request's queries are its last ``query_len`` positions.

    Returns:
        ``[sum(query_lens), Hq, D]``.
    """
    outputs = []
    for q, k, v in zip(queries.split(query_lens), keys.split(key_lens), values.split(key_lens)):
        past = k.shape[0] - q.shape[0]
        rows = torch.arange(q.shape[0], device=q.device)[:, None] + past
        mask = torch.arange(k.shape[0], device=q.device) <= rows if past else None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
