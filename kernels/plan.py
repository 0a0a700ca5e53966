# SPDX-License-Identifier: Apache-2.0
"""Plan: select pages for each kv head, keep the resident ones in their slots, and give each missing one a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import MOST_SLOTS
from sglang_freekv.kernels.candidates import Candidates, Tables
from sglang_freekv.kernels.follow import await_previous, following, let_next_in
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.reference import HITS, RECALLED
from sglang_freekv.kernels.select import EXCLUDED, LIGHTEST, compiled_for, heaviest, weigh_and_choose

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
    assert all(x.is_contiguous() for x in reads)
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
    (num_requests, num_pages), (_, num_kv_heads, capacity) = candidates.page_table.shape, tables.slot_pages.shape
    num_attended, device = tables.attended.shape[2], candidates.logits.device
    assert max(capacity, num_attended) <= MOST_SLOTS
    notes = torch.empty(num_requests, num_kv_heads, num_pages + 2 * num_attended, dtype=torch.int32, device=device)
    compiled = compiled_for(candidates, tables)
    _plan_pages[num_requests, num_kv_heads](
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
        HITS=HITS,
        RECALLED=RECALLED,
        A_PART=max(1, min(compiled["A_BLOCK"], COMPARED // compiled["C_BLOCK"])),
        **compiled,
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
    HITS: tl.constexpr,
    RECALLED: tl.constexpr,
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
    A_PART: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    let_next_in(FOLLOWS)
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    corrected = tl.load(p_corrected + i_b * H + i_h).to(tl.int32)
    seq_len = tl.load(p_seq_lens + i_b).to(tl.int32)
    o_c, o_a = tl.arange(0, C_BLOCK), tl.arange(0, A_BLOCK)
    p_list = p_attended + (row * H + i_h) * A
    p_table = p_slot_pages + (row * H + i_h) * C
    if REST:
        if (row <= 0) | ((corrected == 0) & AHEAD_FIRST) | ((corrected != 0) & (seq_len % S != 0)):
            return
    else:
        p_read_slots += (i_b * H + i_h) * A
        p_read_pages += (i_b * H + i_h) * A
        p_present += i_b * H + i_h
        if row <= 0:
            tl.store(p_present, A)
            tl.store(p_read_slots + o_a, -1, mask=o_a < A)
            return
        if corrected == 0:  # not corrected: this step reads what the last one selected
            b_slot = tl.load(p_list + o_a, mask=o_a < A, other=-1)
            b_held = tl.load(p_table + b_slot, mask=b_slot >= 0, other=0)
            tl.store(p_present, A)
            tl.store(p_read_slots + o_a, tl.where(b_slot >= 0, (row * C).to(tl.int32) + b_slot, -1), mask=o_a < A)
            tl.store(p_read_pages + o_a, b_held, mask=o_a < A)
            if not AHEAD_FIRST:
                return
    p_group = p_logits + (i_b * H + i_h) * G * P
    p_weights = p_notes + (i_b * H + i_h) * (P + 2 * A)
    p_chosen, p_missing = p_weights + P, p_weights + P + A
    first_slot = (row * C).to(tl.int32)
    ahead = 1 if REST else 1 - corrected  # 1: select for the next step, whose context has one token more
    num_pages = tl.cdiv(seq_len + ahead, S)
    b_page = tl.load(p_table + o_c, mask=o_c < C, other=-1)
    num_candidates = num_pages - WINDOW - SINK
    if num_candidates <= P_FEW:
        _choose(p_group, p_weights, p_chosen, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C > A, P_FEW)
    elif num_candidates <= P_MANY:
        _choose(p_group, p_weights, p_chosen, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C > A, P_MANY)
    else:
        _choose(p_group, p_weights, p_chosen, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, C > A, P_BLOCK)
    num_chosen = tl.minimum(tl.maximum(num_candidates, 0), SELECTED)

    # Compare the required pages, in order, with the pages in the slots. A page from `begun` on is not full: the host has none of it.
    tl.debug_barrier()
    first_of_window, begun = tl.maximum(num_pages - WINDOW, SINK), seq_len // S
    m_kept = o_c < 0
    num_missing, num_recalled = 0, 0
    for first in range(0, A, A_PART):
        o_q = first + tl.arange(0, A_PART)
        m_chosen = (o_q >= SINK) & (o_q < SINK + num_chosen)
        b_wanted = tl.load(p_chosen + o_q - SINK, mask=m_chosen, other=0)
        b_wanted = tl.where(m_chosen, b_wanted, tl.where(o_q < SINK, o_q, first_of_window + o_q - SINK - num_chosen))
        m_wanted = (o_q < A) & (b_wanted < tl.minimum(num_pages, P))
        m_same = (b_wanted[:, None] == b_page[None, :]) & m_wanted[:, None]
        m_kept = m_kept | (tl.max(m_same.to(tl.int32), 0) > 0)
        m_missing = m_wanted & (tl.max(m_same.to(tl.int32), 1) == 0)
        tl.store(p_missing + num_missing + tl.cumsum(m_missing.to(tl.int32), 0) - 1, b_wanted, mask=m_missing)
        both = tl.sum(m_missing.to(tl.int32) + ((m_missing & (b_wanted < begun)).to(tl.int32) << 16), 0)
        num_missing += both & 0xFFFF
        num_recalled += both >> 16

    # Missing pages take empty slots first, then those of the lightest pages.
    m_free = (o_c < C) & ~m_kept
    if C > A:
        m_ranked = m_free & (b_page >= SINK) & (b_page < tl.minimum(first_of_window, P))
        b_weight = tl.load(p_weights + b_page, mask=m_ranked, other=LIGHTEST)
        # ~ reverses the order of integers: the lightest become the heaviest
        m_free = heaviest(tl.where(m_free, ~b_weight, EXCLUDED), tl.sum(m_free.to(tl.int32), 0), num_missing)
    # Without slack no weight decides: missing pages need every free slot, or the free slots are empty.
    b_ranks = tl.cumsum(m_kept.to(tl.int32) + (m_free.to(tl.int32) << 16), 0)
    b_order, num_kept = (b_ranks >> 16) - 1, tl.sum(m_kept.to(tl.int32), 0)
    m_victim = m_free & (b_order < num_missing)
    tl.debug_barrier()
    b_incoming = tl.load(p_missing + b_order, mask=m_victim, other=-1)
    tl.store(p_table + o_c, b_incoming, mask=m_victim)

    if num_recalled > 0:
        m_recalled = m_victim & (b_order < num_recalled)
        b_host_page = tl.load(p_page_table + i_b * P + b_incoming, mask=m_recalled, other=0).to(tl.int32)
        if ahead > 0:
            _list_misses(
                p_ahead_length, p_ahead_pages, p_ahead_heads, p_ahead_slots, num_recalled, b_order, b_host_page, i_h, first_slot + o_c,
                m_recalled, M_AHEAD)  # fmt: skip
        else:
            _list_misses(
                p_now_length, p_now_pages, p_now_heads, p_now_slots, num_recalled, b_order, b_host_page, i_h, first_slot + o_c,
                m_recalled, M_NOW)  # fmt: skip
        tl.atomic_add(p_counts + row * 3 + RECALLED, num_recalled.to(tl.int64), sem="relaxed")

    b_rank = tl.where(m_kept, (b_ranks & 0xFFFF) - 1, num_kept + b_order)
    m_listed, m_none = (m_kept | m_victim) & (b_rank < A), (o_a >= tl.minimum(num_pages, A)) & (o_a < A)
    tl.store(p_list + b_rank, o_c, mask=m_listed)
    tl.store(p_list + o_a, -1, mask=m_none)
    if not REST:
        if corrected != 0:
            tl.store(p_present, num_kept)
            tl.store(p_read_slots + b_rank, first_slot + o_c, mask=m_listed)
            tl.store(p_read_slots + o_a, -1, mask=m_none)
            tl.store(p_read_pages + b_rank, tl.where(m_kept, b_page, b_incoming), mask=m_listed)
    if corrected != ahead:
        tl.atomic_add(p_counts + row * 3 + HITS, (num_chosen - num_recalled).to(tl.int64), sem="relaxed")


@triton.jit
def _list_misses(p_length, p_pages, p_heads, p_slots, count, b_order, b_page, head, b_slot, mask, M):
    """Add ``count`` units to the end of a list: those of ``mask``, in their order."""
    b_entry = tl.atomic_add(p_length, count, sem="relaxed") + b_order
    mask = mask & (b_entry < M)
    tl.store(p_pages + b_entry, b_page, mask=mask)
    tl.store(p_heads + b_entry, tl.zeros_like(b_slot) + head, mask=mask)
    tl.store(p_slots + b_entry, b_slot, mask=mask)


@triton.jit
def _choose(
    p_group,
    p_weights,
    p_chosen,
    num_pages,
    P,
    SINK: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    POOLING: tl.constexpr,
    WEIGHTS: tl.constexpr,
    P_BLOCK: tl.constexpr,
):
    """Write the chosen candidates in ascending order, and with WEIGHTS the weights of all candidates."""
    o_p = SINK + tl.arange(0, P_BLOCK)
    b_weight, m_chosen = weigh_and_choose(p_group, SINK, num_pages, P, SINK, SELECTED, WINDOW, G, G_BLOCK, POOLING, P_BLOCK)
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_chosen + b_rank, o_p, mask=m_chosen)
    if WEIGHTS:
        tl.store(p_weights + o_p, b_weight, mask=b_weight != EXCLUDED)
