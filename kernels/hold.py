# SPDX-License-Identifier: Apache-2.0
"""Hold: how the pages of an extend get frames, and lose those of earlier owners. One program does all of a kernel's work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables
from sglang_freekv.kernels.frames import pop, push, stack

WHOLE = tl.constexpr(frame_tables.WHOLE)
STRANDED, BROUGHT = tl.constexpr(frame_tables.STRANDED), tl.constexpr(frame_tables.BROUGHT)
PAGES = 1024  # at once


def hold_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    tables: FrameTables,
    page_size: int,
    given: torch.Tensor,
    *,
    keep: int = 0,
) -> None:
    """As reference.hold_pages."""
    assert req_to_token.stride(1) == given.stride(1) == 1
    _hold_kernel[(1,)](
        req_to_token,
        rows,
        seq_lens,
        prefix_lens,
        given,
        tables.frame_of,
        tables.page_of,
        tables.row_frames,
        *stack(tables),
        len(rows),
        keep,
        req_to_token.stride(0),
        tables.row_frames.stride(0),
        given.stride(0),
        S=page_size,
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
        tables.frame_of,
        tables.page_of,
        tables.free,
        tables.free_count,
        len(rows),
        req_to_token.stride(0),
        S=page_size,
        BLOCK_P=PAGES,
    )


@triton.jit(do_not_specialize=("B", "keep", "token_stride_row", "frames_stride_row", "given_stride_b"))
def _hold_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_prefix_lens,  # [B]
    p_given,  # [B, P]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_row_frames,  # [R, C]
    p_free,  # [N]
    p_free_count,  # [1]
    p_counts,  # [7]
    B,
    keep,
    token_stride_row,
    frames_stride_row,
    given_stride_b,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    count = tl.load(p_free_count)
    brought, stranded = 0, 0
    for turn in range(2):  # whole rows, then partial ones
        for i_b in range(B):
            p_tokens, num_pages = _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S)
            first = tl.load(p_row_frames + tl.load(p_rows + i_b).to(tl.int64) * frames_stride_row)
            num_pages = tl.where((first == WHOLE) == (turn == 0), num_pages, 0)
            new = tl.load(p_prefix_lens + i_b).to(tl.int32) // S
            for start in range(0, num_pages, BLOCK_P):
                o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
                b_page = tl.load(p_tokens + o_p * S, mask=o_p < num_pages, other=0) // S
                m_absent = (b_page > 0) & (tl.load(p_frame_of + b_page, mask=b_page > 0, other=0) < 0)
                tl.debug_barrier()  # all threads have read what some overwrite
                b_frame, m_served, count = pop(m_absent, p_free, count, keep * turn)
                tl.store(p_frame_of + b_page, b_frame, mask=m_served)
                tl.store(p_page_of + b_frame, b_page, mask=m_served)
                tl.store(p_given + i_b * given_stride_b + o_p, b_frame, mask=m_served)
                brought += tl.sum((m_served & (o_p < new)).to(tl.int32), 0)
                stranded += tl.sum((m_absent & ~m_served).to(tl.int32), 0) * (1 - turn)
                tl.debug_barrier()  # another request may have the page too
    tl.store(p_free_count, count)
    tl.store(p_counts + BROUGHT, tl.load(p_counts + BROUGHT) + brought)
    tl.store(p_counts + STRANDED, tl.load(p_counts + STRANDED) + stranded)


@triton.jit(do_not_specialize=("B", "token_stride_row"))
def _forget_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_prefix_lens,  # [B]
    p_frame_of,  # [host pages]
    p_page_of,  # [N]
    p_free,  # [N]
    p_free_count,  # [1]
    B,
    token_stride_row,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    count = tl.load(p_free_count)
    for i_b in range(B):
        p_tokens, num_pages = _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S)
        for start in range(tl.load(p_prefix_lens + i_b).to(tl.int32) // S, num_pages, BLOCK_P):
            o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
            b_page = tl.load(p_tokens + o_p * S, mask=o_p < num_pages, other=0) // S
            b_frame = tl.load(p_frame_of + b_page, mask=b_page > 0, other=-1)
            tl.debug_barrier()  # all threads have read what some overwrite
            tl.store(p_frame_of + b_page, -1, mask=b_frame >= 0)
            count = push(b_frame, b_frame >= 0, p_page_of, p_free, count)
            tl.debug_barrier()  # another request may have the page too
    tl.store(p_free_count, count)


@triton.jit
def _context(p_req_to_token, p_rows, p_seq_lens, i_b, token_stride_row, S: tl.constexpr):
    """KV indices of a request's context, and its number of pages, 0 for padding."""
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    num_pages = tl.where(i_row > 0, tl.cdiv(tl.load(p_seq_lens + i_b).to(tl.int32), S), 0)
    return p_req_to_token + i_row * token_stride_row, num_pages
