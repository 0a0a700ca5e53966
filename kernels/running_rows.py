# SPDX-License-Identifier: Apache-2.0
"""Running rows: which they are, the slots that they have, and the pages that they use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables
from sglang_freekv.kernels.frames import pop, push

DEPTH_BITS, DEEPEST = tl.constexpr(frame_tables.DEPTH_BITS), tl.constexpr(frame_tables.DEEPEST)
IN_USE, STRANDED = tl.constexpr(frame_tables.IN_USE), tl.constexpr(frame_tables.STRANDED)
LENT, WHOLE, ASKED = tl.constexpr(frame_tables.LENT), tl.constexpr(frame_tables.WHOLE), tl.constexpr(frame_tables.ASKED)
BLOCK = 256
PROGRAMS = 1024  # enough for the device, and few enough that rows which do not run cost little


def note_rows(ended: torch.Tensor, lent: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables) -> None:
    """As reference.note_rows, in one program."""
    num_slots = tables.row_frames.shape[1]
    _note_kernel[(1,)](
        ended,
        lent,
        rows,
        seq_lens,
        tables.page_of,
        tables.free,
        tables.free_count,
        tables.in_hand,
        tables.row_lens,
        tables.row_frames,
        tables.row_absent,
        tables.counts,
        len(ended),
        len(lent),
        len(rows),
        num_slots,
        OF_A_PASS=frame_tables.STRANDED,
        BLOCK_B=BLOCK,
        BLOCK_C=triton.next_power_of_2(num_slots),
    )


def lend_slots(lent: torch.Tensor, tables: FrameTables) -> None:
    """As reference.lend_slots, in one program."""
    num_slots = tables.row_frames.shape[1]
    stack = tables.free, tables.free_count, tables.counts
    _lend_kernel[(1,)](lent, tables.page_of, tables.row_frames, *stack, len(lent), num_slots, BLOCK_C=triton.next_power_of_2(num_slots))


def mark_pages(req_to_token: torch.Tensor, tables: FrameTables, page_size: int, now: int) -> None:
    """As reference.mark_pages. The programs of a row take its pages in turn."""
    (num_rows, num_tokens), most = req_to_token.shape, page_size * BLOCK
    assert req_to_token.stride(1) == 1 and len(tables.row_lens) <= num_rows
    parts = min(triton.cdiv(PROGRAMS, len(tables.row_lens)), triton.cdiv(num_tokens, most))
    _mark_kernel[(len(tables.row_lens), parts)](
        req_to_token,
        tables.row_lens,
        tables.row_frames,
        tables.frame_of,
        tables.last_use,
        tables.counts,
        req_to_token.stride(0),
        tables.row_frames.stride(0),
        now,
        S=page_size,
        BLOCK_P=BLOCK,
    )


@triton.jit(do_not_specialize=("M", "N", "B", "C"))
def _note_kernel(
    p_ended,  # [M]
    p_lent,  # [N]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_of,  # [frames]
    p_free,  # [frames]
    p_free_count,  # [1]
    p_in_hand,  # [R]
    p_row_lens,  # [R]
    p_row_frames,  # [R, C]
    p_row_absent,  # [R]
    p_counts,  # [7]
    M,
    N,
    B,
    C,
    OF_A_PASS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    count = tl.load(p_free_count)
    for start in range(0, M, BLOCK_B):
        b_row, _ = _rows(p_ended, start, M, BLOCK_B)
        b_hand = tl.load(p_in_hand + b_row, mask=b_row > 0, other=-1)
        tl.debug_barrier()  # all threads have read what some overwrite
        tl.store(p_in_hand + b_row, -1, mask=b_row > 0)
        tl.store(p_row_lens + b_row, 0, mask=b_row > 0)
        count = push(b_hand, b_hand >= 0, p_page_of, p_free, count)
    o_c = tl.arange(0, BLOCK_C)
    for i in range(M):
        p_slots = p_row_frames + tl.load(p_ended + i).to(tl.int64) * C + o_c
        b_slot = tl.load(p_slots, mask=o_c < C, other=-1)
        tl.debug_barrier()  # all threads have read what some overwrite
        tl.store(p_slots, WHOLE, mask=o_c < C)
        count = push(b_slot, b_slot >= 0, p_page_of, p_free, count)
    tl.debug_barrier()  # a row may have ended, and run again
    for start in range(0, N, BLOCK_B):
        b_row, _ = _rows(p_lent, start, N, BLOCK_B)
        b_first = tl.load(p_row_frames + b_row * C, mask=b_row > 0, other=0)
        tl.debug_barrier()  # all threads have read what some overwrite
        tl.store(p_row_frames + b_row * C, ASKED, mask=b_first == WHOLE)
    for start in range(0, B, BLOCK_B):
        b_row, o_b = _rows(p_rows, start, B, BLOCK_B)
        tl.store(p_row_lens + b_row, tl.load(p_seq_lens + o_b, mask=b_row > 0, other=0).to(tl.int32), mask=b_row > 0)
        tl.store(p_row_absent + b_row, 0, mask=b_row > 0)
    tl.store(p_free_count, count)
    o_count = tl.arange(0, 8)
    tl.store(p_counts + o_count, tl.zeros((8,), tl.int64), mask=o_count < OF_A_PASS)


@triton.jit
def _rows(p_rows, start, length, BLOCK_B: tl.constexpr):
    """Rows from ``start`` on, row 0 beyond the last one, and their places."""
    o_b = start + tl.arange(0, BLOCK_B)
    return tl.load(p_rows + o_b, mask=o_b < length, other=0).to(tl.int64), o_b


@triton.jit(do_not_specialize=("N", "C"))
def _lend_kernel(
    p_lent,  # [N]
    p_page_of,  # [frames]
    p_row_frames,  # [R, C]
    p_free,  # [frames]
    p_free_count,  # [1]
    p_counts,  # [7]
    N,
    C,
    BLOCK_C: tl.constexpr,
):
    count, stranded = tl.load(p_free_count), 0
    o_c = tl.arange(0, BLOCK_C)
    for i in range(N):
        p_slots = p_row_frames + tl.load(p_lent + i).to(tl.int64) * C
        asked = tl.load(p_slots) == ASKED
        tl.debug_barrier()  # all threads have read what some overwrite
        b_frame, m_served, count = pop((o_c < C) & asked & (count >= C), p_free, count, 0)
        tl.store(p_slots + o_c, b_frame, mask=m_served)
        tl.store(p_page_of + b_frame, LENT, mask=m_served)
        stranded += (asked & (tl.sum(m_served.to(tl.int32), 0) == 0)).to(tl.int32)
    tl.store(p_free_count, count)
    tl.store(p_counts + STRANDED, tl.load(p_counts + STRANDED) + stranded)


@triton.jit(do_not_specialize=("token_stride_row", "frames_stride_row", "now"))
def _mark_kernel(
    p_req_to_token,  # [R, T]
    p_row_lens,  # [R]
    p_row_frames,  # [R, C]
    p_frame_of,  # [host pages]
    p_last_use,  # [host pages]
    p_counts,  # [7]
    token_stride_row,
    frames_stride_row,
    now,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(p_row_lens + i_row)
    num_pages, first = tl.cdiv(length, S), tl.load(p_row_frames + i_row * frames_stride_row)
    now = 2 * now.to(tl.int64)
    used = 0
    for start in range(tl.program_id(1) * BLOCK_P, num_pages, tl.num_programs(1) * BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
        b_page = tl.load(p_req_to_token + i_row * token_stride_row + o_p * S, mask=o_p < num_pages, other=0) // S
        b_pinned = ((first == WHOLE) | (o_p >= (length - 1) // S)).to(tl.int64)
        b_mark = (now + b_pinned) << DEPTH_BITS | (DEEPEST - o_p)
        b_before = tl.atomic_max(p_last_use + b_page, b_mark, mask=b_page > 0, sem="relaxed")
        m_first = (b_page > 0) & (b_before >> DEPTH_BITS < now)
        used += tl.sum((tl.load(p_frame_of + b_page, mask=m_first, other=-1) >= 0).to(tl.int32), 0)
    if used > 0:
        tl.atomic_add(p_counts + IN_USE, used, sem="relaxed")
