"""Specification of attention; letters as in ``reference``."""

from __future__ import annotations

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
    _attend(queries, keys, values, seq_lens, reads, scale, reads.slots[..., 0] >= 0, result)
    return result


def allocate_shares(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> Shares:
    """Room for an attention in parts: ``attend_present`` and ``attend_rest``, in any order or at once, and ``merge_shares`` behind both."""
    batch, num_heads, head_dim = queries.shape
    return Shares(queries.new_empty(batch, num_heads, 2, head_dim), queries.new_empty(batch, num_heads, 2, dtype=torch.float32))


def attend_present(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float, shares: Shares
) -> None:
    """The part of ``attend_pages`` that reads no page which ``reads`` has on its way. Here: that of the kv heads that wait for none."""
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, ~_waits(reads), 0)


def attend_rest(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float, shares: Shares
) -> None:
    """What ``attend_present`` leaves; the pages that were on their way are there. Here: all of the kv heads that waited for one."""
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, _waits(reads), 1)


def merge_shares(outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[B, Hq, D]`` of ``dtype``, as of ``attend_pages``, from what ``Shares`` holds."""
    parts = weights.exp2()[..., None]
    return (outputs.masked_fill(parts == 0, 0) * parts).sum(2).to(dtype)


def _waits(reads: Reads) -> torch.Tensor:
    """``[B, H]``: kv heads of which a page is on its way."""
    return reads.present < (reads.slots >= 0).sum(-1)


def _attend_share(queries, keys, values, seq_lens, reads, scale, shares: Shares, whose: torch.Tensor, share: int) -> None:
    """All of the kv heads ``whose [B, H]`` for one of two shares, of which the other weighs nothing."""
    shares.outputs[:, :, share] = 0
    shares.weights[:, :, share] = torch.where(whose, 0.0, -torch.inf).repeat_interleave(queries.shape[1] // keys.shape[2], 1)
    _attend(queries, keys, values, seq_lens, reads, scale, whose & (reads.slots[..., 0] >= 0), shares.outputs[:, :, share])


def _attend(queries, keys, values, seq_lens, reads, scale, wanted: torch.Tensor, result: torch.Tensor) -> None:
    """Of the kv heads ``wanted [B, H]``, into ``result [B, Hq, D]``."""
    page_size, num_kv_heads = keys.shape[1:3]
    b, h = wanted.nonzero(as_tuple=True)
    if not len(b):
        return
    width = int((reads.slots[b, h] >= 0).sum(-1).max())
    slots, pages = (x[b, h, :width].long() for x in (reads.slots, reads.pages))
    position = pages[..., None] * page_size + torch.arange(page_size, device=b.device)
    visible = ((slots >= 0)[..., None] & (position < seq_lens[b, None, None])).flatten(1)
    k, v = (cache[slots.clamp(min=0), :, h[:, None]].flatten(1, 2) for cache in (keys, values))
    k, v = (x.masked_fill_(~visible[..., None], 0) for x in (k, v))  # what lies there may be another request's, even NaN
    grouped = queries.unflatten(1, (num_kv_heads, -1))
    attended = F.scaled_dot_product_attention(grouped[b, h], k, v, attn_mask=visible[:, None], scale=scale)
    result.unflatten(1, (num_kv_heads, -1))[b, h] = attended


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
