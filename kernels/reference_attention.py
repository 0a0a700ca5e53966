# SPDX-License-Identifier: Apache-2.0
"""Specification of decode and extend attention; letters as in ``reference``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sglang_freekv.kernels.kv import FLOAT_CODES, Scales
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.reference_codes import decode_vectors
from sglang_freekv.kernels.reference_stamps import write_stamp
from sglang_freekv.kernels.shares import Shares

CODES = (torch.int8, *FLOAT_CODES)  # types of 8 bits, which attention does not compute with


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    *,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Decode attention over the pages in ``reads``, all of which are present.

    Args:
        queries: ``[B, Hq, D]`` post-RoPE, and rotated if keys are.
        keys, values: ``[F, S, H, D]`` device cache: numbers, or codes of 8 bits, which are decoded in float32.
        seq_lens: ``[B]`` tokens of context, the new one included. They mask the partial last page.
        reads: frames and pages to attend to.
        scale: factor of the logits ``q . k``.
        scales: ``[F, S, H]`` of codes; None if keys and values have none. One that is NaN makes NaN of all who see the token.

    Returns:
        ``[B, Hq, D]`` in the dtype of the queries, zeros for a padding request.
    """
    result = torch.zeros_like(queries)
    _attend(queries, keys, values, seq_lens, reads, scale, result, scales=scales)
    return result


def allocate_shares(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> Shares:
    """Uninitialised shares for ``attend_present`` and ``attend_rest``, in any order or at once, and for ``merge_shares`` behind both."""
    batch, num_heads, head_dim = queries.shape
    return Shares(queries.new_empty(batch, num_heads, 2, head_dim), queries.new_empty(batch, num_heads, 2, dtype=torch.float32))


def attend_present(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    shares: Shares,
    *,
    stamp: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> None:
    """The part of ``attend_pages`` over the present pages, which are at the head of each list.

    Args:
        stamp: ``[4]`` of ``reference_stamps``: receives the end.
    """
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, whose=~_coming(reads), number=0, scales=scales)
    if stamp is not None:
        write_stamp(stamp)


def attend_rest(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    shares: Shares,
    *,
    scales: Scales | None = None,
) -> None:
    """The part of ``attend_pages`` over the other pages, which the correction's recall has brought."""
    _attend_share(queries, keys, values, seq_lens, reads, scale, shares, whose=_coming(reads), number=1, scales=scales)


def merge_shares(
    outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, learned_sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """``[B, Hq, D]`` output of ``attend_pages`` in ``dtype``, from the two tensors of ``Shares``.

    Args:
        learned_sinks: ``[Hq]`` floating logits of the model. Each is one more share of its query head, whose output is zero. None for none.
    """
    if learned_sinks is not None:
        sinks = (learned_sinks.float() / math.log(2)).expand(len(weights), -1)
        outputs, weights = F.pad(outputs, (0, 0, 0, 1)), torch.cat((weights, sinks[..., None]), 2)
    top = weights.amax(2, keepdim=True)
    parts = (weights - top.where(top > -torch.inf, 0)).exp2()[..., None]
    total = parts.sum(2)
    return ((outputs.masked_fill(parts == 0, 0) * parts).sum(2) / total.where(total != 0, 1)).to(dtype)


def _coming(reads: Reads) -> torch.Tensor:
    """``[B, H, A]`` bool: entries of the lists that the correction's recall fills."""
    if reads.present is None:
        return torch.zeros_like(reads.frames, dtype=torch.bool)
    return torch.arange(reads.frames.shape[2], device=reads.frames.device) >= reads.present[..., None]


def _attend_share(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    shares: Shares,
    *,
    whose: torch.Tensor,
    number: int,
    scales: Scales | None,
) -> None:
    """Attend to the entries for which ``whose [B, H, A]`` is True, into the share of that number."""
    result, weights = shares.outputs[:, :, number], shares.weights[:, :, number]
    result[:], weights[:] = 0, -torch.inf
    reads = reads._replace(frames=reads.frames.where(whose, -1))
    _attend(queries, keys, values, seq_lens, reads, scale, result, weights=weights, scales=scales)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    result: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    scales: Scales | None,
) -> None:
    """Attend for the kv heads with a slot in ``reads``; write ``result [B, Hq, D]`` and ``weights [B, Hq]``, as in ``Shares``."""
    (frames, pages, *_), (page_size, num_kv_heads) = reads, keys.shape[1:3]
    b, h = (frames >= 0).any(-1).nonzero(as_tuple=True)
    if not len(b):
        return
    width = int((frames[b, h] >= 0).any(0).nonzero()[-1]) + 1
    frames, pages = (x[b, h, :width].long() for x in (frames, pages))
    position = pages[..., None] * page_size + torch.arange(page_size, device=b.device)
    visible = ((frames >= 0)[..., None] & (position < seq_lens[b, None, None])).flatten(1)[:, None]
    k, v = (cache[frames.clamp(min=0), :, h[:, None]].flatten(1, 2) for cache in (keys, values))
    q = queries.unflatten(1, (num_kv_heads, -1))[b, h]
    if keys.dtype in CODES:
        factors = (each[frames.clamp(min=0), :, h[:, None]].flatten(1, 2) for each in scales) if scales is not None else (None, None)
        q, k, v = q.float(), *(decode_vectors(codes, factor) for codes, factor in zip((k, v), factors))
    k, v = (x.masked_fill_(~visible[:, 0, :, None], 0) for x in (k, v))  # a masked token may be another request's, even NaN
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    result.unflatten(1, (num_kv_heads, -1))[b, h] = output.to(result.dtype)
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
    *,
    learned_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over ``[prefix | new]``, one request after the other.

    Args:
        queries: ``[sum(query_lens), Hq, D]`` post-RoPE. A request's queries are those of its last ``query_len`` positions.
        keys, values: ``[sum(key_lens), H, D]``.
        query_lens, key_lens: new tokens and all tokens of each request.
        scale: factor of the logits ``q . k``.
        learned_sinks: ``[Hq]`` as in ``merge_shares``.

    Returns:
        ``[sum(query_lens), Hq, D]`` in the dtype of the queries.
    """
    if learned_sinks is not None:
        return _extend_with_sinks(queries, keys, values, query_lens, key_lens, scale, learned_sinks=learned_sinks)
    outputs = []
    for q, k, v in zip(queries.split(query_lens), keys.split(key_lens), values.split(key_lens)):
        past = k.shape[0] - q.shape[0]
        rows = torch.arange(q.shape[0], device=q.device)[:, None] + past
        mask = torch.arange(k.shape[0], device=q.device) <= rows if past else None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _extend_with_sinks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_lens: list[int],
    key_lens: list[int],
    scale: float,
    *,
    learned_sinks: torch.Tensor,
) -> torch.Tensor:
    """As ``extend_attention``, in float32. A learned sink is one more key, of value zero, which all see.

    It is one in a dimension where the other keys are zero, and there a query has what makes the logit.
    """
    sink_key = F.one_hot(torch.tensor([keys.shape[2]], device=keys.device), keys.shape[2] + 1).expand(keys.shape[1], -1).float()
    own = (learned_sinks.float() / scale)[:, None]
    outputs = []
    for q, k, v in zip(queries.split(query_lens), keys.split(key_lens), values.split(key_lens)):
        q = torch.cat((q.float(), own.expand(len(q), -1, -1)), 2)
        k, v = torch.cat((sink_key[None], F.pad(k.float(), (0, 1)))), F.pad(v.float(), (0, 1, 0, 0, 1, 0))
        last = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)  # the sink is the first key
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.arange(k.shape[2], device=q.device) <= last, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1)[..., :-1])
    return torch.cat(outputs).to(queries.dtype)


def add_learned_sinks(outputs: torch.Tensor, weights: torch.Tensor, learned_sinks: torch.Tensor) -> torch.Tensor:
    """``extend_attention`` with learned sinks, from what it is without them.

    Args:
        outputs: ``[T, Hq, D]`` attention without the sinks.
        weights: ``[T, Hq]`` float32 logarithm to base 2 of each query's sum of exponentials.
        learned_sinks: ``[Hq]`` as in ``merge_shares``.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``outputs``.
    """
    shares = torch.sigmoid(weights * math.log(2) - learned_sinks.float())
    return (outputs.float() * shares[..., None]).to(outputs.dtype)
