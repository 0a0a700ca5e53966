# SPDX-License-Identifier: Apache-2.0
"""Seed: start a row anew for its first decode step."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Candidates, Tables
from sglang_freekv.kernels.select import compiled_for, heaviest, weigh_and_choose


def seed_slots(candidates: Candidates, tables: Tables) -> None:
    """As reference.seed_slots; one program for each (request, kv head)."""
    budget, (_, num_kv_heads, capacity) = candidates.budget, tables.slot_pages.shape
    _seed_slots[candidates.rows.shape[0], num_kv_heads](
        candidates.logits,
        candidates.rows,
        candidates.seq_lens,
        *tables,
        candidates.logits.shape[2],
        EXTRA=budget.selected + capacity - budget.total,
        **compiled_for(candidates, tables),
    )


@triton.jit
def _seed_slots(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    P,
    EXTRA: tl.constexpr,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    POOLING: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    A: tl.constexpr,
    P_BLOCK: tl.constexpr,
    P_FEW: tl.constexpr,
    P_MANY: tl.constexpr,
    C_BLOCK: tl.constexpr,
    A_BLOCK: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if row <= 0:
        return
    num_pages = tl.cdiv(tl.load(p_seq_lens + i_b).to(tl.int32) + 1, S)
    p_group = p_logits + (i_b * H + i_h) * G * P
    p_table = p_slot_pages + (row * H + i_h) * C
    p_list = p_attended + (row * H + i_h) * A
    if num_pages <= P_FEW:
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C, A, P_FEW, C_BLOCK, A_BLOCK)
    elif num_pages <= P_MANY:
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C, A, P_MANY, C_BLOCK, A_BLOCK)
    else:
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C, A, P_BLOCK, C_BLOCK, A_BLOCK)


@triton.jit
def _seed(
    p_group,
    p_table,
    p_list,
    num_pages,
    P,
    EXTRA: tl.constexpr,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    POOLING: tl.constexpr,
    C: tl.constexpr,
    A: tl.constexpr,
    P_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    A_BLOCK: tl.constexpr,
):
    """Seed one kv head of a row."""
    b_weight, m_chosen = weigh_and_choose(p_group, 0, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, P_BLOCK)
    o_p = tl.arange(0, P_BLOCK)
    m_required = m_chosen | ((o_p < tl.minimum(num_pages, P)) & ((o_p < SINK) | (o_p >= num_pages - WINDOW)))
    m_resident = m_required | heaviest(b_weight, tl.maximum(tl.minimum(num_pages - WINDOW, P) - SINK, 0), EXTRA)
    b_slot = tl.cumsum(m_resident.to(tl.int32), 0) - 1
    b_rank = tl.cumsum(m_required.to(tl.int32), 0) - 1
    num_resident = tl.sum(m_resident.to(tl.int32), 0)
    num_required = tl.sum(m_required.to(tl.int32), 0)

    o_c, o_a = tl.arange(0, C_BLOCK), tl.arange(0, A_BLOCK)
    tl.store(p_table + b_slot, o_p, mask=m_resident & (b_slot < C))
    tl.store(p_table + o_c, -1, mask=(o_c >= num_resident) & (o_c < C))
    tl.store(p_list + b_rank, b_slot, mask=m_required & (b_rank < A))
    tl.store(p_list + o_a, -1, mask=(o_a >= num_required) & (o_a < A))
