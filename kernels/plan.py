# SPDX-License-Identifier: Apache-2.0
"""Plan: select pages for each kv head, read those that are on the device where they are, and give each missing one a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import MOST_SLOTS
from sglang_freekv.kernels import reference
from sglang_freekv.kernels.candidates import Candidates, Heads, Tables
from sglang_freekv.kernels.follow import await_previous, following, let_next_in
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.placement import choose, diff, evict, keep, list_misses, mark_fixed, publish
from sglang_freekv.kernels.preselect import preselect
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.select import most_finds, most_to_choose, sizes_of, stands_still

HITS, RECALLED = tl.constexpr(reference.HITS), tl.constexpr(reference.RECALLED)
MOST_AT_ONCE = 512  # required pages that are looked up together; their counts have ten bits each


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
    """As reference.plan_pages; one program for each (request, kv head), behind ``preselect`` of long contexts.

    The units of a list of misses come in no particular order. Units beyond its capacity are lost, though its length counts them.
    """
    assert all(x is not None and x.is_contiguous() for x in reads[:3])
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
    notes = torch.empty(*grid, 2 * (num_pages + sizes.A), dtype=torch.int32, device=device)
    finds = preselect(candidates, heads, tables, sizes, notes, rest=reads is None, ahead_first=ahead_first)
    _plan_pages[grid](
        candidates.logits,
        candidates.rows,
        candidates.seq_lens,
        candidates.page_table,
        candidates.frames,
        *heads,
        *tables,
        notes,
        finds,
        *(reads[:3] if reads else (None, None, None)),
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
        A_PART=min(sizes.BUDGET_BLOCK, MOST_AT_ONCE),
        SIZES=sizes,
        POOLING=candidates.pooling,
        HYSTERESIS=float(candidates.hysteresis),
        ON_TURN=candidates.on_turn,
        num_warps=4 if sizes.P_BLOCK <= sizes.P_FEW else 8,
        maxnreg=None if sizes.P_BLOCK <= sizes.P_FEW else 96,  # so that two programs fit beside those of a recall
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
    p_notes,  # [B, H, 2 P + 2 A] scratch that a program's threads share, as placement has it
    p_finds,  # [B, H, 2, N] as preselect has it, or None
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
    HYSTERESIS: tl.constexpr,
    ON_TURN: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    let_next_in(FOLLOWS)
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    i_unit, i_head = i_b * SIZES.H + i_h, row * SIZES.H + i_h
    corrected, seq_len = tl.load(p_corrected + i_unit).to(tl.int32), tl.load(p_seq_lens + i_b).to(tl.int32)
    p_tables = p_slot_pages + i_head * SIZES.C, p_attended + i_head * SIZES.A, p_row_frames + row * SIZES.C
    p_row = p_page_table + i_b * P, p_frames + i_b * P, p_counts + row * 3
    if REST:
        p_reads, lost = None, tl.load(p_lost + i_unit).to(tl.int32)
    else:
        p_reads, lost = (p_read_frames + i_unit * SIZES.A, p_read_pages + i_unit * SIZES.A, p_present + i_unit), 0
        if (row <= 0) | (corrected == 0):
            lost = _read_held(p_tables, p_reads, p_row, row, SIZES)
        tl.store(p_lost + i_unit, lost)
    if (row <= 0) | stands_still(corrected, lost, seq_len, SIZES, REST, AHEAD_FIRST, ON_TURN):
        return
    if p_finds is not None:
        p_finds += i_unit * 2 * most_finds(P, SIZES)
    p_group, p_scratch = p_logits + i_unit * SIZES.G * P, p_notes + i_unit * 2 * (P + SIZES.A)
    now, select = (p_now_length, p_now_pages, p_now_heads, p_now_frames, M_NOW), (corrected, lost, seq_len, P)
    ahead = p_ahead_length, p_ahead_pages, p_ahead_heads, p_ahead_frames, M_AHEAD
    _plan_head(p_group, p_scratch, p_tables, p_reads, p_finds, p_row, now, ahead, i_h, select, REST, A_PART, SIZES, POOLING, HYSTERESIS)


@triton.jit
def _plan_head(
    p_group,
    p_scratch,
    p_tables,
    p_reads,
    p_finds,
    p_row,
    now,
    ahead,
    head,
    select,
    REST: tl.constexpr,
    A_PART: tl.constexpr,
    SIZES: tl.constexpr,
    POOLING: tl.constexpr,
    HYSTERESIS: tl.constexpr,
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
    p_held = None
    if not REST:
        _, p_held, _ = p_reads
    sizes = num_pages, P, most_to_choose(p_frames, num_pages, P, SIZES), (lost != 0) & (num_pages > SIZES.A)
    mark_fixed(p_scratch + P, num_pages, P, SIZES, A_PART)
    num_chosen = choose(p_group, p_scratch, p_tables, p_held, p_finds, sizes, SIZES, POOLING, HYSTERESIS)
    m_kept, b_weight = keep(p_scratch, p_frames, b_page, num_pages, P, SIZES)
    now_reads = p_reads, corrected | lost
    p_lists = p_list, p_frames, now_reads
    num_resident, num_missing, num_recalled = diff(p_scratch, p_lists, num_chosen, num_pages, begun, P, A_PART, SIZES)
    if tl.load(p_row_frames) < 0:  # a whole row has no slots
        num_missing, num_recalled = 0, 0
    m_victim, b_order, b_rank, num_kept = evict(b_weight, m_kept, num_missing, SIZES)
    tl.debug_barrier()
    b_incoming = tl.load(p_scratch + 2 * P + SIZES.A + b_order, mask=m_victim, other=-1)
    tl.store(p_table + o_c, b_incoming, mask=m_victim)
    if num_recalled > 0:
        m_recalled = m_victim & (b_order < num_recalled)
        b_host_page = tl.load(p_page_table + b_incoming, mask=m_recalled, other=0).to(tl.int32)
        if more > 0:
            list_misses(ahead, num_recalled, b_order, b_host_page, head, b_frame, m_recalled)
        else:
            list_misses(now, num_recalled, b_order, b_host_page, head, b_frame, m_recalled)
        tl.atomic_add(p_counts + RECALLED, num_recalled.to(tl.int64), sem="relaxed")
    num_present = num_resident + num_kept
    m_slots, b_in_slot = m_kept | m_victim, tl.where(m_kept, b_page, b_incoming)
    publish(p_list, now_reads, num_resident + b_rank, m_slots, b_frame, b_in_slot, num_present + num_missing, num_present, SIZES)
    if corrected != more:  # the first selection of this kv head in the step
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
