"""Plan the slots of a row: select pages by weight, keep what is resident, give what is missing a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reference import HITS, RECALLED
from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, REQUIRED, compiled_for, heaviest, weigh_and_choose


def plan_pages(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    turned: torch.Tensor,
    ahead: bool,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    misses: Misses,
    counts: torch.Tensor,
    page_size: int,
) -> None:
    """As reference.plan_pages; one program for each request and kv head.

    The units in ``misses`` are in any order; those beyond its capacity are lost, though ``misses.length`` counts them.
    """
    num_requests, num_pages = page_table.shape
    num_kv_heads = slot_pages.shape[1]
    notes = torch.empty(num_requests, num_kv_heads, num_pages + 2 * attended.shape[2], dtype=torch.int32, device=logits.device)
    _plan_pages[num_requests, num_kv_heads](
        logits,
        rows,
        seq_lens,
        page_table,
        turned,
        slot_pages,
        attended,
        notes,
        misses.length,
        misses.host_pages,
        misses.heads,
        misses.slots,
        counts,
        num_pages,
        misses.host_pages.shape[0],
        AHEAD=int(ahead),
        HITS=HITS,
        RECALLED=RECALLED,
        **compiled_for(logits, slot_pages, attended, budget, page_size),
    )


@triton.jit
def _plan_pages(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_turned,  # [B, H]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_notes,  # [B, H, P + 2 A] scratch: a mark for every candidate, one for every page of sink and window, then the missing pages
    p_length,  # [2]
    p_miss_pages,  # [M]
    p_miss_heads,  # [M]
    p_miss_slots,  # [M]
    p_counts,  # [R, 3]
    P,
    M,
    AHEAD: tl.constexpr,
    HITS: tl.constexpr,
    RECALLED: tl.constexpr,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
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
    turned = tl.load(p_turned + i_b * H + i_h).to(tl.int32)
    if (row <= 0) | (turned + AHEAD == 0):
        return
    seq_len = tl.load(p_seq_lens + i_b).to(tl.int32)
    num_pages = tl.cdiv(seq_len + AHEAD, S)
    p_group = p_logits + (i_b * H + i_h) * G * P
    p_marks = p_notes + (i_b * H + i_h) * (P + 2 * A)
    o_c, o_a = tl.arange(0, C_BLOCK), tl.arange(0, A_BLOCK)
    p_table = p_slot_pages + (row * H + i_h) * C + o_c
    b_page = tl.load(p_table, mask=o_c < C, other=-1)
    p_missing = p_marks + P + A
    num_candidates = num_pages - WINDOW - SINK
    if num_candidates <= P_FEW:
        b_mark, num_missing = _compare(
            p_group, p_marks, p_missing, b_page, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, A, P_FEW, A_BLOCK
        )
    elif num_candidates <= P_MANY:
        b_mark, num_missing = _compare(
            p_group, p_marks, p_missing, b_page, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, A, P_MANY, A_BLOCK
        )
    else:
        b_mark, num_missing = _compare(
            p_group, p_marks, p_missing, b_page, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, A, P_BLOCK, A_BLOCK
        )
    m_kept = b_mark == REQUIRED
    # ~ turns the order round: the lightest are the heaviest
    m_victim = heaviest(tl.where((o_c < C) & (b_mark != REQUIRED), ~b_mark, EXCLUDED), num_missing)
    b_incoming = tl.load(p_missing + tl.cumsum(m_victim.to(tl.int32), 0) - 1, mask=m_victim, other=-1)
    tl.store(p_table, b_incoming, mask=m_victim)

    m_used = m_kept | m_victim
    b_rank = tl.cumsum(m_used.to(tl.int32), 0) - 1
    p_list = p_attended + (row * H + i_h) * A
    tl.store(p_list + b_rank, o_c, mask=m_used & (b_rank < A))
    tl.store(p_list + o_a, -1, mask=(o_a >= tl.sum(m_used.to(tl.int32), 0)) & (o_a < A))

    m_recalled = m_victim & (b_incoming < seq_len // S)
    num_recalled = tl.sum(m_recalled.to(tl.int32), 0)
    if num_recalled > 0:
        start = tl.atomic_add(p_length, num_recalled, sem="relaxed")
        b_entry = start + tl.cumsum(m_recalled.to(tl.int32), 0) - 1
        m_entry = m_recalled & (b_entry < M)
        b_host_page = tl.load(p_page_table + i_b * P + b_incoming, mask=m_entry, other=0)
        tl.store(p_miss_pages + b_entry, b_host_page.to(tl.int32), mask=m_entry)
        tl.store(p_miss_heads + b_entry, tl.zeros_like(o_c) + i_h, mask=m_entry)
        tl.store(p_miss_slots + b_entry, (row * C).to(tl.int32) + o_c, mask=m_entry)
        tl.atomic_add(p_counts + row * 3 + RECALLED, num_recalled.to(tl.int64), sem="relaxed")
    if turned != AHEAD:
        num_chosen = tl.minimum(tl.maximum(num_pages - WINDOW - SINK, 0), SELECTED)
        tl.atomic_add(p_counts + row * 3 + HITS, (num_chosen - num_recalled).to(tl.int64), sem="relaxed")


@triton.jit
def _compare(
    p_group,
    p_marks,
    p_missing,
    b_page,
    num_pages,
    P,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    A: tl.constexpr,
    P_BLOCK: tl.constexpr,
    A_BLOCK: tl.constexpr,
):
    """``(marks, num_missing)``: of the page in each slot, REQUIRED or its weight; and how many required pages are listed as missing.

    Threads exchange what they know of pages and of slots through the marks; a barrier parts every writing from reading. Candidates
    have their marks in order, and behind them the pages that are required whatever they weigh: sink, then window.
    """
    end = tl.maximum(num_pages - WINDOW, SINK)
    o_p, o_f = SINK + tl.arange(0, P_BLOCK), tl.arange(0, A_BLOCK)
    b_fixed = tl.where(o_f < SINK, o_f, end + o_f - SINK)
    m_fixed = (o_f < SINK + WINDOW) & (b_fixed < tl.minimum(num_pages, P))
    b_weight, m_chosen = weigh_and_choose(p_group, SINK, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, P_BLOCK)
    m_p = o_p < tl.minimum(end, P)
    tl.store(p_marks + o_p, tl.where(m_chosen, REQUIRED, tl.maximum(b_weight, LIGHTEST)), mask=m_p)
    tl.store(p_marks + P + o_f, REQUIRED, mask=m_fixed)

    m_of_sink, m_of_window = b_page < SINK, b_page >= end
    o_mark = tl.where(m_of_sink, P + b_page, tl.where(m_of_window, P + SINK + b_page - end, b_page))
    m_held = (b_page >= 0) & (b_page < tl.minimum(num_pages, P))
    tl.debug_barrier()
    b_mark = tl.load(p_marks + o_mark, mask=m_held, other=LIGHTEST)
    tl.debug_barrier()
    tl.store(p_marks + o_mark, LIGHTEST, mask=b_mark == REQUIRED)
    tl.debug_barrier()
    m_lost = tl.load(p_marks + P + o_f, mask=m_fixed, other=LIGHTEST) == REQUIRED
    m_missing = tl.load(p_marks + o_p, mask=m_p, other=LIGHTEST) == REQUIRED
    lost_of_sink = tl.sum((m_lost & (o_f < SINK)).to(tl.int32), 0)
    missing = tl.sum(m_missing.to(tl.int32), 0)
    b_rank = lost_of_sink + tl.cumsum(m_missing.to(tl.int32), 0) - 1
    tl.store(p_missing + b_rank, o_p, mask=m_missing & (b_rank < A))
    b_rank = tl.cumsum(m_lost.to(tl.int32), 0) - 1 + tl.where(o_f < SINK, 0, missing)
    tl.store(p_missing + b_rank, b_fixed, mask=m_lost & (b_rank < A))
    tl.debug_barrier()
    return b_mark, tl.minimum(missing + tl.sum(m_lost.to(tl.int32), 0), A)
