# SPDX-License-Identifier: Apache-2.0
"""Preselect: of a long context's candidates, those that a plan has to choose among, found by several programs.

A page that a kv head selects is among the heaviest of its own part. A plan alone reads all weights of a kv head on one processor of a GPU.
A step of one request so took 16 ms at 1M tokens, and then 10 (benchmarks/results/paper-crossover-llama-3.1-8b-8-bit.json, superseded and
results).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Candidates, Heads, Tables
from sglang_freekv.kernels.follow import await_previous, following, let_next_in
from sglang_freekv.kernels.placement import favour_last
from sglang_freekv.kernels.select import EXCLUDED, Sizes, heaviest, most_finds, most_to_choose, stands_still
from sglang_freekv.kernels.select_in_parts import AT_ONCE, norms, weigh_pages

# That share the parts, about what a Hopper GPU runs at once. With 32 rows of eight kv heads each head has one, also if a single context is
# long: more would stand idle before the attention of short contexts, as most do.
PROGRAMS = 256


def preselect(
    candidates: Candidates, heads: Heads, tables: Tables, sizes: Sizes, notes: torch.Tensor, *, rest: bool, ahead_first: bool
) -> torch.Tensor | None:
    """Weigh the candidates of contexts that have more than ``P_MANY``, and find the heaviest of each part, as many as a plan may choose.

    Args:
        notes: ``[B, H, 2 P + 2 A]`` scratch of the plan that follows. Weights are written, and marks are cleared.
        rest, ahead_first: as that plan has them: they tell which kv heads select.

    Returns:
        ``[B, H, 2, N]`` int32 pages, and their weights as in ``select``: one part behind the other, each in ascending order of pages.
        N as ``most_finds``. None if no context is so long.
    """
    num_pages, device = candidates.logits.shape[2], candidates.logits.device
    if sizes.P_BLOCK <= sizes.P_MANY:
        return None
    num_parts, units = triton.cdiv(num_pages, sizes.P_MANY), (len(candidates.rows), sizes.H)
    finds = torch.empty(*units, 2, num_parts * min(sizes.P_MANY, sizes.A), dtype=torch.int32, device=device)
    part_norms = torch.empty(*units, num_parts, 2, sizes.G_BLOCK, dtype=torch.float32, device=device)
    grid = *units, min(num_parts, triton.cdiv(PROGRAMS, units[0] * units[1]))
    contexts = candidates.rows, candidates.seq_lens, candidates.frames, *heads, *tables
    numbers = {"REST": rest, "AHEAD_FIRST": ahead_first, "SIZES": sizes, "ON_TURN": candidates.on_turn}
    launch = {"num_warps": 8, "maxnreg": 96} | following(device, closely=not rest)  # registers as those of a plan
    if candidates.pooling == "softmax-mean":
        _norm_parts[grid](candidates.logits, *contexts, part_norms, num_pages, **numbers, **launch)
    more = {"POOLING": candidates.pooling, "HYSTERESIS": float(candidates.hysteresis), "PARTS_BLOCK": triton.next_power_of_2(num_parts)}
    _preselect[grid](candidates.logits, *contexts, part_norms, notes, finds, num_pages, **numbers, **more, **launch)
    return finds


@triton.jit
def _has_no_part(p_rows, p_seq_lens, P, SIZES: tl.constexpr):
    """Whether a program has nothing to look at, whatever its kv head does: the context is short, or has too few parts.

    Most programs of a server whose contexts are shorter than they may be leave here, behind one load.
    """
    i_b = tl.program_id(0).to(tl.int64)
    row, seq_len = tl.load(p_rows + i_b), tl.load(p_seq_lens + i_b).to(tl.int32)
    last = tl.minimum(tl.cdiv(seq_len + 1, SIZES.S) - SIZES.WINDOW, P)
    return (row <= 0) | (last - SIZES.SINK <= tl.maximum(tl.program_id(2), 1) * SIZES.P_MANY)


@triton.jit
def _norm_parts(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_frames,  # [B, P]
    p_corrected,  # [B, H]
    p_lost,  # [B, H]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_row_frames,  # [R, C]
    p_norms,  # [B, H, PARTS, 2, G_BLOCK]
    P,
    REST: tl.constexpr,
    AHEAD_FIRST: tl.constexpr,
    SIZES: tl.constexpr,
    ON_TURN: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """The largest logit of each query head in a part, and the logarithm of the sum of exponentials relative to it."""
    await_previous(FOLLOWS)
    let_next_in(FOLLOWS)
    if _has_no_part(p_rows, p_seq_lens, P, SIZES):
        return
    p_tables, p_heads = (p_slot_pages, p_attended, p_row_frames), (p_corrected, p_lost)
    i_unit, num_parts, last, _, _ = _context(p_rows, p_seq_lens, p_frames, p_heads, p_tables, P, REST, AHEAD_FIRST, SIZES, ON_TURN)
    SPAN: tl.constexpr = min(SIZES.P_MANY, AT_ONCE // SIZES.G_BLOCK)
    p_norms += i_unit * tl.cdiv(P, SIZES.P_MANY) * 2 * SIZES.G_BLOCK
    o_g = tl.arange(0, SIZES.G_BLOCK)
    for i_part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        begin, end = _part(i_part, last, SIZES)
        b_top, b_log_sum = norms(p_logits + i_unit * SIZES.G * P, begin, end, P, SIZES, SPAN)
        p_part = p_norms + i_part * 2 * SIZES.G_BLOCK
        tl.store(p_part + o_g, b_top)
        tl.store(p_part + SIZES.G_BLOCK + o_g, b_log_sum)


@triton.jit
def _preselect(
    p_logits,  # [B, H * G, P]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_frames,  # [B, P]
    p_corrected,  # [B, H]
    p_lost,  # [B, H]
    p_slot_pages,  # [R, H, C]
    p_attended,  # [R, H, A]
    p_row_frames,  # [R, C]
    p_norms,  # [B, H, PARTS, 2, G_BLOCK]
    p_notes,  # [B, H, 2 P + 2 A] scratch that a program's threads share, as placement has it
    p_finds,  # [B, H, 2, N]
    P,
    REST: tl.constexpr,
    AHEAD_FIRST: tl.constexpr,
    SIZES: tl.constexpr,
    ON_TURN: tl.constexpr,
    POOLING: tl.constexpr,
    HYSTERESIS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    let_next_in(FOLLOWS)
    if _has_no_part(p_rows, p_seq_lens, P, SIZES):
        return
    p_tables, p_heads = (p_slot_pages, p_attended, p_row_frames), (p_corrected, p_lost)
    i_unit, num_parts, last, most, p_mine = _context(p_rows, p_seq_lens, p_frames, p_heads, p_tables, P, REST, AHEAD_FIRST, SIZES, ON_TURN)
    if num_parts == 0:
        return
    p_group, p_scratch = p_logits + i_unit * SIZES.G * P, p_notes + i_unit * 2 * (P + SIZES.A)
    b_top, b_log_sum = tl.full([SIZES.G_BLOCK], 0, tl.float32), tl.full([SIZES.G_BLOCK], 0, tl.float32)
    if POOLING == "softmax-mean":
        p_norms += i_unit * tl.cdiv(P, SIZES.P_MANY) * 2 * SIZES.G_BLOCK
        b_top, b_log_sum = _joined(p_norms, num_parts, SIZES, PARTS_BLOCK)
    N = most_finds(P, SIZES)
    for i_part in range(tl.program_id(2), num_parts, tl.num_programs(2)):
        begin, end = _part(i_part, last, SIZES)
        weigh_pages(p_group, p_scratch, begin, end, b_top, b_log_sum, P, SIZES, POOLING, SIZES.P_MANY)
        tl.debug_barrier()
        if HYSTERESIS > 0:
            favour_last(p_scratch, p_mine, begin, end, SIZES, HYSTERESIS)
            tl.debug_barrier()
        o_p = begin + tl.arange(0, SIZES.P_MANY)
        m_candidate = o_p < end
        b_weight = tl.load(p_scratch + o_p, mask=m_candidate, other=EXCLUDED)
        tl.store(p_scratch + P + o_p, 0, mask=m_candidate)
        m_found = heaviest(b_weight, end - begin, most)
        before = i_part * tl.minimum(most, SIZES.P_MANY)  # of earlier parts, which are full
        b_rank = i_unit * 2 * N + before + tl.cumsum(m_found.to(tl.int32), 0) - 1
        tl.store(p_finds + b_rank, o_p, mask=m_found)
        tl.store(p_finds + N + b_rank, b_weight, mask=m_found)


@triton.jit
def _part(i_part, last, SIZES: tl.constexpr):
    """Where the candidates of a part begin and end."""
    begin = SIZES.SINK + i_part * SIZES.P_MANY
    return begin, tl.minimum(begin + SIZES.P_MANY, last)


@triton.jit
def _context(
    p_rows,
    p_seq_lens,
    p_frames,
    p_heads,
    p_tables,
    P,
    REST: tl.constexpr,
    AHEAD_FIRST: tl.constexpr,
    SIZES: tl.constexpr,
    ON_TURN: tl.constexpr,
):
    """What a program is to look at: its kv head, the number of parts and where their candidates end, most, and that head's tables.

    There are no parts if the kv head does not select, or if the context is short.
    """
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_corrected, p_lost = p_heads
    p_slot_pages, p_attended, p_row_frames = p_tables
    row = tl.load(p_rows + i_b).to(tl.int64)
    i_unit, i_head = i_b * SIZES.H + i_h, tl.maximum(row, 0) * SIZES.H + i_h
    corrected, seq_len = tl.load(p_corrected + i_unit).to(tl.int32), tl.load(p_seq_lens + i_b).to(tl.int32)
    p_mine = p_slot_pages + i_head * SIZES.C, p_attended + i_head * SIZES.A, p_row_frames + tl.maximum(row, 0) * SIZES.C
    p_frames += i_b * P
    if REST:
        lost = tl.load(p_lost + i_unit).to(tl.int32)
    else:
        lost = tl.where(corrected == 0, _is_lost(p_mine, p_frames, row, SIZES), 0)
    more = 1 if REST else 1 - (corrected | lost)
    num_pages = tl.cdiv(seq_len + more, SIZES.S)
    last = tl.minimum(num_pages - SIZES.WINDOW, P)
    stands = (row <= 0) | stands_still(corrected, lost, seq_len, SIZES, REST, AHEAD_FIRST, ON_TURN)
    num_parts = tl.where(stands | (last - SIZES.SINK <= SIZES.P_MANY), 0, tl.cdiv(last - SIZES.SINK, SIZES.P_MANY))
    return i_unit, num_parts, last, most_to_choose(p_frames, num_pages, P, SIZES), p_mine


@triton.jit
def _is_lost(p_mine, p_frames, row, SIZES: tl.constexpr):
    """Whether a page that a kv head attends to in its frame has become absent."""
    _, p_list, _ = p_mine
    o_a = tl.arange(0, SIZES.A_BLOCK)
    b_entry = tl.load(p_list + o_a, mask=(o_a < SIZES.A) & (row > 0), other=-1)
    m_resident = b_entry < -1
    return tl.max((m_resident & (tl.load(p_frames - 2 - b_entry, mask=m_resident, other=0) < 0)).to(tl.int32), 0)


@triton.jit
def _joined(p_norms, num_parts, SIZES: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """What ``norms`` would return for all parts; the same in every program."""
    o_n, o_g = tl.arange(0, PARTS_BLOCK)[:, None], tl.arange(0, SIZES.G_BLOCK)[None, :]
    p_part = p_norms + o_n * 2 * SIZES.G_BLOCK + o_g
    b_tops = tl.load(p_part, mask=o_n < num_parts, other=float("-inf"))
    b_log_sums = tl.load(p_part + SIZES.G_BLOCK, mask=o_n < num_parts, other=0.0)
    b_top = tl.max(b_tops, 0)
    return b_top, tl.log(tl.sum(tl.exp(b_tops + b_log_sums - b_top[None, :]), 0))
