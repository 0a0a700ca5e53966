# SPDX-License-Identifier: Apache-2.0
"""Seed: start a row anew for its first decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Candidates, Tables
from sglang_freekv.kernels.select import EXCLUDED, heaviest, most_to_choose, sizes_of, weigh
from sglang_freekv.kernels.select_in_parts import heaviest_of_part, threshold, weigh_in_parts


def seed_slots(candidates: Candidates, tables: Tables) -> None:
    """As reference.seed_slots; one program for each (request, kv head)."""
    budget, sizes, logits = candidates.budget, sizes_of(candidates, tables), candidates.logits
    grid, num_pages = (candidates.rows.shape[0], sizes.H), logits.shape[2]
    _seed_slots[grid](
        logits,
        candidates.rows,
        candidates.seq_lens,
        candidates.frames,
        tables.slot_pages,
        tables.attended,
        tables.row_frames,
        torch.empty(*grid, num_pages, dtype=torch.int32, device=logits.device),
        num_pages,
        EXTRA=budget.selected + sizes.C - budget.total,
        SIZES=sizes,
        POOLING=candidates.pooling,
        num_warps=4 if sizes.P_BLOCK <= sizes.P_FEW else 16,
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
    p_weights,  # [B, H, P] scratch that a program's threads share
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
    i_unit = i_b * SIZES.H + i_h
    p_group, p_scratch = p_logits + i_unit * SIZES.G * P, p_weights + i_unit * P
    p_frames += i_b * P
    p_out = p_slot_pages + (row * SIZES.H + i_h) * SIZES.C, p_attended + (row * SIZES.H + i_h) * SIZES.A
    has_slots = tl.load(p_row_frames + row * SIZES.C) >= 0
    if SIZES.P_FEW == SIZES.P_BLOCK or num_pages <= SIZES.P_FEW:
        _seed_at_once(p_group, p_frames, p_out, has_slots, num_pages, P, EXTRA, SIZES, POOLING, SIZES.P_FEW)
    else:
        _seed_in_parts(p_group, p_scratch, p_frames, p_out, has_slots, num_pages, P, EXTRA, SIZES, POOLING, SIZES.P_MANY)


@triton.jit
def _seed_at_once(
    p_group,
    p_frames,
    p_out,
    has_slots,
    num_pages,
    P,
    EXTRA: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Seed one kv head of a row with at most ``P_BLOCK`` pages."""
    b_weight, free = weigh(p_group, 0, num_pages, P, SIZES, POOLING, P_BLOCK)
    m_chosen = heaviest(b_weight, free, most_to_choose(p_frames, num_pages, P, SIZES))
    o_p = tl.arange(0, P_BLOCK)
    m_required, m_resident = _required(o_p, m_chosen, p_frames, num_pages, P, SIZES)
    m_extra = heaviest(b_weight, free, EXTRA)
    m_in_slot = (m_required | m_extra) & ~m_resident & has_slots
    num_in_frames = tl.sum((m_required & m_resident).to(tl.int32), 0)
    num_in_slots, _, num_listed = _list(p_out, o_p, m_required, m_resident, m_in_slot, 0, 0, num_in_frames, SIZES)
    _end(p_out, num_in_slots, num_listed, SIZES)


@triton.jit
def _seed_in_parts(
    p_group,
    p_weights,
    p_frames,
    p_out,
    has_slots,
    num_pages,
    P,
    EXTRA: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    PART: tl.constexpr,
):
    """As ``_seed_at_once``, with any number of pages, ``PART`` at a time."""
    end = tl.minimum(num_pages - SIZES.WINDOW, P)
    weigh_in_parts(p_group, p_weights, end, P, SIZES, POOLING, PART)
    tl.debug_barrier()
    chosen = threshold(p_weights, SIZES.SINK, end, most_to_choose(p_frames, num_pages, P, SIZES), PART)
    extra = threshold(p_weights, SIZES.SINK, end, EXTRA, PART)
    num_in_frames, seen = 0, 0
    for first in range(0, tl.minimum(num_pages, P), PART):
        o_p = first + tl.arange(0, PART)
        m_chosen, seen = heaviest_of_part(_weights(p_weights, o_p, end, SIZES), chosen, seen)
        m_required, m_resident = _required(o_p, m_chosen, p_frames, num_pages, P, SIZES)
        num_in_frames += tl.sum((m_required & m_resident).to(tl.int32), 0)
    seen, seen_extra, num_in_slots, begin, num_listed = 0, 0, 0, 0, num_in_frames
    for first in range(0, tl.minimum(num_pages, P), PART):
        o_p = first + tl.arange(0, PART)
        b_weight = _weights(p_weights, o_p, end, SIZES)
        m_chosen, seen = heaviest_of_part(b_weight, chosen, seen)
        m_extra, seen_extra = heaviest_of_part(b_weight, extra, seen_extra)
        m_required, m_resident = _required(o_p, m_chosen, p_frames, num_pages, P, SIZES)
        m_in_slot = (m_required | m_extra) & ~m_resident & has_slots
        num_in_slots, begin, num_listed = _list(p_out, o_p, m_required, m_resident, m_in_slot, num_in_slots, begin, num_listed, SIZES)
    _end(p_out, num_in_slots, num_listed, SIZES)


@triton.jit
def _weights(p_weights, o_p, end, SIZES: tl.constexpr):
    """Weights of a part; those of pages that are no candidates are EXCLUDED."""
    return tl.load(p_weights + o_p, mask=(o_p >= SIZES.SINK) & (o_p < end), other=EXCLUDED)


@triton.jit
def _required(o_p, m_chosen, p_frames, num_pages, P, SIZES: tl.constexpr):
    """Masks of the pages ``o_p`` that are chosen, or of the sink or window, and of those that are resident."""
    m_page = o_p < tl.minimum(num_pages, P)
    m_fixed = m_page & ((o_p < SIZES.SINK) | (o_p >= num_pages - SIZES.WINDOW))
    return m_chosen | m_fixed, tl.load(p_frames + o_p, mask=m_page, other=-1) >= 0


@triton.jit
def _list(p_out, o_p, m_required, m_resident, m_in_slot, num_in_slots, begin, end, SIZES: tl.constexpr):
    """Give slots to pages behind ``num_in_slots``, and list those to attend to, in frames from ``begin`` and in slots from ``end`` on.

    Returns these three as they are for the next pages.
    """
    p_table, p_list = p_out
    b_slot = num_in_slots + tl.cumsum(m_in_slot.to(tl.int32), 0) - 1
    m_frame, m_listed = m_required & m_resident, m_required & m_in_slot
    b_in_frame, b_rank = begin + tl.cumsum(m_frame.to(tl.int32), 0) - 1, end + tl.cumsum(m_listed.to(tl.int32), 0) - 1
    tl.store(p_table + b_slot, o_p, mask=m_in_slot & (b_slot < SIZES.C))
    tl.store(p_list + b_in_frame, -2 - o_p, mask=m_frame & (b_in_frame < SIZES.A))
    tl.store(p_list + b_rank, b_slot, mask=m_listed & (b_rank < SIZES.A))
    num_in_slots += tl.sum(m_in_slot.to(tl.int32), 0)
    return num_in_slots, begin + tl.sum(m_frame.to(tl.int32), 0), end + tl.sum(m_listed.to(tl.int32), 0)


@triton.jit
def _end(p_out, num_in_slots, num_listed, SIZES: tl.constexpr):
    """Write -1 behind the slots given and behind what is listed."""
    p_table, p_list = p_out
    o_c, o_a = tl.arange(0, SIZES.C_BLOCK), tl.arange(0, SIZES.A_BLOCK)
    tl.store(p_table + o_c, -1, mask=(o_c >= num_in_slots) & (o_c < SIZES.C))
    tl.store(p_list + o_a, -1, mask=(o_a >= num_listed) & (o_a < SIZES.A))
