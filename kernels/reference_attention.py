"""Specification of attention; letters as in ``reference``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_freekv.kernels.reads import Reads


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    begun: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention over the pages in ``reads``, in one call, or in two if some pages are on their way.

    Args:
        queries: ``[B, Hq, D]``.
        keys, values: ``[R * C, S, H, D]``.
        seq_lens: ``[B]`` tokens of context, the new one included; masks the partial last page.
        reads: of ``reference.plan_pages``: a first call reads no more pages of a list than are present.
        begun: what the first call returned; this one attends to the others, and may read all.

    Returns:
        ``[B, Hq, D]``; of a first call something for the second.
    """
    page_size, num_kv_heads = keys.shape[1:3]
    grouped = queries.unflatten(1, (num_kv_heads, -1))
    result = torch.zeros_like(grouped) if begun is None else begun.unflatten(1, (num_kv_heads, -1)).clone()
    wanted = reads.slots[..., 0] >= 0
    if reads.present is not None:  # a kv head that has to wait for a page is left to the second call
        waits = reads.present < (reads.slots >= 0).sum(-1)
        wanted = wanted & (waits if begun is not None else ~waits)
    b, h = wanted.nonzero(as_tuple=True)
    if len(b):
        width = int((reads.slots[b, h] >= 0).sum(-1).max())
        slots, pages = (x[b, h, :width].long() for x in (reads.slots, reads.pages))
        position = pages[..., None] * page_size + torch.arange(page_size, device=b.device)
        visible = ((slots >= 0)[..., None] & (position < seq_lens[b, None, None])).flatten(1)
        k, v = (cache[slots.clamp(min=0), :, h[:, None]].flatten(1, 2) for cache in (keys, values))
        k, v = (x.masked_fill_(~visible[..., None], 0) for x in (k, v))  # what lies there may be another request's, even NaN
        result[b, h] = F.scaled_dot_product_attention(grouped[b, h], k, v, attn_mask=visible[:, None], scale=scale)
    return result.flatten(1, 2)


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
