# SPDX-License-Identifier: Apache-2.0
"""Plan: select pages for each kv head, keep the resident ones in their slots, and give each missing one a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import MOST_SLOTS
from sglang_freekv.kernels import reference
from sglang_freekv.kernels.candidates import Candidates, Heads, Tables
from sglang_freekv.kernels.follow import await_previous, following, let_next_in
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, heaviest, launch_of, sizes_of, weigh_and_choose

HITS, RECALLED = tl.constexpr(reference.HITS), tl.constexpr(reference.RECALLED)
COMPARED = 16384  # (page, slot) pairs compared at once: at most 128 for each thread of the narrowest kernel, which has 4 warps


def plan_pages(
    candidates: Candidates,
    heads: Heads,
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
    _launch(candidates, heads, tables, reads, (misses_now, misses_ahead), counts, ahead_first)


def plan_rest(
    candidates: Candidates, heads: Heads, tables: Tables, misses_ahead: Misses, counts: torch.Tensor, *, ahead_first: bool
) -> None:
    """As reference.plan_rest; a program with nothing to select ends at once."""
    _launch(candidates, heads, tables, None, (misses_ahead, misses_ahead), counts, ahead_first)


def _launch(
    candidates: Candidates,
    heads: Heads,
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
        candidates.frames,
        *heads,
        *tables,
        notes,
        *(reads or (None, None, None)),
        now.length,
        now.host_pages,
        now.heads,
        now.frames,
        ahead.length,
        ahead.host_pages,
        ahead.heads,
        ahead.frames,
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
    p_frames,  # [B, P]
    p_corrected,  # [B, H]
    p_lost,  # [B, H]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_row_frames,  # [R, C]
    p_notes,  # [B, H, P + 2 A] scratch that a program's threads share: weights of candidates, chosen pages, missing pages
    p_read_frames,  # [B, H, A] or None
    p_read_pages,  # [B, H, A] or None
    p_present,  # [B, H] or None
    p_now_length,  # [4]
    p_now_pages,  # [M_NOW]
    p_now_heads,  # [M_NOW]
    p_now_frames,  # [M_NOW]
    p_ahead_length,  # [4]
    p_ahead_pages,  # [M_AHEAD]
    p_ahead_heads,  # [M_AHEAD]
    p_ahead_frames,  # [M_AHEAD]
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
    i_head = row * SIZES.H + i_h
    p_tables = p_slot_pages + i_head * SIZES.C, p_attended + i_head * SIZES.A, p_row_frames + row * SIZES.C
    p_row = p_page_table + i_b * P, p_frames + i_b * P, p_counts + row * 3
    p_reads, lost = None, 0
    if REST:
        lost = tl.load(p_lost + i_unit).to(tl.int32)
        if (row <= 0) | ((corrected == 0) & (lost == 0) & AHEAD_FIRST) | ((corrected != 0) & (seq_len % SIZES.S != 0)):
            return
    else:
        p_reads = p_read_frames + i_unit * SIZES.A, p_read_pages + i_unit * SIZES.A, p_present + i_unit
        if (row <= 0) | (corrected == 0):
            lost = _read_held(p_tables, p_reads, p_row, row, SIZES)
        tl.store(p_lost + i_unit, lost)
        if (row <= 0) | ((not AHEAD_FIRST) & (corrected == 0) & (lost == 0)):
            return
    p_group, p_scratch = p_logits + i_unit * SIZES.G * P, p_notes + i_unit * (P + 2 * SIZES.A)
    now = p_now_length, p_now_pages, p_now_heads, p_now_frames, M_NOW
    ahead = p_ahead_length, p_ahead_pages, p_ahead_heads, p_ahead_frames, M_AHEAD
    _plan_head(p_group, p_scratch, p_tables, p_reads, p_row, now, ahead, i_h, (corrected, lost, seq_len, P), REST, A_PART, SIZES, POOLING)


@triton.jit
def _plan_head(
    p_group,
    p_scratch,
    p_tables,
    p_reads,
    p_row,
    now,
    ahead,
    head,
    select,
    REST: tl.constexpr,
    A_PART: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Select for one kv head, give the missing pages slots, and list those that are to be recalled."""
    p_table, p_list, p_row_frames = p_tables
    p_page_table, p_frames, p_counts = p_row
    corrected, lost, seq_len, P = select
    more = 1 if REST else 1 - (corrected | lost)  # 1: select for the next step, whose context has one token more
    num_pages, begun = tl.cdiv(seq_len + more, SIZES.S), seq_len // SIZES.S
    o_c = tl.arange(0, SIZES.C_BLOCK)
    b_page = tl.load(p_table + o_c, mask=o_c < SIZES.C, other=-1)
    b_frame = tl.load(p_row_frames + o_c, mask=o_c < SIZES.C, other=-1)
    num_chosen = _choose(p_group, p_scratch, num_pages, P, SIZES, POOLING)
    if not REST:
        if lost != 0:
            num_chosen = _choose_held(p_scratch + P, p_reads, num_pages, A_PART, SIZES)
    now_reads = p_reads, corrected | lost
    p_lists = p_list, p_frames, now_reads
    m_kept, num_resident, num_missing, num_recalled = _diff(p_scratch, p_lists, b_page, num_chosen, num_pages, begun, P, A_PART, SIZES)
    m_victim, b_order, b_rank, num_kept = _evict(p_scratch, b_page, m_kept, num_missing, num_pages, P, SIZES)
    tl.debug_barrier()
    b_incoming = tl.load(p_scratch + P + SIZES.A + b_order, mask=m_victim, other=-1)
    tl.store(p_table + o_c, b_incoming, mask=m_victim)
    if num_recalled > 0:
        m_recalled = m_victim & (b_order < num_recalled)
        b_host_page = tl.load(p_page_table + b_incoming, mask=m_recalled, other=0).to(tl.int32)
        if more > 0:
            _list_misses(ahead, num_recalled, b_order, b_host_page, head, b_frame, m_recalled)
        else:
            _list_misses(now, num_recalled, b_order, b_host_page, head, b_frame, m_recalled)
        tl.atomic_add(p_counts + RECALLED, num_recalled.to(tl.int64), sem="relaxed")
    num_present = num_resident + num_kept
    m_slots, b_in_slot = m_kept | m_victim, tl.where(m_kept, b_page, b_incoming)
    _publish(p_list, now_reads, num_resident + b_rank, m_slots, b_frame, b_in_slot, num_pages, num_present, SIZES)
    if corrected != more:
        tl.atomic_add(p_counts + HITS, (num_chosen - num_recalled).to(tl.int64), sem="relaxed")


@triton.jit
def _read_held(p_tables, p_reads, p_row, row, SIZES: tl.constexpr):
    """Read what the last step selected; a padding request reads nothing. Returns whether a page of it has become absent."""
    p_table, p_list, p_row_frames = p_tables
    p_read_frames, p_pages, p_present = p_reads
    _, p_frames, _ = p_row
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_entry = tl.load(p_list + o_a, mask=(o_a < SIZES.A) & (row > 0), other=-1)
    m_resident = b_entry < -1
    b_held = tl.load(p_table + b_entry, mask=b_entry >= 0, other=-1)
    b_held = tl.where(m_resident, -2 - b_entry, b_held)
    b_frame = tl.load(p_row_frames + b_entry, mask=b_entry >= 0, other=-1)
    b_frame = tl.where(m_resident, tl.load(p_frames + b_held, mask=m_resident, other=-1), b_frame)
    tl.store(p_present, SIZES.A)
    tl.store(p_read_frames + o_a, b_frame, mask=o_a < SIZES.A)
    tl.store(p_pages + o_a, b_held, mask=o_a < SIZES.A)
    return tl.max((m_resident & (b_frame < 0)).to(tl.int32), 0)


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
    """Note the chosen candidates in ascending order, and the weights of all candidates."""
    o_p = SIZES.SINK + tl.arange(0, P_BLOCK)
    b_weight, m_chosen = weigh_and_choose(p_group, SIZES.SINK, num_pages, P, SIZES, POOLING, P_BLOCK)
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_scratch + P + b_rank, o_p, mask=m_chosen)
    tl.store(p_scratch + o_p, b_weight, mask=b_weight != EXCLUDED)


@triton.jit
def _choose_held(p_chosen, p_reads, num_pages, A_PART: tl.constexpr, SIZES: tl.constexpr):
    """Note, in ascending order, the pages between sink and window that ``_read_held`` has read, and return how many they are."""
    _, p_pages, _ = p_reads
    tl.debug_barrier()
    first_of_window = tl.maximum(num_pages - SIZES.WINDOW, SIZES.SINK)
    o_a, num_chosen = tl.arange(0, SIZES.A_BLOCK), 0
    b_other = tl.load(p_pages + o_a, mask=o_a < SIZES.A, other=-1)
    b_other = tl.where((b_other >= SIZES.SINK) & (b_other < first_of_window), b_other, 2**30)
    for first in range(0, SIZES.A, A_PART):
        o_q = first + tl.arange(0, A_PART)
        b_page = tl.load(p_pages + o_q, mask=o_q < SIZES.A, other=-1)
        m_chosen = (b_page >= SIZES.SINK) & (b_page < first_of_window)
        b_rank = tl.sum((b_other[None, :] < b_page[:, None]).to(tl.int32), 1)
        tl.store(p_chosen + b_rank, b_page, mask=m_chosen)
        num_chosen += tl.sum(m_chosen.to(tl.int32), 0)
    return num_chosen


@triton.jit
def _diff(p_scratch, p_lists, b_page, num_chosen, num_pages, begun, P, A_PART: tl.constexpr, SIZES: tl.constexpr):
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
    for first in range(0, SIZES.A, A_PART):
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
def _evict(p_weights, b_page, m_kept, num_missing, num_pages, P, SIZES: tl.constexpr):
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
def _list_misses(misses, count, b_order, b_page, head, b_frame, mask):
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
def _publish(p_list, now_reads, b_rank, m_required, b_frame, b_page, num_pages, num_present, SIZES: tl.constexpr):
    """Write which slots to attend to behind the resident pages, kept ones first."""
    o_c, o_a = tl.arange(0, SIZES.C_BLOCK), tl.arange(0, SIZES.A_BLOCK)
    m_listed, m_none = m_required & (b_rank < SIZES.A), (o_a >= tl.minimum(num_pages, SIZES.A)) & (o_a < SIZES.A)
    tl.store(p_list + b_rank, o_c, mask=m_listed)
    tl.store(p_list + o_a, -1, mask=m_none)
    _note_reads(now_reads, b_rank, b_frame, b_page, m_listed)
    p_reads, now = now_reads
    if p_reads is not None:
        p_frames, _, p_present = p_reads
        if now != 0:
            tl.store(p_present, num_present)
            tl.store(p_frames + o_a, -1, mask=m_none)
