# SPDX-License-Identifier: Apache-2.0
"""Fill: copy pages from token rows on the device into the slots of a newly seeded row, and into the frames that they were given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.coded import as_words, scale_arguments
from sglang_freekv.kernels.kv import Scales

PROGRAMS = 256  # of a request, enough for the device


def fill_pages(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: Tables,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    source_scales: Scales | None = None,
    scales: Scales | None = None,
) -> None:
    """As reference.fill_pages; one program for each (kv head, slot, request)."""
    source_keys, source_values, keys, values = as_words(source_keys, source_values, keys, values)
    slot_pages, num_heads, capacity = tables.slot_pages, *tables.slot_pages.shape[1:]
    page_size, head_dim = keys.shape[1], keys.shape[3]
    assert source_keys.stride(2) == keys.stride(3) == 1 and slot_pages.is_contiguous()
    assert source_keys.stride() == source_values.stride() and keys.stride() == values.stride()
    _fill_kernel[(num_heads, capacity, len(rows))](
        source_keys,
        source_values,
        starts,
        rows,
        seq_lens,
        slot_pages,
        tables.row_frames,
        keys,
        values,
        *scale_arguments(source_scales, 2),
        *scale_arguments(scales, 3),
        source_keys.shape[0],
        *source_keys.stride()[:2],
        *keys.stride()[:3],
        capacity,
        H=num_heads,
        S=page_size,
        D=head_dim,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


def fill_frames(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    given: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    source_scales: Scales | None = None,
    scales: Scales | None = None,
) -> None:
    """As reference.fill_frames. The programs of a request take its pages in turn."""
    source_keys, source_values, keys, values = as_words(source_keys, source_values, keys, values)
    (batch, num_pages), (_, page_size, num_heads, head_dim) = given.shape, keys.shape
    assert source_keys.stride(2) == keys.stride(3) == given.stride(1) == 1
    assert source_keys.stride() == source_values.stride() and keys.stride() == values.stride()
    _fill_frames_kernel[(PROGRAMS, batch)](
        source_keys,
        source_values,
        starts,
        given,
        keys,
        values,
        *scale_arguments(source_scales, 2),
        *scale_arguments(scales, 3),
        source_keys.shape[0],
        num_pages,
        given.stride(0),
        *source_keys.stride()[:2],
        *keys.stride()[:3],
        H=num_heads,
        S=page_size,
        D=head_dim,
        PROGRAMS=PROGRAMS,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=triton.next_power_of_2(num_heads),
    )


@triton.jit(do_not_specialize=("num_tokens", "C"))
def _fill_kernel(
    p_source_keys,  # [T, H, D]
    p_source_values,  # [T, H, D]
    p_starts,  # [B]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_slot_pages,  # [R, H, C]
    p_row_frames,  # [R, C]
    p_keys,  # [F, S, H, D]
    p_values,  # [F, S, H, D]
    p_source_key_scales,  # [T, H] or None
    p_source_value_scales,  # [T, H] or None
    source_scale_stride_token,
    source_scale_stride_head,
    p_key_scales,  # [F, S, H] or None
    p_value_scales,  # [F, S, H] or None
    scale_stride_frame,
    scale_stride_token,
    scale_stride_head,
    num_tokens,
    source_stride_token,
    source_stride_head,
    stride_frame,
    stride_token,
    stride_head,
    C,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_head, i_c, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    first = tl.load(p_slot_pages + (i_row * H + i_head) * C + i_c).to(tl.int64) * S
    if (i_row <= 0) | (first < 0) | (first >= tl.load(p_seq_lens + i_b)):
        return
    o_s, o_d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_unit = (o_s < S) & (o_d < D)
    o_token = tl.minimum(tl.load(p_starts + i_b).to(tl.int64) + first + o_s, num_tokens - 1)
    o_source = i_head * source_stride_head + o_token * source_stride_token + o_d
    b_keys = tl.load(p_source_keys + o_source, mask=m_unit, other=0)
    b_values = tl.load(p_source_values + o_source, mask=m_unit, other=0)
    i_frame = tl.load(p_row_frames + i_row * C + i_c).to(tl.int64)
    o_unit = i_frame * stride_frame + i_head * stride_head + o_s * stride_token + o_d
    tl.store(p_keys + o_unit, b_keys, mask=m_unit & (i_frame >= 0))
    tl.store(p_values + o_unit, b_values, mask=m_unit & (i_frame >= 0))
    if p_key_scales is not None:
        m_scales = (o_s < S) & (i_frame >= 0)
        o_source = i_head * source_scale_stride_head + o_token * source_scale_stride_token
        o_scales = i_frame * scale_stride_frame + i_head * scale_stride_head + o_s * scale_stride_token
        tl.store(p_key_scales + o_scales, tl.load(p_source_key_scales + o_source, mask=m_scales, other=0), mask=m_scales)
        tl.store(p_value_scales + o_scales, tl.load(p_source_value_scales + o_source, mask=m_scales, other=0), mask=m_scales)


@triton.jit(do_not_specialize=("num_tokens", "num_pages", "given_stride_b"))
def _fill_frames_kernel(
    p_source_keys,  # [T, H, D]
    p_source_values,  # [T, H, D]
    p_starts,  # [B]
    p_given,  # [B, P]
    p_keys,  # [F, S, H, D]
    p_values,  # [F, S, H, D]
    p_source_key_scales,  # [T, H] or None
    p_source_value_scales,  # [T, H] or None
    source_scale_stride_token,
    source_scale_stride_head,
    p_key_scales,  # [F, S, H] or None
    p_value_scales,  # [F, S, H] or None
    scale_stride_frame,
    scale_stride_token,
    scale_stride_head,
    num_tokens,
    num_pages,
    given_stride_b,
    source_stride_token,
    source_stride_head,
    stride_frame,
    stride_token,
    stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    i_b = tl.program_id(1)
    o_s, o_d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_unit = (o_s < S) & (o_d < D)
    start = tl.load(p_starts + i_b).to(tl.int64)
    for i_p in range(tl.program_id(0), num_pages, PROGRAMS):
        i_frame = tl.load(p_given + i_b * given_stride_b + i_p).to(tl.int64)
        if i_frame >= 0:
            o_token = tl.minimum(start + i_p * S + o_s, num_tokens - 1)
            for i_head in range(H):
                o_source = i_head * source_stride_head + o_token * source_stride_token + o_d
                o_unit = i_frame * stride_frame + i_head * stride_head + o_s * stride_token + o_d
                tl.store(p_keys + o_unit, tl.load(p_source_keys + o_source, mask=m_unit, other=0), mask=m_unit)
                tl.store(p_values + o_unit, tl.load(p_source_values + o_source, mask=m_unit, other=0), mask=m_unit)
            if p_key_scales is not None:  # of all kv heads
                o_h = tl.arange(0, BLOCK_H)[None, :]
                m_scales = (o_s < S) & (o_h < H)
                o_source = o_h * source_scale_stride_head + o_token * source_scale_stride_token
                o_scales = i_frame * scale_stride_frame + o_h * scale_stride_head + o_s * scale_stride_token
                tl.store(p_key_scales + o_scales, tl.load(p_source_key_scales + o_source, mask=m_scales, other=0), mask=m_scales)
                tl.store(p_value_scales + o_scales, tl.load(p_source_value_scales + o_source, mask=m_scales, other=0), mask=m_scales)
