# SPDX-License-Identifier: Apache-2.0
"""Frames: how they change hands between passes. One program does all of a kernel's work, so that frames are popped in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables

FREE, IN_HAND, WHOLE = tl.constexpr(frame_tables.FREE), tl.constexpr(frame_tables.IN_HAND), tl.constexpr(frame_tables.WHOLE)
LEFT, UNSERVED = tl.constexpr(frame_tables.LEFT), tl.constexpr(frame_tables.UNSERVED)
STRANDED = tl.constexpr(frame_tables.STRANDED)
REQUESTS = 256  # at once


def begin_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, *, keep: int = 0
) -> None:
    """As reference.begin_pages."""
    assert req_to_token.stride(1) == 1
    _begin_kernel[(1,)](
        req_to_token,
        rows,
        seq_lens,
        tables.frame_of,
        *_hands(tables),
        *stack(tables),
        len(rows),
        keep,
        req_to_token.stride(0),
        tables.row_frames.stride(0),
        S=page_size,
        BLOCK_B=REQUESTS,
    )


def take_in_hand(rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, *, keep: int = 0) -> None:
    """As reference.take_in_hand."""
    frames_stride_row = tables.row_frames.stride(0)
    _hand_kernel[(1,)](rows, seq_lens, *_hands(tables), *stack(tables), len(rows), keep, frames_stride_row, S=page_size, BLOCK_B=REQUESTS)


def _hands(tables: FrameTables) -> tuple[torch.Tensor, ...]:
    return tables.page_of, tables.in_hand, tables.row_frames


def stack(tables: FrameTables) -> tuple[torch.Tensor, ...]:
    return tables.free, tables.free_count, tables.counts


@triton.jit(do_not_specialize=("B", "keep", "token_stride_row", "frames_stride_row"))
def _begin_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_in_hand,  # [R]
    p_row_frames,  # [R, C]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [7]
    B,
    keep,
    token_stride_row,
    frames_stride_row,
    S: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    count = tl.load(p_free_count)
    for start in range(0, B, BLOCK_B):
        b_row, b_len = _requests(p_rows, p_seq_lens, start, B, BLOCK_B)
        m_begins = (b_row > 0) & (b_len % S == 1 % S)
        b_page = tl.load(p_req_to_token + b_row * token_stride_row + b_len - 1, mask=m_begins, other=0) // S
        b_hand = tl.load(p_in_hand + b_row, mask=m_begins, other=-1)
        b_frame = tl.load(p_frame_of + b_page, mask=m_begins, other=-1)
        tl.debug_barrier()  # all threads have read what some overwrite
        m_taken, m_stale = (b_page > 0) & (b_frame < 0) & (b_hand >= 0), (b_frame >= 0) & (b_hand < 0)
        tl.store(p_frame_of + b_page, b_hand, mask=m_taken | m_stale)  # nothing in hand of a stale page
        tl.store(p_page_of + b_hand, b_page, mask=m_taken)
        tl.store(p_in_hand + b_row, -1, mask=m_taken)
        count = push(b_frame, m_stale, p_page_of, p_free, count)
    tl.debug_barrier()  # hands and the stack have been written
    hands = p_page_of, p_in_hand, p_row_frames, p_free
    _take_in_hand(p_rows, p_seq_lens, hands, p_free_count, p_counts, B, count, keep, frames_stride_row, S, BLOCK_B)


@triton.jit(do_not_specialize=("B", "keep", "frames_stride_row"))
def _hand_kernel(
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_of,  # [N]
    p_in_hand,  # [R]
    p_row_frames,  # [R, C]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [7]
    B,
    keep,
    frames_stride_row,
    S: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    count, hands = tl.load(p_free_count), (p_page_of, p_in_hand, p_row_frames, p_free)
    _take_in_hand(p_rows, p_seq_lens, hands, p_free_count, p_counts, B, count, keep, frames_stride_row, S, BLOCK_B)


@triton.jit
def _take_in_hand(
    p_rows, p_seq_lens, hands, p_free_count, p_counts, B, count, keep, frames_stride_row, S: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Take frames in hand, as the reference does, and end the kernel. ``count`` frames are free."""
    p_page_of, p_in_hand, p_row_frames, p_free = hands
    unserved, stranded = 0, 0
    for turn in range(2):  # whole rows, then partial ones
        for start in range(0, B, BLOCK_B):
            b_row, b_len = _requests(p_rows, p_seq_lens, start, B, BLOCK_B)
            m_full = (b_row > 0) & (b_len % S == 0)
            b_first = tl.load(p_row_frames + b_row * frames_stride_row, mask=m_full, other=0)
            m_full = m_full & ((b_first == WHOLE) == (turn == 0))
            m_wants = m_full & (tl.load(p_in_hand + b_row, mask=m_full, other=0) < 0)
            tl.debug_barrier()  # all threads have read what some overwrite
            b_frame, m_served, count = pop(m_wants, p_free, count, keep * turn)
            tl.store(p_in_hand + b_row, b_frame, mask=m_served)
            tl.store(p_page_of + b_frame, IN_HAND, mask=m_served)
            missed = tl.sum((m_wants & ~m_served).to(tl.int32), 0)
            unserved += missed * turn
            stranded += missed * (1 - turn)
    tl.store(p_free_count, count)
    tl.store(p_counts + LEFT, count)
    tl.store(p_counts + UNSERVED, tl.load(p_counts + UNSERVED) + unserved)
    tl.store(p_counts + STRANDED, tl.load(p_counts + STRANDED) + stranded)


@triton.jit
def _requests(p_rows, p_seq_lens, start, B, BLOCK_B: tl.constexpr):
    """Rows and lengths of the requests from ``start`` on; row 0 beyond the last one."""
    o_b = start + tl.arange(0, BLOCK_B)
    return tl.load(p_rows + o_b, mask=o_b < B, other=0).to(tl.int64), tl.load(p_seq_lens + o_b, mask=o_b < B, other=0).to(tl.int64)


@triton.jit
def push(b_frame, m_frame, p_page_of, p_free, count):
    """Free the masked frames. Returns the new length of the stack, which may be read behind a barrier."""
    b_chosen = m_frame.to(tl.int32)
    tl.store(p_free + count + tl.cumsum(b_chosen, 0) - 1, b_frame, mask=m_frame)
    tl.store(p_page_of + b_frame, FREE, mask=m_frame)
    return count + tl.sum(b_chosen, 0)


@triton.jit
def pop(m_wants, p_free, count, keep):
    """Frames for the masked places, while more than ``keep`` are free, and the new length of the stack."""
    b_wants = m_wants.to(tl.int32)
    b_place = count - tl.cumsum(b_wants, 0)
    m_served = m_wants & (b_place >= keep)
    return tl.load(p_free + b_place, mask=m_served, other=-1), m_served, count - tl.sum(m_served.to(tl.int32), 0)
