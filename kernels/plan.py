"""Plan the slots of a row: select pages by weight, keep what is resident, give what is missing a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reference import HITS, RECALLED

# Weights are ordered as integers, all of them between LIGHTEST and REQUIRED; EXCLUDED takes no part in a choice.
_EXCLUDED = tl.constexpr(-(2**31))
_LIGHTEST = tl.constexpr(-(2**31) + 1)
_REQUIRED = tl.constexpr(2**31 - 1)
_FAINT = tl.constexpr(-3.0e38)

BLOCKS = (1024, 4096)  # a context of no more candidates takes a shorter way through the kernel than the longest that can be


def seed_slots(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: PageBudget,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    page_size: int,
) -> None:
    """As reference.seed_slots; one program for each request and kv head."""
    num_pages = logits.shape[2]
    _seed_slots[rows.shape[0], slot_pages.shape[1]](
        logits,
        rows,
        seq_lens,
        slot_pages,
        attended,
        num_pages,
        EXTRA=budget.selected + slot_pages.shape[2] - budget.total,
        **_shape(logits, slot_pages, attended, budget, page_size),
    )


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
        **_shape(logits, slot_pages, attended, budget, page_size),
    )


def _shape(logits: torch.Tensor, slot_pages: torch.Tensor, attended: torch.Tensor, budget: PageBudget, page_size: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    block = triton.next_power_of_2(logits.shape[2])
    group = logits.shape[1] // slot_pages.shape[1]
    return {
        "SINK": budget.sink,
        "SELECTED": budget.selected,
        "WINDOW": budget.window,
        "H": slot_pages.shape[1],
        "G": group,
        "G_BLOCK": triton.next_power_of_2(group),
        "S": page_size,
        "C": slot_pages.shape[2],
        "A": attended.shape[2],
        "P_BLOCK": block,
        "P_FEW": min(block, BLOCKS[0]),
        "P_MANY": min(block, BLOCKS[1]),
        "C_BLOCK": triton.next_power_of_2(slot_pages.shape[2]),
        "A_BLOCK": triton.next_power_of_2(attended.shape[2]),
        "num_warps": 4 if block <= 1024 else 8 if block <= 8192 else 16 if block <= 16384 else 32,
        "maxnreg": 64 if block > 16384 else None,  # all there are for 32 warps; the compiler left to itself takes fewer
    }


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
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, C, A, P_FEW, C_BLOCK, A_BLOCK)
    elif num_pages <= P_MANY:
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, C, A, P_MANY, C_BLOCK, A_BLOCK)
    else:
        _seed(p_group, p_table, p_list, num_pages, P, EXTRA, SINK, SELECTED, WINDOW, G, G_BLOCK, C, A, P_BLOCK, C_BLOCK, A_BLOCK)


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
    C: tl.constexpr,
    A: tl.constexpr,
    P_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    A_BLOCK: tl.constexpr,
):
    """The row of one kv head."""
    b_weight, m_chosen = _select_pages(p_group, 0, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, P_BLOCK)
    o_p = tl.arange(0, P_BLOCK)
    m_required = m_chosen | ((o_p < tl.minimum(num_pages, P)) & ((o_p < SINK) | (o_p >= num_pages - WINDOW)))
    m_resident = m_required | _heaviest(b_weight, EXTRA)
    b_slot = tl.cumsum(m_resident.to(tl.int32), 0) - 1
    b_rank = tl.cumsum(m_required.to(tl.int32), 0) - 1
    num_resident = tl.sum(m_resident.to(tl.int32), 0)
    num_required = tl.sum(m_required.to(tl.int32), 0)

    o_c, o_a = tl.arange(0, C_BLOCK), tl.arange(0, A_BLOCK)
    tl.store(p_table + b_slot, o_p, mask=m_resident & (b_slot < C))
    tl.store(p_table + o_c, -1, mask=(o_c >= num_resident) & (o_c < C))
    tl.store(p_list + b_rank, b_slot, mask=m_required & (b_rank < A))
    tl.store(p_list + o_a, -1, mask=(o_a >= num_required) & (o_a < A))


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
    m_kept = b_mark == _REQUIRED
    # ~ turns the order round: the lightest are the heaviest
    m_victim = _heaviest(tl.where((o_c < C) & (b_mark != _REQUIRED), ~b_mark, _EXCLUDED), num_missing)
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
    b_weight, m_chosen = _select_pages(p_group, SINK, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, P_BLOCK)
    m_p = o_p < tl.minimum(end, P)
    tl.store(p_marks + o_p, tl.where(m_chosen, _REQUIRED, tl.maximum(b_weight, _LIGHTEST)), mask=m_p)
    tl.store(p_marks + P + o_f, _REQUIRED, mask=m_fixed)

    m_of_sink, m_of_window = b_page < SINK, b_page >= end
    o_mark = tl.where(m_of_sink, P + b_page, tl.where(m_of_window, P + SINK + b_page - end, b_page))
    m_held = (b_page >= 0) & (b_page < tl.minimum(num_pages, P))
    tl.debug_barrier()
    b_mark = tl.load(p_marks + o_mark, mask=m_held, other=_LIGHTEST)
    tl.debug_barrier()
    tl.store(p_marks + o_mark, _LIGHTEST, mask=b_mark == _REQUIRED)
    tl.debug_barrier()
    m_lost = tl.load(p_marks + P + o_f, mask=m_fixed, other=_LIGHTEST) == _REQUIRED
    m_missing = tl.load(p_marks + o_p, mask=m_p, other=_LIGHTEST) == _REQUIRED
    lost_of_sink = tl.sum((m_lost & (o_f < SINK)).to(tl.int32), 0)
    missing = tl.sum(m_missing.to(tl.int32), 0)
    b_rank = lost_of_sink + tl.cumsum(m_missing.to(tl.int32), 0) - 1
    tl.store(p_missing + b_rank, o_p, mask=m_missing & (b_rank < A))
    b_rank = tl.cumsum(m_lost.to(tl.int32), 0) - 1 + tl.where(o_f < SINK, 0, missing)
    tl.store(p_missing + b_rank, b_fixed, mask=m_lost & (b_rank < A))
    tl.debug_barrier()
    return b_mark, tl.minimum(missing + tl.sum(m_lost.to(tl.int32), 0), A)


@triton.jit
def _select_pages(
    p_logits,  # [G, P]
    first,
    num_pages,
    P,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Weights of reference.select_pages for the pages from ``first`` on, as integers and without the share 1 / G that all have; and
    which are chosen."""
    o_p = first + tl.arange(0, P_BLOCK)
    m_candidate = (o_p >= SINK) & (o_p < tl.minimum(num_pages - WINDOW, P))
    if G_BLOCK * P_BLOCK <= 16384:  # the whole group at once
        o_g = tl.arange(0, G_BLOCK)[:, None]
        b_logits = tl.load(p_logits + o_g * P + o_p[None, :], mask=(o_g < G) & m_candidate[None, :], other=float("-inf"))
        b_logits -= tl.max(b_logits, 1)[:, None]
        b_logits -= tl.log(tl.sum(tl.exp(b_logits), 1))[:, None]
        b_logits = tl.where(o_g < G, tl.maximum(b_logits, _FAINT), _FAINT)  # NaN becomes faint too: from here all is finite
        b_top = tl.max(b_logits, 0)
        b_sum = tl.sum(tl.exp(b_logits - b_top[None, :]), 0)
    else:
        b_top, b_sum = tl.full([P_BLOCK], _FAINT, tl.float32), tl.zeros([P_BLOCK], tl.float32)
        b_next = tl.load(p_logits + o_p, mask=m_candidate, other=float("-inf"))
        for g in range(1, G + 1):
            b_logit = b_next
            b_next = tl.load(p_logits + g * P + o_p, mask=m_candidate & (g < G), other=float("-inf"))  # in flight meanwhile
            b_logit -= tl.max(b_logit, 0)
            b_logit -= tl.log(tl.sum(tl.exp(b_logit), 0))
            b_logit = tl.maximum(b_logit, _FAINT)  # and here
            b_less = tl.exp(tl.minimum(b_logit, b_top) - tl.maximum(b_logit, b_top))
            b_sum = tl.where(b_logit > b_top, b_sum * b_less + 1, b_sum + b_less)
            b_top = tl.maximum(b_logit, b_top)
    b_weight = b_top + tl.log(b_sum)
    b_bits = b_weight.to(tl.int32, bitcast=True)
    b_order = tl.where(m_candidate, b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), _EXCLUDED)
    return b_order, _heaviest(b_order, SELECTED)


@triton.jit
def _heaviest(b_weight, num):
    """The ``num`` greatest of the integers that are not EXCLUDED, or all of them; of equal ones the first."""
    m_free = b_weight != _EXCLUDED
    num_above = tl.sum(m_free.to(tl.int32), 0)
    num = tl.minimum(num_above, num)
    # num_above are at or above low, num at least; fewer than num are at or above high
    high = tl.max(b_weight, 0) + 1
    low = tl.where(num > 0, tl.min(tl.where(m_free, b_weight, _REQUIRED), 0), high)
    num_above = tl.where(num > 0, num_above, 0)
    while (num_above > num) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((b_weight >= middle).to(tl.int32), 0)
        num_above = tl.where(count >= num, count, num_above)
        high = tl.where(count >= num, high, middle)
        low = tl.where(count >= num, middle, low)
    m_chosen = b_weight >= low
    if num_above > num:
        b_equal = (b_weight == low).to(tl.int32)
        fitting = num - num_above + tl.sum(b_equal, 0)
        m_chosen = m_chosen & ((b_equal == 0) | (tl.cumsum(b_equal, 0) <= fitting))
    return m_chosen
