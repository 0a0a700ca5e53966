# SPDX-License-Identifier: Apache-2.0
"""Frames: how they change hands between passes. One program does all of a kernel's work, so that frames are popped in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables

FREE, IN_HAND = tl.constexpr(frame_tables.FREE), tl.constexpr(frame_tables.IN_HAND)
LEFT, UNSERVED = tl.constexpr(frame_tables.LEFT), tl.constexpr(frame_tables.UNSERVED)
REQUESTS, PAGES = 256, 1024  # at once


def begin_pages(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int) -> None:
    """As reference.begin_pages."""
    assert req_to_token.stride(1) == 1
    _begin_kernel[(1,)](
        req_to_token, rows, seq_lens, *_owners(tables), *_stack(tables), len(rows), req_to_token.stride(0), S=page_size, BLOCK_B=REQUESTS
    )


def hold_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables, page_size: int, given: torch.Tensor
) -> None:
    """As reference.hold_pages."""
    assert req_to_token.stride(1) == given.stride(1) == 1
    _hold_kernel[(1,)](
        req_to_token,
        rows,
        seq_lens,
        given,
        *_owners(tables),
        *_stack(tables),
        len(rows),
        req_to_token.stride(0),
        given.stride(0),
        S=page_size,
        BLOCK_B=REQUESTS,
        BLOCK_P=PAGES,
    )


def forget_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    tables: FrameTables,
    page_size: int,
) -> None:
    """As reference.forget_pages."""
    assert req_to_token.stride(1) == 1
    _forget_kernel[(1,)](
        req_to_token,
        rows,
        seq_lens,
        prefix_lens,
        *_owners(tables),
        *_stack(tables),
        len(rows),
        req_to_token.stride(0),
        S=page_size,
        BLOCK_B=REQUESTS,
        BLOCK_P=PAGES,
    )


def _owners(tables: FrameTables) -> tuple[torch.Tensor, ...]:
    return tables.frame_of, tables.page_of, tables.in_hand


def _stack(tables: FrameTables) -> tuple[torch.Tensor, ...]:
    return tables.free, tables.free_count, tables.counts


@triton.jit(do_not_specialize=("B", "token_stride_row"))
def _begin_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_in_hand,  # [R]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [4]
    B,
    token_stride_row,
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
        m_taken, m_stale = (b_page > 0) & (b_frame < 0) & (b_hand >= 0), (b_frame >= 0) & (b_hand < 0)
        tl.store(p_frame_of + b_page, b_hand, mask=m_taken | m_stale)  # nothing in hand of a stale page
        tl.store(p_page_of + b_hand, b_page, mask=m_taken)
        tl.store(p_in_hand + b_row, -1, mask=m_taken)
        count = push(b_frame, m_stale, p_page_of, p_free, count)
    _take_in_hand(p_rows, p_seq_lens, p_page_of, p_in_hand, p_free, p_free_count, p_counts, B, count, S, BLOCK_B)


@triton.jit(do_not_specialize=("B", "token_stride_row", "given_stride_b"))
def _hold_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_given,  # [B, P]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_in_hand,  # [R]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [4]
    B,
    token_stride_row,
    given_stride_b,
    S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    count = tl.load(p_free_count)
    unserved = 0
    for i_b in range(B):
        p_tokens, num_pages = _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S)
        for start in range(0, num_pages, BLOCK_P):
            o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
            b_page = tl.load(p_tokens + o_p * S, mask=o_p < num_pages, other=0) // S
            m_absent = (b_page > 0) & (tl.load(p_frame_of + b_page, mask=b_page > 0, other=0) < 0)
            b_frame, m_served, count = _pop(m_absent, p_free, count)
            tl.store(p_frame_of + b_page, b_frame, mask=m_served)
            tl.store(p_page_of + b_frame, b_page, mask=m_served)
            tl.store(p_given + i_b * given_stride_b + o_p, b_frame, mask=m_served)
            unserved += tl.sum((m_absent & ~m_served).to(tl.int32), 0)
            tl.debug_barrier()  # another request may have the page too
    tl.store(p_counts + UNSERVED, tl.load(p_counts + UNSERVED) + unserved)
    _take_in_hand(p_rows, p_seq_lens, p_page_of, p_in_hand, p_free, p_free_count, p_counts, B, count, S, BLOCK_B)


@triton.jit(do_not_specialize=("B", "token_stride_row"))
def _forget_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_prefix_lens,  # [B]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_in_hand,  # [R]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [4]
    B,
    token_stride_row,
    S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    count = tl.load(p_free_count)
    for i_b in range(B):
        p_tokens, num_pages = _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S)
        for start in range(tl.load(p_prefix_lens + i_b).to(tl.int32) // S, num_pages, BLOCK_P):
            o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
            b_page = tl.load(p_tokens + o_p * S, mask=o_p < num_pages, other=0) // S
            b_frame = tl.load(p_frame_of + b_page, mask=b_page > 0, other=-1)
            tl.store(p_frame_of + b_page, -1, mask=b_frame >= 0)
            count = push(b_frame, b_frame >= 0, p_page_of, p_free, count)
            tl.debug_barrier()  # another request may have the page too
    _take_in_hand(p_rows, p_seq_lens, p_page_of, p_in_hand, p_free, p_free_count, p_counts, B, count, S, BLOCK_B)


@triton.jit
def _take_in_hand(
    p_rows, p_seq_lens, p_page_of, p_in_hand, p_free, p_free_count, p_counts, B, count, S: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Take frames in hand, as the reference does, and end the kernel. ``count`` frames are free."""
    unserved = 0
    tl.debug_barrier()  # hands, counts and the stack have been written
    for start in range(0, B, BLOCK_B):
        b_row, b_len = _requests(p_rows, p_seq_lens, start, B, BLOCK_B)
        m_full = (b_row > 0) & (b_len % S == 0)
        m_wants = m_full & (tl.load(p_in_hand + b_row, mask=m_full, other=0) < 0)
        b_frame, m_served, count = _pop(m_wants, p_free, count)
        tl.store(p_in_hand + b_row, b_frame, mask=m_served)
        tl.store(p_page_of + b_frame, IN_HAND, mask=m_served)
        unserved += tl.sum((m_wants & ~m_served).to(tl.int32), 0)
    tl.store(p_free_count, count)
    tl.store(p_counts + LEFT, count)
    tl.store(p_counts + UNSERVED, tl.load(p_counts + UNSERVED) + unserved)


@triton.jit
def _requests(p_rows, p_seq_lens, start, B, BLOCK_B: tl.constexpr):
    """Rows and lengths of the requests from ``start`` on; row 0 beyond the last one."""
    o_b = start + tl.arange(0, BLOCK_B)
    return tl.load(p_rows + o_b, mask=o_b < B, other=0).to(tl.int64), tl.load(p_seq_lens + o_b, mask=o_b < B, other=0).to(tl.int64)


@triton.jit
def _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S: tl.constexpr):
    """Token slots of a request's context, and its number of pages, 0 for padding."""
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    num_pages = tl.where(i_row > 0, tl.cdiv(tl.load(p_seq_lens + i_b).to(tl.int32), S), 0)
    return p_req_to_token + i_row * token_stride_row, num_pages


@triton.jit
def push(b_frame, m_frame, p_page_of, p_free, count):
    """Free the masked frames. Returns the new length of the stack, which may be read behind a barrier."""
    b_chosen = m_frame.to(tl.int32)
    tl.store(p_free + count + tl.cumsum(b_chosen, 0) - 1, b_frame, mask=m_frame)
    tl.store(p_page_of + b_frame, FREE, mask=m_frame)
    return count + tl.sum(b_chosen, 0)


@triton.jit
def _pop(m_wants, p_free, count):
    """Frames for the masked places, where there are any, and the new length of the stack."""
    b_wants = m_wants.to(tl.int32)
    b_place = count - tl.cumsum(b_wants, 0)
    m_served = m_wants & (b_place >= 0)
    return tl.load(p_free + b_place, mask=m_served, other=-1), m_served, tl.maximum(count - tl.sum(b_wants, 0), 0)
