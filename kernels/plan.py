# SPDX-License-Identifier: Apache-2.0
"""Plan: select pages for each kv head, keep the resident ones in their slots, and give each missing one a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import MOST_SLOTS
from sglang_freekv.kernels import reference
from sglang_freekv.kernels.candidates import Candidates, Tables
from sglang_freekv.kernels.follow import await_previous, following, let_next_in
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, heaviest, launch_of, sizes_of, weigh_and_choose

HITS, RECALLED = tl.constexpr(reference.HITS), tl.constexpr(reference.RECALLED)
COMPARED = 16384  # (page, slot) pairs compared at once: at most 128 for each thread of the narrowest kernel, which has 4 warps


def plan_pages(
    candidates: Candidates,
    corrected: torch.Tensor,
    tables: Tables,
    reads: Reads,
    misses_now: Misses,
    misses_ahead: Misses,
    counts: torch.Tensor,
    *,
    ahead_first: bool,
) -> None:
    """As reference.plan_pages; one program for each (request, kv head).

    The units of a list of misses come in no particular order. Units beyond its capacity are lost, though its length counts them.
    """
    assert all(x is not None and x.is_contiguous() for x in reads)
    _launch(candidates, corrected, tables, reads, (misses_now, misses_ahead), counts, ahead_first)


def plan_rest(
    candidates: Candidates, corrected: torch.Tensor, tables: Tables, misses_ahead: Misses, counts: torch.Tensor, *, ahead_first: bool
) -> None:
    """As reference.plan_rest; a program with nothing to select ends at once."""
    _launch(candidates, corrected, tables, None, (misses_ahead, misses_ahead), counts, ahead_first)


def _launch(
    candidates: Candidates,
    corrected: torch.Tensor,
    tables: Tables,
    reads: Reads | None,
    misses: tuple[Misses, Misses],
    counts: torch.Tensor,
    ahead_first: bool,
) -> None:
    """The plan before attention, or behind it without ``reads``. ``misses`` are the lists for this step and for the next."""
    now, ahead = misses
    sizes, num_pages, device = sizes_of(candidates, tables), candidates.logits.shape[2], candidates.logits.device
    assert max(sizes.C, sizes.A) <= MOST_SLOTS
    grid = len(candidates.rows), sizes.H
    notes = torch.empty(*grid, num_pages + 2 * sizes.A, dtype=torch.int32, device=device)
    _plan_pages[grid](
        candidates.logits,
        candidates.rows,
        candidates.seq_lens,
        candidates.page_table,
        corrected,
        *tables,
        notes,
        *(reads or (None, None, None)),
        now.length,
        now.host_pages,
        now.heads,
        now.slots,
        ahead.length,
        ahead.host_pages,
        ahead.heads,
        ahead.slots,
        counts,
        num_pages,
        now.host_pages.shape[0],
        ahead.host_pages.shape[0],
        AHEAD_FIRST=ahead_first,
        REST=reads is None,
        A_PART=max(1, min(sizes.A_BLOCK, COMPARED // sizes.C_BLOCK)),
        SIZES=sizes,
        POOLING=candidates.pooling,
        **launch_of(sizes),
        **following(device, closely=reads is not None),
    )


@triton.jit
def _plan_pages(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_corrected,  # [B, H]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_notes,  # [B, H, P + 2 A] scratch that a program's threads share: weights of candidates, chosen pages, missing pages
    p_read_slots,  # [B, H, A] or None
    p_read_pages,  # [B, H, A] or None
    p_present,  # [B, H] or None
    p_now_length,  # [4]
    p_now_pages,  # [M_NOW]
    p_now_heads,  # [M_NOW]
    p_now_slots,  # [M_NOW]
    p_ahead_length,  # [4]
    p_ahead_pages,  # [M_AHEAD]
    p_ahead_heads,  # [M_AHEAD]
    p_ahead_slots,  # [M_AHEAD]
    p_counts,  # [R, 3]
    P,
    M_NOW,
    M_AHEAD,
    AHEAD_FIRST: tl.constexpr,
    REST: tl.constexpr,
    A_PART: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    let_next_in(FOLLOWS)
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_unit = i_b * SIZES.H + i_h
    row = tl.load(p_rows + i_b).to(tl.int64)
    corrected = tl.load(p_corrected + i_unit).to(tl.int32)
    seq_len = tl.load(p_seq_lens + i_b).to(tl.int32)
    p_tables = p_slot_pages + (row * SIZES.H + i_h) * SIZES.C, p_attended + (row * SIZES.H + i_h) * SIZES.A
    p_reads = None
    if REST:
        if (row <= 0) | ((corrected == 0) & AHEAD_FIRST) | ((corrected != 0) & (seq_len % SIZES.S != 0)):
            return
    else:
        p_reads = p_read_slots + i_unit * SIZES.A, p_read_pages + i_unit * SIZES.A, p_present + i_unit
        if (row <= 0) | (corrected == 0):
            _read_held(p_tables, p_reads, row, SIZES)
            if (row <= 0) | (not AHEAD_FIRST):
                return
    p_group, p_scratch = p_logits + i_unit * SIZES.G * P, p_notes + i_unit * (P + 2 * SIZES.A)
    now = p_now_length, p_now_pages, p_now_heads, p_now_slots, M_NOW
    ahead = p_ahead_length, p_ahead_pages, p_ahead_heads, p_ahead_slots, M_AHEAD
    p_row = p_page_table + i_b * P, p_counts + row * 3
    _plan_head(p_group, p_scratch, p_tables, p_reads, p_row, now, ahead, row, i_h, corrected, seq_len, P, REST, A_PART, SIZES, POOLING)


@triton.jit
def _plan_head(
    p_group,
    p_scratch,
    p_tables,
    p_reads,
    p_row,
    now,
    ahead,
    row,
    head,
    corrected,
    seq_len,
    P,
    REST: tl.constexpr,
    A_PART: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Select for one kv head, give the missing pages slots, and list those that are to be recalled."""
    p_table, p_list = p_tables
    p_page_table, p_counts = p_row
    more = 1 if REST else 1 - corrected  # 1: select for the next step, whose context has one token more
    num_pages, begun = tl.cdiv(seq_len + more, SIZES.S), seq_len // SIZES.S
    o_c, first_slot = tl.arange(0, SIZES.C_BLOCK), (row * SIZES.C).to(tl.int32)
    b_page = tl.load(p_table + o_c, mask=o_c < SIZES.C, other=-1)
    num_chosen = _choose(p_group, p_scratch, num_pages, P, SIZES, POOLING)
    m_kept, num_missing, num_recalled = _diff(p_scratch, b_page, num_chosen, num_pages, begun, P, A_PART, SIZES)
    m_victim, b_order, b_rank, num_kept = _evict(p_scratch, b_page, m_kept, num_missing, num_pages, P, SIZES)
    tl.debug_barrier()
    b_incoming = tl.load(p_scratch + P + SIZES.A + b_order, mask=m_victim, other=-1)
    tl.store(p_table + o_c, b_incoming, mask=m_victim)
    if num_recalled > 0:
        m_recalled = m_victim & (b_order < num_recalled)
        b_host_page = tl.load(p_page_table + b_incoming, mask=m_recalled, other=0).to(tl.int32)
        if more > 0:
            _list_misses(ahead, num_recalled, b_order, b_host_page, head, first_slot + o_c, m_recalled)
        else:
            _list_misses(now, num_recalled, b_order, b_host_page, head, first_slot + o_c, m_recalled)
        tl.atomic_add(p_counts + RECALLED, num_recalled.to(tl.int64), sem="relaxed")
    _publish(
        p_list, p_reads, b_rank, m_kept | m_victim, tl.where(m_kept, b_page, b_incoming), num_pages, num_kept, first_slot, corrected, SIZES
    )
    if corrected != more:
        tl.atomic_add(p_counts + HITS, (num_chosen - num_recalled).to(tl.int64), sem="relaxed")


@triton.jit
def _read_held(p_tables, p_reads, row, SIZES: tl.constexpr):
    """A kv head that is not corrected reads what the last step selected; a padding request reads nothing."""
    p_table, p_list = p_tables
    p_slots, p_pages, p_present = p_reads
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_slot = tl.load(p_list + o_a, mask=(o_a < SIZES.A) & (row > 0), other=-1)
    b_held = tl.load(p_table + b_slot, mask=b_slot >= 0, other=0)
    tl.store(p_present, SIZES.A)
    tl.store(p_slots + o_a, tl.where(b_slot >= 0, (row * SIZES.C).to(tl.int32) + b_slot, -1), mask=o_a < SIZES.A)
    tl.store(p_pages + o_a, b_held, mask=o_a < SIZES.A)


@triton.jit
def _choose(p_group, p_scratch, num_pages, P, SIZES: tl.constexpr, POOLING: tl.constexpr):
    """Note the chosen candidates, and return how many they are."""
    num_candidates = num_pages - SIZES.WINDOW - SIZES.SINK
    if num_candidates <= SIZES.P_FEW:
        _choose_among(p_group, p_scratch, num_pages, P, SIZES, POOLING, SIZES.P_FEW)
    elif num_candidates <= SIZES.P_MANY:
        _choose_among(p_group, p_scratch, num_pages, P, SIZES, POOLING, SIZES.P_MANY)
    else:
        _choose_among(p_group, p_scratch, num_pages, P, SIZES, POOLING, SIZES.P_BLOCK)
    return tl.minimum(tl.maximum(num_candidates, 0), SIZES.SELECTED)


@triton.jit
def _choose_among(p_group, p_scratch, num_pages, P, SIZES: tl.constexpr, POOLING: tl.constexpr, P_BLOCK: tl.constexpr):
    """Note the chosen candidates in ascending order, and the weights of all candidates if there is slack."""
    o_p = SIZES.SINK + tl.arange(0, P_BLOCK)
    b_weight, m_chosen = weigh_and_choose(p_group, SIZES.SINK, num_pages, P, SIZES, POOLING, P_BLOCK)
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_scratch + P + b_rank, o_p, mask=m_chosen)
    if SIZES.C > SIZES.A:
        tl.store(p_scratch + o_p, b_weight, mask=b_weight != EXCLUDED)


@triton.jit
def _diff(p_scratch, b_page, num_chosen, num_pages, begun, P, A_PART: tl.constexpr, SIZES: tl.constexpr):
    """Compare the required pages, in order, with the pages in the slots, and note the missing ones.

    A page from ``begun`` on is not full: the host has none of it. Returns a mask of the slots whose page is required, how many pages are
    missing, and how many of those are to be recalled.
    """
    p_chosen, p_missing = p_scratch + P, p_scratch + P + SIZES.A
    tl.debug_barrier()
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
    m_kept = tl.arange(0, SIZES.C_BLOCK) < 0
    num_missing, num_recalled = 0, 0
    for first in range(0, SIZES.A, A_PART):
        o_q = first + tl.arange(0, A_PART)
        m_chosen = (o_q >= SIZES.SINK) & (o_q < SIZES.SINK + num_chosen)
        b_wanted = tl.load(p_chosen + o_q - SIZES.SINK, mask=m_chosen, other=0)
        b_fixed = tl.where(o_q < SIZES.SINK, o_q, first_of_window + o_q - SIZES.SINK - num_chosen)
        b_wanted = tl.where(m_chosen, b_wanted, b_fixed)
        m_wanted = (o_q < SIZES.A) & (b_wanted < tl.minimum(num_pages, P))
        m_same = (b_wanted[:, None] == b_page[None, :]) & m_wanted[:, None]
        m_kept = m_kept | (tl.max(m_same.to(tl.int32), 0) > 0)
        m_missing = m_wanted & (tl.max(m_same.to(tl.int32), 1) == 0)
        tl.store(p_missing + num_missing + tl.cumsum(m_missing.to(tl.int32), 0) - 1, b_wanted, mask=m_missing)
        both = tl.sum(m_missing.to(tl.int32) + ((m_missing & (b_wanted < begun)).to(tl.int32) << 16), 0)
        num_missing += both & 0xFFFF
        num_recalled += both >> 16
    return m_kept, num_missing, num_recalled


@triton.jit
def _evict(p_weights, b_page, m_kept, num_missing, num_pages, P, SIZES: tl.constexpr):
    """Find slots for the missing pages: empty ones first, then those of the lightest pages.

    Returns a mask of these slots, the number of the missing page that each one gets, the place of each slot among those to attend to, and
    how many are kept.
    """
    o_c = tl.arange(0, SIZES.C_BLOCK)
    m_free = (o_c < SIZES.C) & ~m_kept
    if SIZES.C > SIZES.A:  # without slack no weight decides: missing pages need every free slot, or the free slots are empty
        first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
        m_ranked = m_free & (b_page >= SIZES.SINK) & (b_page < tl.minimum(first_of_window, P))
        b_weight = tl.load(p_weights + b_page, mask=m_ranked, other=LIGHTEST)
        # ~ reverses the order of integers: the lightest become the heaviest
        m_free = heaviest(tl.where(m_free, ~b_weight, EXCLUDED), tl.sum(m_free.to(tl.int32), 0), num_missing)
    b_ranks = tl.cumsum(m_kept.to(tl.int32) + (m_free.to(tl.int32) << 16), 0)
    b_order, num_kept = (b_ranks >> 16) - 1, tl.sum(m_kept.to(tl.int32), 0)
    b_rank = tl.where(m_kept, (b_ranks & 0xFFFF) - 1, num_kept + b_order)
    return m_free & (b_order < num_missing), b_order, b_rank, num_kept


@triton.jit
def _list_misses(misses, count, b_order, b_page, head, b_slot, mask):
    """Add ``count`` units to the end of a list: those of ``mask``, in their order."""
    p_length, p_pages, p_heads, p_slots, M = misses
    b_entry = tl.atomic_add(p_length, count, sem="relaxed") + b_order
    mask = mask & (b_entry < M)
    tl.store(p_pages + b_entry, b_page, mask=mask)
    tl.store(p_heads + b_entry, tl.zeros_like(b_slot) + head, mask=mask)
    tl.store(p_slots + b_entry, b_slot, mask=mask)


@triton.jit
def _publish(p_list, p_reads, b_rank, m_required, b_page, num_pages, num_kept, first_slot, corrected, SIZES: tl.constexpr):
    """Write which slots to attend to, kept ones first; a corrected kv head reads them in this step."""
    o_c, o_a = tl.arange(0, SIZES.C_BLOCK), tl.arange(0, SIZES.A_BLOCK)
    m_listed, m_none = m_required & (b_rank < SIZES.A), (o_a >= tl.minimum(num_pages, SIZES.A)) & (o_a < SIZES.A)
    tl.store(p_list + b_rank, o_c, mask=m_listed)
    tl.store(p_list + o_a, -1, mask=m_none)
    if p_reads is not None:
        if corrected != 0:
            p_slots, p_pages, p_present = p_reads
            tl.store(p_present, num_kept)
            tl.store(p_slots + b_rank, first_slot + o_c, mask=m_listed)
            tl.store(p_slots + o_a, -1, mask=m_none)
            tl.store(p_pages + b_rank, b_page, mask=m_listed)
