# SPDX-License-Identifier: Apache-2.0
"""Seed: start a row anew for its first decode step."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Candidates, Tables
from sglang_freekv.kernels.select import heaviest, launch_of, most_to_choose, sizes_of, weigh


def seed_slots(candidates: Candidates, tables: Tables) -> None:
    """As reference.seed_slots; one program for each (request, kv head)."""
    budget, sizes = candidates.budget, sizes_of(candidates, tables)
    _seed_slots[candidates.rows.shape[0], sizes.H](
        candidates.logits,
        candidates.rows,
        candidates.seq_lens,
        candidates.frames,
        tables.slot_pages,
        tables.attended,
        tables.row_frames,
        candidates.logits.shape[2],
        EXTRA=budget.selected + sizes.C - budget.total,
        SIZES=sizes,
        POOLING=candidates.pooling,
        **launch_of(sizes),
    )


@triton.jit
def _seed_slots(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_frames,  # [B, P]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_row_frames,  # [R, C]
    P,
    EXTRA: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if row <= 0:
        return
    num_pages = tl.cdiv(tl.load(p_seq_lens + i_b).to(tl.int32) + 1, SIZES.S)
    p_group = p_logits + (i_b * SIZES.H + i_h) * SIZES.G * P
    p_frames += i_b * P
    p_table = p_slot_pages + (row * SIZES.H + i_h) * SIZES.C
    p_list = p_attended + (row * SIZES.H + i_h) * SIZES.A
    has_slots = tl.load(p_row_frames + row * SIZES.C) >= 0
    if SIZES.P_FEW == SIZES.P_BLOCK or num_pages <= SIZES.P_FEW:  # equal sizes are compiled once
        _seed(p_group, p_frames, p_table, p_list, has_slots, num_pages, P, EXTRA, SIZES, POOLING, SIZES.P_FEW)
    elif SIZES.P_MANY < SIZES.P_BLOCK and num_pages <= SIZES.P_MANY:
        _seed(p_group, p_frames, p_table, p_list, has_slots, num_pages, P, EXTRA, SIZES, POOLING, SIZES.P_MANY)
    else:
        _seed(p_group, p_frames, p_table, p_list, has_slots, num_pages, P, EXTRA, SIZES, POOLING, SIZES.P_BLOCK)


@triton.jit
def _seed(
    p_group,
    p_frames,
    p_table,
    p_list,
    has_slots,
    num_pages,
    P,
    EXTRA: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Seed one kv head of a row."""
    b_weight, free = weigh(p_group, 0, num_pages, P, SIZES, POOLING, P_BLOCK)
    m_chosen = heaviest(b_weight, free, most_to_choose(p_frames, num_pages, P, SIZES))
    o_p = tl.arange(0, P_BLOCK)
    m_fixed = (o_p < tl.minimum(num_pages, P)) & ((o_p < SIZES.SINK) | (o_p >= num_pages - SIZES.WINDOW))
    m_required = m_chosen | m_fixed
    m_resident = tl.load(p_frames + o_p, mask=o_p < tl.minimum(num_pages, P), other=-1) >= 0
    m_extra = heaviest(b_weight, free, EXTRA)
    m_in_slot = (m_required | m_extra) & ~m_resident & has_slots
    b_slot = tl.cumsum(m_in_slot.to(tl.int32), 0) - 1
    b_in_frame = tl.cumsum((m_required & m_resident).to(tl.int32), 0) - 1
    num_in_frames = tl.sum((m_required & m_resident).to(tl.int32), 0)
    b_rank = num_in_frames + tl.cumsum((m_required & m_in_slot).to(tl.int32), 0) - 1
    num_in_slots = tl.sum(m_in_slot.to(tl.int32), 0)
    num_listed = tl.sum((m_required & (m_resident | m_in_slot)).to(tl.int32), 0)

    o_c, o_a = tl.arange(0, SIZES.C_BLOCK), tl.arange(0, SIZES.A_BLOCK)
    tl.store(p_table + b_slot, o_p, mask=m_in_slot & (b_slot < SIZES.C))
    tl.store(p_table + o_c, -1, mask=(o_c >= num_in_slots) & (o_c < SIZES.C))
    tl.store(p_list + b_in_frame, -2 - o_p, mask=m_required & m_resident & (b_in_frame < SIZES.A))
    tl.store(p_list + b_rank, b_slot, mask=m_required & m_in_slot & (b_rank < SIZES.A))
    tl.store(p_list + o_a, -1, mask=(o_a >= num_listed) & (o_a < SIZES.A))
