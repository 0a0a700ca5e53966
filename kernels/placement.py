# SPDX-License-Identifier: Apache-2.0
"""Placement, inside a plan: the pages that one kv head wants, those of them that are on the device, and slots for the others.

The notes are scratch of one kv head, ``[P + 2 A]``: weights of candidates, chosen pages, missing pages. The threads of a program share
them, so a barrier stands between writing and reading.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, heaviest, ordered, unordered, weigh


@triton.jit
def choose(p_group, p_scratch, p_tables, num_pages, P, most, SIZES: tl.constexpr, POOLING: tl.constexpr, HYSTERESIS: tl.constexpr):
    """Note the chosen candidates, ``most`` at most, and return how many they are."""
    num_candidates = num_pages - SIZES.WINDOW - SIZES.SINK
    if num_candidates <= SIZES.P_FEW:
        _choose_among(p_group, p_scratch, p_tables, num_pages, P, most, SIZES, POOLING, HYSTERESIS, SIZES.P_FEW)
    elif num_candidates <= SIZES.P_MANY:
        _choose_among(p_group, p_scratch, p_tables, num_pages, P, most, SIZES, POOLING, HYSTERESIS, SIZES.P_MANY)
    else:
        _choose_among(p_group, p_scratch, p_tables, num_pages, P, most, SIZES, POOLING, HYSTERESIS, SIZES.P_BLOCK)
    return tl.minimum(tl.maximum(num_candidates, 0), most)


@triton.jit
def _choose_among(
    p_group,
    p_scratch,
    p_tables,
    num_pages,
    P,
    most,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    HYSTERESIS: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Note the chosen candidates in ascending order, and the weights of all candidates."""
    o_p = SIZES.SINK + tl.arange(0, P_BLOCK)
    b_weight, free = weigh(p_group, SIZES.SINK, num_pages, P, SIZES, POOLING, P_BLOCK)
    m_candidate = b_weight != EXCLUDED
    tl.store(p_scratch + o_p, b_weight, mask=m_candidate)
    if HYSTERESIS > 0:
        tl.debug_barrier()
        _favour_last(p_scratch, p_tables, SIZES.SINK + free, SIZES, HYSTERESIS)
        tl.debug_barrier()
        b_weight = tl.load(p_scratch + o_p, mask=m_candidate, other=EXCLUDED)
    m_chosen = heaviest(b_weight, free, most)
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_scratch + P + b_rank, o_p, mask=m_chosen)


@triton.jit
def _favour_last(p_weights, p_tables, end, SIZES: tl.constexpr, HYSTERESIS: tl.constexpr):
    """Add to the weights of those pages of the last selection that are candidates, which all lie before ``end``."""
    p_table, p_list, _ = p_tables
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_entry = tl.load(p_list + o_a, mask=o_a < SIZES.A, other=-1)
    b_page = tl.where(b_entry < -1, -2 - b_entry, tl.load(p_table + b_entry, mask=b_entry >= 0, other=-1))
    m_candidate = (b_page >= SIZES.SINK) & (b_page < end)
    b_weight = unordered(tl.load(p_weights + b_page, mask=m_candidate, other=0)) + HYSTERESIS
    tl.debug_barrier()  # several threads may have the same entry, and one of them writes
    tl.store(p_weights + b_page, ordered(b_weight.to(tl.float32)), mask=m_candidate)


@triton.jit
def choose_held(p_chosen, p_reads, num_pages, A_PART: tl.constexpr, SIZES: tl.constexpr):
    """Note, in ascending order, the pages between sink and window that ``_read_held`` has read, and return how many they are.

    The context has more than A pages, so it has read the budget.
    """
    _, p_pages, _ = p_reads
    tl.debug_barrier()
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
    o_a, num_chosen = tl.arange(0, SIZES.BUDGET_BLOCK), 0
    b_other = tl.load(p_pages + o_a, mask=o_a < SIZES.BUDGET, other=-1)
    b_other = tl.where((b_other >= SIZES.SINK) & (b_other < first_of_window), b_other, 2**30)
    for first in range(0, SIZES.BUDGET, A_PART):
        o_q = first + tl.arange(0, A_PART)
        b_page = tl.load(p_pages + o_q, mask=o_q < SIZES.BUDGET, other=-1)
        m_chosen = (b_page >= SIZES.SINK) & (b_page < first_of_window)
        b_rank = tl.sum((b_other[None, :] < b_page[:, None]).to(tl.int32), 1)
        tl.store(p_chosen + b_rank, b_page, mask=m_chosen)
        num_chosen += tl.sum(m_chosen.to(tl.int32), 0)
    return num_chosen


@triton.jit
def required(num_chosen, SIZES: tl.constexpr):
    """Sink, chosen pages and window, of which a short context has fewer."""
    number = SIZES.A
    if SIZES.A > SIZES.BUDGET:
        number = SIZES.SINK + num_chosen + SIZES.WINDOW
    return number


@triton.jit
def diff(p_scratch, p_lists, b_page, num_chosen, num_pages, begun, P, A_PART: tl.constexpr, SIZES: tl.constexpr):
    """Compare the required pages, in order, with the frames and with the slots: list resident pages, and note the missing ones.

    A page from ``begun`` on is not full: the host has none of it. Returns a mask of the slots whose page is required, how many pages are
    resident, how many are missing, and how many of those are to be recalled.
    """
    p_chosen, p_missing = p_scratch + P, p_scratch + P + SIZES.A
    p_list, p_frames, now_reads = p_lists
    tl.debug_barrier()
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
    m_kept = tl.arange(0, SIZES.C_BLOCK) < 0
    num_resident, num_missing, num_recalled = 0, 0, 0
    for first in range(0, required(num_chosen, SIZES), A_PART):
        o_q = first + tl.arange(0, A_PART)
        m_chosen = (o_q >= SIZES.SINK) & (o_q < SIZES.SINK + num_chosen)
        b_wanted = tl.load(p_chosen + o_q - SIZES.SINK, mask=m_chosen, other=0)
        b_fixed = tl.where(o_q < SIZES.SINK, o_q, first_of_window + o_q - SIZES.SINK - num_chosen)
        b_wanted = tl.where(m_chosen, b_wanted, b_fixed)
        m_wanted = (o_q < SIZES.A) & (b_wanted < tl.minimum(num_pages, P))
        b_frame = tl.load(p_frames + b_wanted, mask=m_wanted, other=-1)
        m_resident = b_frame >= 0
        b_rank = num_resident + tl.cumsum(m_resident.to(tl.int32), 0) - 1
        tl.store(p_list + b_rank, -2 - b_wanted, mask=m_resident)
        _note_reads(now_reads, b_rank, b_frame, b_wanted, m_resident)
        m_absent = m_wanted & (b_frame < 0)
        m_same = (b_wanted[:, None] == b_page[None, :]) & m_absent[:, None]
        m_kept = m_kept | (tl.max(m_same.to(tl.int32), 0) > 0)
        m_missing = m_absent & (tl.max(m_same.to(tl.int32), 1) == 0)
        tl.store(p_missing + num_missing + tl.cumsum(m_missing.to(tl.int32), 0) - 1, b_wanted, mask=m_missing)
        both = tl.sum(m_missing.to(tl.int32) + ((m_missing & (b_wanted < begun)).to(tl.int32) << 16), 0)
        num_missing += both & 0xFFFF
        num_recalled += both >> 16
        num_resident += tl.sum(m_resident.to(tl.int32), 0)
    return m_kept, num_resident, num_missing, num_recalled


@triton.jit
def evict(p_weights, b_page, m_kept, num_missing, num_pages, P, SIZES: tl.constexpr):
    """Find slots for the missing pages: empty ones first, then those of the lightest pages.

    Returns a mask of these slots, the number of the missing page that each one gets, the place of each slot among those to attend to, and
    how many are kept.
    """
    o_c = tl.arange(0, SIZES.C_BLOCK)
    m_free = (o_c < SIZES.C) & ~m_kept
    num_free = tl.sum(m_free.to(tl.int32), 0)
    if num_missing < num_free:  # else no weight decides
        first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
        m_ranked = m_free & (b_page >= SIZES.SINK) & (b_page < tl.minimum(first_of_window, P))
        b_weight = tl.load(p_weights + b_page, mask=m_ranked, other=LIGHTEST)
        # ~ reverses the order of integers: the lightest become the heaviest
        m_free = heaviest(tl.where(m_free, ~b_weight, EXCLUDED), num_free, num_missing)
    b_ranks = tl.cumsum(m_kept.to(tl.int32) + (m_free.to(tl.int32) << 16), 0)
    b_order, num_kept = (b_ranks >> 16) - 1, tl.sum(m_kept.to(tl.int32), 0)
    b_rank = tl.where(m_kept, (b_ranks & 0xFFFF) - 1, num_kept + b_order)
    return m_free & (b_order < num_missing), b_order, b_rank, num_kept


@triton.jit
def list_misses(misses, count, b_order, b_page, head, b_frame, mask):
    """Add ``count`` units to the end of a list: those of ``mask``, in their order."""
    p_length, p_pages, p_heads, p_into, M = misses
    b_entry = tl.atomic_add(p_length, count, sem="relaxed") + b_order
    mask = mask & (b_entry < M)
    tl.store(p_pages + b_entry, b_page, mask=mask)
    tl.store(p_heads + b_entry, tl.zeros_like(b_frame) + head, mask=mask)
    tl.store(p_into + b_entry, b_frame, mask=mask)


@triton.jit
def _note_reads(now_reads, b_rank, b_frame, b_page, mask):
    """A kv head that recalls for this step reads these frames."""
    p_reads, now = now_reads
    if p_reads is not None:
        p_frames, p_pages, _ = p_reads
        tl.store(p_frames + b_rank, b_frame, mask=mask & (now != 0))
        tl.store(p_pages + b_rank, b_page, mask=mask & (now != 0))


@triton.jit
def publish(p_list, now_reads, b_rank, m_required, b_frame, b_page, num_listed, num_present, SIZES: tl.constexpr):
    """Write which slots to attend to behind the resident pages, kept ones first; ``num_listed`` pages in all."""
    o_c, o_a = tl.arange(0, SIZES.C_BLOCK), tl.arange(0, SIZES.A_BLOCK)
    m_listed, m_none = m_required & (b_rank < SIZES.A), (o_a >= num_listed) & (o_a < SIZES.A)
    tl.store(p_list + b_rank, o_c, mask=m_listed)
    tl.store(p_list + o_a, -1, mask=m_none)
    _note_reads(now_reads, b_rank, b_frame, b_page, m_listed)
    p_reads, now = now_reads
    if p_reads is not None:
        p_frames, _, p_present = p_reads
        if now != 0:
            tl.store(p_present, num_present)
            tl.store(p_frames + o_a, -1, mask=m_none)
