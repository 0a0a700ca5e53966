# SPDX-License-Identifier: Apache-2.0
"""Placement, inside a plan: the pages that one kv head wants, those of them that are on the device, and slots for the others.

The notes are scratch of one kv head, ``[2 P + 2 A]``: weights of candidates, marks of pages, chosen pages, missing pages. The threads of a
program share them, so a barrier stands between writing and reading. No part is compared with another: a page is looked up by its mark.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, heaviest, most_finds, ordered, unordered, weigh
from sglang_freekv.kernels.select_in_parts import heaviest_of_part, threshold, weigh_in_parts


@triton.jit
def choose(p_group, p_scratch, p_tables, p_held, p_finds, sizes, SIZES: tl.constexpr, POOLING: tl.constexpr, HYSTERESIS: tl.constexpr):
    """Note the chosen candidates, at most ``most`` or those that are held, and mark every candidate: 1 if it is chosen, else 0.

    ``sizes`` are the pages of the context, those of the longest one, most, and whether ``p_held [A]`` decides. Chosen pages are noted in
    ascending order. Returns how many are chosen.
    """
    num_pages, P, _, _ = sizes
    num_candidates, num_chosen = tl.minimum(num_pages - SIZES.WINDOW, P) - SIZES.SINK, 0
    if SIZES.P_BLOCK <= SIZES.P_FEW or num_candidates <= SIZES.P_FEW:
        num_chosen = _choose_among(p_group, p_scratch, p_tables, p_held, sizes, SIZES, POOLING, HYSTERESIS, SIZES.P_FEW)
    elif SIZES.P_BLOCK <= SIZES.P_MANY or num_candidates <= SIZES.P_MANY:
        num_chosen = _choose_among(p_group, p_scratch, p_tables, p_held, sizes, SIZES, POOLING, HYSTERESIS, SIZES.P_MANY)
    else:
        num_chosen = _choose_among_finds(p_scratch, p_held, p_finds, num_candidates, sizes, SIZES, SIZES.P_MANY)
    return num_chosen


@triton.jit
def _choose_among(
    p_group,
    p_scratch,
    p_tables,
    p_held,
    sizes,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    HYSTERESIS: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """As ``choose``, with at most ``P_BLOCK`` candidates, whose weights then are in registers."""
    num_pages, P, most, held = sizes
    p_marks, o_p = p_scratch + P, SIZES.SINK + tl.arange(0, P_BLOCK)
    end = tl.maximum(tl.minimum(num_pages - SIZES.WINDOW, P), SIZES.SINK)
    m_candidate, free = o_p < end, end - SIZES.SINK
    if P_BLOCK == SIZES.P_FEW:
        b_weight, _ = weigh(p_group, SIZES.SINK, num_pages, P, SIZES, POOLING, P_BLOCK)
        tl.store(p_scratch + o_p, b_weight, mask=m_candidate)
    else:
        weigh_in_parts(p_group, p_scratch, end, P, SIZES, POOLING, P_BLOCK)
    if (HYSTERESIS > 0) | (P_BLOCK > SIZES.P_FEW):
        tl.debug_barrier()
        if HYSTERESIS > 0:
            favour_last(p_scratch, p_tables, SIZES.SINK, end, SIZES, HYSTERESIS)
            tl.debug_barrier()
        b_weight = tl.load(p_scratch + o_p, mask=m_candidate, other=EXCLUDED)
    m_chosen, num_chosen = heaviest(b_weight, free, most), tl.minimum(free, most)
    if p_held is not None:
        if held:
            tl.store(p_marks + o_p, 0, mask=m_candidate)
            tl.debug_barrier()
            _mark_held(p_marks, p_held, end, SIZES)
            tl.debug_barrier()
            m_chosen = tl.load(p_marks + o_p, mask=m_candidate, other=0) > 0
            num_chosen = tl.sum(m_chosen.to(tl.int32), 0)
    tl.store(p_marks + o_p, m_chosen.to(tl.int32), mask=m_candidate)
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_marks + P + b_rank, o_p, mask=m_chosen)
    return num_chosen


@triton.jit
def _choose_among_finds(p_scratch, p_held, p_finds, num_candidates, sizes, SIZES: tl.constexpr, PART: tl.constexpr):
    """As ``choose``, with candidates that are preselected: weights are noted, marks are 0, and each part has found as many as may be chosen."""
    _, P, most, held = sizes
    p_weights = p_finds + most_finds(P, SIZES)
    p_marks, by_mark, num_chosen = p_scratch + P, False, 0
    if p_held is not None:
        by_mark = held
        if held:
            end = SIZES.SINK + num_candidates
            tl.debug_barrier()
            _mark_held(p_marks, p_held, end, SIZES)
            tl.debug_barrier()
            for first in range(SIZES.SINK, end, PART):
                o_p = first + tl.arange(0, PART)
                m_held = tl.load(p_marks + o_p, mask=o_p < end, other=0) > 0
                tl.store(p_marks + P + num_chosen + tl.cumsum(m_held.to(tl.int32), 0) - 1, o_p, mask=m_held)
                num_chosen += tl.sum(m_held.to(tl.int32), 0)
    if not by_mark:
        of_part, num_equal = tl.minimum(most, PART), 0
        num_finds = num_candidates // PART * of_part + tl.minimum(num_candidates % PART, of_part)
        found = threshold(p_weights, 0, num_finds, most, PART)
        for first in range(0, num_finds, PART):
            o_f = first + tl.arange(0, PART)
            b_weight = tl.load(p_weights + o_f, mask=o_f < num_finds, other=EXCLUDED)
            m_chosen, num_equal = heaviest_of_part(b_weight, found, num_equal)
            b_page = tl.load(p_finds + o_f, mask=m_chosen, other=0)
            tl.store(p_marks + b_page, 1, mask=m_chosen)
            tl.store(p_marks + P + num_chosen + tl.cumsum(m_chosen.to(tl.int32), 0) - 1, b_page, mask=m_chosen)
            num_chosen += tl.sum(m_chosen.to(tl.int32), 0)
    return num_chosen


@triton.jit
def _mark_held(p_marks, p_held, end, SIZES: tl.constexpr):
    """Mark those pages that ``_read_held`` has read and that are candidates, which all lie before ``end``."""
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_page = tl.load(p_held + o_a, mask=o_a < SIZES.A, other=-1)
    tl.store(p_marks + b_page, 1, mask=(b_page >= SIZES.SINK) & (b_page < end))


@triton.jit
def favour_last(p_weights, p_tables, begin, end, SIZES: tl.constexpr, HYSTERESIS: tl.constexpr):
    """Add to the weights of those candidates from ``begin`` to ``end`` that are of the last selection."""
    p_table, p_list, _ = p_tables
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_entry = tl.load(p_list + o_a, mask=o_a < SIZES.A, other=-1)
    b_page = tl.where(b_entry < -1, -2 - b_entry, tl.load(p_table + b_entry, mask=b_entry >= 0, other=-1))
    m_candidate = (b_page >= begin) & (b_page < end)
    b_weight = unordered(tl.load(p_weights + b_page, mask=m_candidate, other=0)) + HYSTERESIS
    tl.debug_barrier()  # several threads may have the same entry, and one of them writes
    tl.store(p_weights + b_page, ordered(b_weight.to(tl.float32)), mask=m_candidate)


@triton.jit
def required(num_chosen, SIZES: tl.constexpr):
    """Sink, chosen pages and window, of which a short context has fewer."""
    number = SIZES.A
    if SIZES.A > SIZES.BUDGET:
        number = SIZES.SINK + num_chosen + SIZES.WINDOW
    return number


@triton.jit
def mark_fixed(p_marks, num_pages, P, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """Mark sink and window."""
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
    for first in range(0, SIZES.SINK + SIZES.WINDOW, BLOCK):
        o_f = first + tl.arange(0, BLOCK)
        b_page = tl.where(o_f < SIZES.SINK, o_f, first_of_window + o_f - SIZES.SINK)
        tl.store(p_marks + b_page, 1, mask=(o_f < SIZES.SINK + SIZES.WINDOW) & (b_page < tl.minimum(num_pages, P)))


@triton.jit
def keep(p_scratch, p_frames, b_page, num_pages, P, SIZES: tl.constexpr):
    """Mask of the slots whose page is required and absent; its mark becomes 2. And the weight of each slot's page."""
    tl.debug_barrier()
    m_page = (b_page >= 0) & (b_page < tl.minimum(num_pages, P))
    m_candidate = m_page & (b_page >= SIZES.SINK) & (b_page < tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK))
    b_weight = tl.load(p_scratch + b_page, mask=m_candidate, other=LIGHTEST)
    b_mark = tl.load(p_scratch + P + b_page, mask=m_page, other=0)
    m_kept = (b_mark > 0) & (tl.load(p_frames + b_page, mask=m_page, other=0) < 0)
    tl.store(p_scratch + P + b_page, 2, mask=m_kept)
    tl.debug_barrier()
    return m_kept, b_weight


@triton.jit
def diff(p_scratch, p_lists, num_chosen, num_pages, begun, P, A_PART: tl.constexpr, SIZES: tl.constexpr):
    """Compare the required pages, in order, with the frames and with the marks of ``keep``: list resident pages, note the missing ones.

    A page from ``begun`` on is not full: the host has none of it. Returns how many pages are resident, how many are missing, and how many
    of those are to be recalled.
    """
    p_marks, p_chosen, p_missing = p_scratch + P, p_scratch + 2 * P, p_scratch + 2 * P + SIZES.A
    p_list, p_frames, now_reads = p_lists
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
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
        m_missing = m_wanted & ~m_resident & (tl.load(p_marks + b_wanted, mask=m_wanted, other=2) < 2)
        b_ranks = tl.cumsum(m_resident.to(tl.int32) + (m_missing.to(tl.int32) << 16), 0)
        b_rank = num_resident + (b_ranks & 0xFFFF) - 1
        tl.store(p_list + b_rank, -2 - b_wanted, mask=m_resident)
        _note_reads(now_reads, b_rank, b_frame, b_wanted, m_resident)
        tl.store(p_missing + num_missing + (b_ranks >> 16) - 1, b_wanted, mask=m_missing)
        m_recalled = m_missing & (b_wanted < begun)
        counts = tl.sum(m_resident.to(tl.int32) + (m_missing.to(tl.int32) << 10) + (m_recalled.to(tl.int32) << 20), 0)
        num_resident += counts & 0x3FF
        num_missing += counts >> 10 & 0x3FF
        num_recalled += counts >> 20
    return num_resident, num_missing, num_recalled


@triton.jit
def evict(b_weight, m_kept, num_missing, SIZES: tl.constexpr):
    """Find slots for the missing pages: empty ones first, then those of the lightest pages.

    Returns a mask of these slots, the number of the missing page that each one gets, the place of each slot among those to attend to, and
    how many are kept.
    """
    o_c = tl.arange(0, SIZES.C_BLOCK)
    m_free = (o_c < SIZES.C) & ~m_kept
    num_free = tl.sum(m_free.to(tl.int32), 0)
    if num_missing < num_free:  # else no weight decides
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
