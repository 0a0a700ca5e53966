# SPDX-License-Identifier: Apache-2.0
"""Append: write the new token of every request into the frame of its current page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.codes import store_vectors
from sglang_freekv.kernels.kv import Scales


def append_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    frames: torch.Tensor,
    tables: Tables,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Scales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.append_tokens. Both results are int32; a padding request has 0 and -1 in them."""
    batch, num_heads, head_dim = new_keys.shape
    page_size, capacity = keys.shape[1], tables.slot_pages.shape[2]
    assert new_keys.stride(2) == new_values.stride(2) == keys.stride(3) == 1 and keys.stride() == values.stride()
    assert tables.slot_pages.is_contiguous() and page_table.stride() == frames.stride()
    assert scales is None or scales.keys.stride() == scales.values.stride()
    starts = torch.empty((batch, num_heads), dtype=torch.int32, device=rows.device)
    filled = torch.empty(batch, dtype=torch.int32, device=rows.device)
    _append_kernel[(batch, num_heads)](
        new_keys,
        new_values,
        rows,
        seq_lens,
        page_table,
        frames,
        tables.slot_pages,
        tables.row_frames,
        keys,
        values,
        *(scales or (None, None)),
        starts,
        filled,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        page_table.stride(0),
        *keys.stride()[:3],
        *((None,) * 3 if scales is None else scales.keys.stride()),
        capacity,
        H=num_heads,
        S=page_size,
        D=head_dim,
        BLOCK_C=triton.next_power_of_2(capacity),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return starts, filled


@triton.jit
def _append_kernel(
    p_new_keys,  # [B, H, D]
    p_new_values,  # [B, H, D]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_frames,  # [B, P]
    p_slot_pages,  # [R, H, C]
    p_row_frames,  # [R, C]
    p_keys,  # [F, S, H, D]
    p_values,  # [F, S, H, D]
    p_key_scales,  # [F, S, H]
    p_value_scales,  # [F, S, H]
    p_starts,  # [B, H]
    p_filled,  # [B]
    keys_stride_b,
    keys_stride_head,
    values_stride_b,
    values_stride_head,
    table_stride_b,
    stride_frame,
    stride_token,
    stride_head,
    scale_stride_frame,
    scale_stride_token,
    scale_stride_head,
    C,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_b, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    last = tl.load(p_seq_lens + i_b).to(tl.int64) - 1
    m_real = i_row > 0
    i_page, i_offset = last // S, last % S

    o_c, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    b_pages = tl.load(p_slot_pages + (i_row * H + i_head) * C + o_c, mask=m_real & (o_c < C), other=-1)
    position = tl.min(tl.where(b_pages == i_page, o_c, BLOCK_C), axis=0)
    i_frame = tl.load(p_frames + i_b * table_stride_b + i_page, mask=m_real, other=0).to(tl.int64)
    if i_frame < 0:
        i_frame = tl.load(p_row_frames + i_row * C + tl.where(position < C, position, 0)).to(tl.int64)
    m_real = m_real & (i_frame >= 0)

    m_d = m_real & (o_d < D)
    o_token = i_frame * stride_frame + i_offset * stride_token + i_head * stride_head + o_d
    b_keys = tl.load(p_new_keys + i_b * keys_stride_b + i_head * keys_stride_head + o_d, mask=m_d, other=0)
    b_values = tl.load(p_new_values + i_b * values_stride_b + i_head * values_stride_head + o_d, mask=m_d, other=0)
    o_scale = 0
    if p_key_scales is not None:
        o_scale = i_frame * scale_stride_frame + i_offset * scale_stride_token + i_head * scale_stride_head + tl.arange(0, 1)
    store_vectors(p_keys, p_key_scales, b_keys, o_token, o_scale, m_d, m_real)
    store_vectors(p_values, p_value_scales, b_values, o_token, o_scale, m_d, m_real)
    tl.store(p_starts + i_b * H + i_head, tl.where(m_real, i_frame * S, 0))
    m_filled = m_real & (i_offset == S - 1)
    host_page = tl.load(p_page_table + i_b * table_stride_b + i_page, mask=m_filled, other=-1)
    tl.store(p_filled + i_b, host_page, mask=i_head == 0)
