# SPDX-License-Identifier: Apache-2.0
"""Decode attention over the frames that a step reads. Programs share the tokens of a kv head, and a merge adds up their shares."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.follow import await_previous, following
from sglang_freekv.kernels.merge import merge_shares
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.shares import Shares
from sglang_freekv.kernels.stamps import is_sampled, note_end

# An SM of an H100 or H200 runs two programs at once, and a recall holds some SMs; a second round of programs evens that out.
PROGRAMS = 464  # trials of both numbers: benchmarks/results/bench_step-history.json
PROGRAMS_OF_THE_REST = 1056  # most of them have no work, so each has a small share
# Splits of one kv head's tokens. The merge holds all splits at once, and the few missing pages of a kv head fill few tiles.
MOST_SPLITS, MOST_SPLITS_OF_THE_REST = 64, 8


def attend_pages(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float
) -> torch.Tensor:
    """As :func:`reference.attend_pages`; one program for each (request, kv head, split of its tokens), and a merge of the splits.

    ``queries`` may be a view of wider rows.
    """
    (splits, _), reads = _splits(queries, keys, reads), reads._replace(present=None)
    if splits > 1:
        shares = _empty_shares(queries, splits)
        _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits)
        return merge_shares(*shares, queries.dtype)
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    _launch(queries, keys, values, seq_lens, reads, scale, (output, None), splits=splits)
    return output


def allocate_shares(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> Shares:
    """As :func:`reference.allocate_shares`."""
    return _empty_shares(queries, sum(_splits(queries, keys, reads)))


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
) -> None:
    """As :func:`reference.attend_present`; one program for each (request, kv head, split of its present pages)."""
    splits, _ = _splits(queries, keys, reads)
    _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits, stamp=stamp)


def attend_rest(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, reads: Reads, scale: float, shares: Shares
) -> None:
    """As :func:`reference.attend_rest`; a program without tokens to attend to ends at once."""
    _, splits = _splits(queries, keys, reads)
    _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits, rest=True)


def _block_t(keys: torch.Tensor) -> int:
    """Tokens in a tile."""
    return max(16, min(64, 16384 // (triton.next_power_of_2(keys.shape[3]) * keys.element_size())))


def _splits(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> tuple[int, int]:
    """Splits of each (request, kv head): of its present pages, and of the rest."""
    (_, page_size, num_kv_heads, _), width = keys.shape, reads.frames.shape[2]
    tiles, units = triton.cdiv(width * page_size, _block_t(keys)), len(queries) * num_kv_heads
    limits = (PROGRAMS, MOST_SPLITS), (PROGRAMS_OF_THE_REST, MOST_SPLITS_OF_THE_REST)
    present, rest = (max(1, min(programs // units, tiles, most)) for programs, most in limits)
    return present, rest


def _empty_shares(queries: torch.Tensor, number: int) -> Shares:
    batch, num_heads, head_dim = queries.shape
    outputs = torch.empty(batch, num_heads, number, head_dim, dtype=torch.float32, device=queries.device)
    return Shares(outputs, torch.empty(batch, num_heads, number, dtype=torch.float32, device=queries.device))


def _launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    into: tuple[torch.Tensor, torch.Tensor | None],
    *,
    splits: int,
    rest: bool = False,
    stamp: torch.Tensor | None = None,
) -> None:
    """Attend into outputs and weights as in ``Shares``; weights are None with one split."""
    weights = into[1]
    (batch, num_heads, head_dim), (_, page_size, num_kv_heads, _) = queries.shape, keys.shape
    group = num_heads // num_kv_heads
    assert queries.stride(2) == 1 and all(x.is_contiguous() for x in (keys, values, reads.frames, reads.pages))
    _attend_pages[(batch, num_kv_heads, splits)](
        queries,
        keys,
        values,
        seq_lens,
        reads.frames,
        reads.pages,
        reads.present,
        *into,
        stamp,
        queries.stride(0),
        queries.stride(1),
        reads.frames.shape[2],
        reads.frames.shape[2] if reads.budget is None else reads.budget,
        1 if weights is None else weights.shape[2],
        scale * math.log2(math.e),
        REST=rest,
        H=num_kv_heads,
        G=group,
        D=head_dim,
        S=page_size,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_T=_block_t(keys),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=3,
        **following(keys.device, closely=rest),  # the other attentions wait for no kernel that runs right before them
    )


@triton.jit(do_not_specialize=("A", "BUDGET", "N"))
def _attend_pages(
    p_queries,  # [B, Hq, D]
    p_keys,  # [F, S, H, D]
    p_values,  # [F, S, H, D]
    p_seq_lens,  # [B]
    p_frames,  # [B, H, A]
    p_pages,  # [B, H, A]
    p_present,  # [B, H] or None
    p_output,  # [B, Hq, N, D]
    p_weights,  # [B, Hq, N], or None with one split
    p_stamp,  # [4] or None
    stride_b,
    stride_h,
    A,
    BUDGET,
    N,
    scale,
    REST: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    if p_stamp is not None:
        sampled = is_sampled(p_stamp)
    i_b, i_h, i_n, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < G, o_d < D
    o_head = i_h * G + o_g
    present = A
    if p_present is not None:
        present = tl.load(p_present + i_b * H + i_h).to(tl.int32)
    if REST:
        if present >= A:
            tl.store(p_weights + (i_b * (H * G) + o_head) * N + N - splits + i_n, float("-inf"), mask=m_g)
            return
    seq_len = tl.load(p_seq_lens + i_b).to(tl.int32)
    o_q = i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0).to(p_keys.dtype.element_ty)
    first, last, end = _tokens_of(i_n, splits, present, seq_len, A, BUDGET, REST, S, BLOCK_T)
    if REST:
        if first >= end:
            tl.store(p_weights + (i_b * (H * G) + o_head) * N + N - splits + i_n, float("-inf"), mask=m_g)
            return
    p_reads = p_frames + (i_b * H + i_h) * A, p_pages + (i_b * H + i_h) * A
    b_acc, b_sum, b_max = _attend_tokens(b_q, p_keys, p_values, p_reads, i_h, first, last, seq_len, scale, H, D, S, BLOCK_T)
    o_out = (i_b * (H * G) + o_head) * N + i_n
    if REST:
        o_out += N - splits
    tl.store(p_output + o_out[:, None] * D + o_d[None, :], b_acc.to(p_output.dtype.element_ty), mask=m_g[:, None] & m_d[None, :])
    if p_weights is not None:
        tl.store(p_weights + o_out, b_max + tl.log2(b_sum), mask=m_g)
    if p_stamp is not None:
        if sampled:
            note_end(p_stamp)


@triton.jit
def _tokens_of(i_n, splits, present, seq_len, A, BUDGET, REST: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """The first and the last token of split ``i_n`` of the present pages, or of the rest, in whole tiles."""
    num_pages = tl.cdiv(seq_len, S)
    tokens = S * tl.where(num_pages <= A, num_pages, BUDGET)
    begin, end = 0, tl.minimum(present * S, tokens)
    if REST:
        begin, end = end, tokens
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_T), splits) * BLOCK_T
    first = begin + i_n * share
    return first, tl.minimum(first + share, end), end


@triton.jit
def _attend_tokens(
    b_q,
    p_keys,
    p_values,
    p_reads,
    head,
    first,
    last,
    seq_len,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Attention of ``b_q [BLOCK_G, BLOCK_D]`` to the listed tokens from ``first`` to ``last``: output, sum and maximum of its softmax."""
    BLOCK_G: tl.constexpr = b_q.shape[0]
    BLOCK_D: tl.constexpr = b_q.shape[1]
    p_frames, p_pages = p_reads
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    o_row, m_visible = _locate(p_frames, p_pages, first + o_t, last, seq_len, S)
    for start in range(first, last, BLOCK_T):
        o_kv, m_kv = (o_row[:, None] * H + head) * D + o_d[None, :], m_visible[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)  # [BLOCK_T, BLOCK_D]
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        m_logit = m_visible
        o_row, m_visible = _locate(p_frames, p_pages, start + BLOCK_T + o_t, last, seq_len, S)

        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_logit = tl.where(m_logit[None, :], b_logit, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_base = tl.where(b_new > float("-inf"), b_new, 0.0)  # no token visible yet: avoids inf - inf
        b_p = tl.exp2(b_logit - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
        b_max = b_new
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)  # keeps NaN, which makes the weight NaN: a weight of -inf would leave it out of the merge
    return b_acc / b_sum[:, None], b_sum, b_max


@triton.jit
def _locate(p_frames, p_pages, o_token, last, seq_len, S: tl.constexpr):
    """Token rows of the listed tokens ``o_token`` in the device cache, and a mask of those that may be read."""
    frame = tl.load(p_frames + o_token // S, mask=o_token < last, other=-1).to(tl.int64)
    page = tl.load(p_pages + o_token // S, mask=o_token < last, other=0)
    return frame * S + o_token % S, (frame >= 0) & (page * S + o_token % S < seq_len)
