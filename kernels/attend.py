# SPDX-License-Identifier: Apache-2.0
"""Decode attention over the frames that a step reads. Programs share the tokens of a kv head, and a merge adds up their shares."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.attended_codes import attend_codes
from sglang_freekv.kernels.attended_tokens import attend_tokens, tokens_of
from sglang_freekv.kernels.coded import TYPES
from sglang_freekv.kernels.follow import await_previous, following
from sglang_freekv.kernels.kv import Scales
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
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    *,
    scales: Scales | None = None,
) -> torch.Tensor:
    """As :func:`reference.attend_pages`; one program for each (request, kv head, split of its tokens), and a merge of the splits.

    ``queries`` may be a view of wider rows.
    """
    (splits, _), reads = _splits(queries, keys, reads), reads._replace(present=None)
    if splits > 1:
        shares = _empty_shares(queries, splits)
        _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits, scales=scales)
        return merge_shares(*shares, queries.dtype)
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    _launch(queries, keys, values, seq_lens, reads, scale, (output, None), splits=splits, scales=scales)
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
    scales: Scales | None = None,
) -> None:
    """As :func:`reference.attend_present`; one program for each (request, kv head, split of its present pages)."""
    splits, _ = _splits(queries, keys, reads)
    _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits, stamp=stamp, scales=scales)


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
    """As :func:`reference.attend_rest`; a program without tokens to attend to ends at once."""
    _, splits = _splits(queries, keys, reads)
    _launch(queries, keys, values, seq_lens, reads, scale, shares, splits=splits, rest=True, scales=scales)


def _block_d(keys: torch.Tensor) -> int:
    """Dimensions in a tile. Of codes they are at least 32 words, because Triton lets all warps make the same product of 16."""
    return max(128 if keys.dtype in TYPES else 1, triton.next_power_of_2(keys.shape[3]))


def _block_t(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Tokens in a tile. Codes take the registers of numbers, because they become such."""
    number = queries if keys.dtype in TYPES else keys
    return max(16, min(64, 16384 // (_block_d(keys) * number.element_size())))


def _splits(queries: torch.Tensor, keys: torch.Tensor, reads: Reads) -> tuple[int, int]:
    """Splits of each (request, kv head): of its present pages, and of the rest."""
    (_, page_size, num_kv_heads, _), width = keys.shape, reads.frames.shape[2]
    tiles, units = triton.cdiv(width * page_size, _block_t(queries, keys)), len(queries) * num_kv_heads
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
    scales: Scales | None = None,
) -> None:
    """Attend into outputs and weights as in ``Shares``; weights are None with one split."""
    weights = into[1]
    (batch, num_heads, head_dim), (_, page_size, num_kv_heads, _) = queries.shape, keys.shape
    group, code, block_t, block_d = num_heads // num_kv_heads, TYPES.get(keys.dtype), _block_t(queries, keys), _block_d(keys)
    if code is not None:
        assert head_dim % 4 == 0, f"codes are read in words of four, expected a head_dim that four divides, got {head_dim}"
        keys, values = keys.view(torch.int32), values.view(torch.int32)
    assert scales is None or all(x.is_contiguous() and x.shape == keys.shape[:3] for x in scales)
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
        *(scales or (None, None)),
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
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        CODE=code,
        num_warps=4,
        num_stages=3,
        **following(keys.device, closely=rest),  # the other attentions wait for no kernel that runs right before them
    )


@triton.jit(do_not_specialize=("A", "BUDGET", "N"))
def _attend_pages(
    p_queries,  # [B, Hq, D]
    p_keys,  # [F, S, H, D], or words [F, S, H, D / 4] of codes
    p_values,  # [F, S, H, D], or words [F, S, H, D / 4] of codes
    p_seq_lens,  # [B]
    p_frames,  # [B, H, A]
    p_pages,  # [B, H, A]
    p_present,  # [B, H] or None
    p_output,  # [B, Hq, N, D]
    p_weights,  # [B, Hq, N], or None with one split
    p_stamp,  # [4] or None
    p_key_scales,  # [F, S, H] or None
    p_value_scales,  # [F, S, H] or None
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
    CODE: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    if p_stamp is not None:
        sampled = is_sampled(p_stamp)
    i_b, i_h, i_n, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < G, o_d < D
    o_head = i_h * G + o_g
    present = A if p_present is None else tl.load(p_present + i_b * H + i_h).to(tl.int32)
    if REST:
        if present >= A:
            tl.store(p_weights + (i_b * (H * G) + o_head) * N + N - splits + i_n, float("-inf"), mask=m_g)
            return
    seq_len = tl.load(p_seq_lens + i_b).to(tl.int32)
    o_q = i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :]
    b_q = tl.load(p_queries + o_q, mask=m_g[:, None] & m_d[None, :], other=0.0)
    first, last, end = tokens_of(i_n, splits, present, seq_len, A, BUDGET, REST, S, BLOCK_T)
    if REST:
        if first >= end:
            tl.store(p_weights + (i_b * (H * G) + o_head) * N + N - splits + i_n, float("-inf"), mask=m_g)
            return
    p_scales, p_reads = (p_key_scales, p_value_scales), (p_frames + (i_b * H + i_h) * A, p_pages + (i_b * H + i_h) * A)
    b_acc, b_sum, b_max = _attend(b_q, p_keys, p_values, p_scales, p_reads, i_h, first, last, seq_len, scale, CODE, H, D, S, BLOCK_T)
    o_out = (i_b * (H * G) + o_head) * N + i_n
    if REST:
        o_out += N - splits
    _write(p_output, p_weights, o_out, b_acc, b_sum, b_max, m_g, m_d, D)
    if p_stamp is not None:
        if sampled:
            note_end(p_stamp)


@triton.jit
def _attend(
    b_q,
    p_keys,
    p_values,
    p_scales,
    p_reads,
    head,
    first,
    last,
    seq_len,
    scale,
    CODE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Output, sum and maximum of the softmax, over numbers or codes."""
    if CODE is None:
        b_q = b_q.to(p_keys.dtype.element_ty)
        b_acc, b_sum, b_max = attend_tokens(b_q, p_keys, p_values, p_reads, head, first, last, seq_len, scale, H, D, S, BLOCK_T)
    else:
        b_acc, b_sum, b_max = attend_codes(
            b_q, p_keys, p_values, p_scales, p_reads, head, first, last, seq_len, scale, CODE, H, D, S, BLOCK_T
        )
    return b_acc, b_sum, b_max


@triton.jit
def _write(p_output, p_weights, o_out, b_acc, b_sum, b_max, m_g, m_d, D: tl.constexpr):
    o_d = tl.arange(0, b_acc.shape[1])
    tl.store(p_output + o_out[:, None] * D + o_d[None, :], b_acc.to(p_output.dtype.element_ty), mask=m_g[:, None] & m_d[None, :])
    if p_weights is not None:
        tl.store(p_weights + o_out, b_max + tl.log2(b_sum), mask=m_g)
