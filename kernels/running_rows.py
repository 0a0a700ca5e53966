# SPDX-License-Identifier: Apache-2.0
"""Running rows: which they are, and the pages that they use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables
from sglang_freekv.kernels.frames import push

DEPTH_BITS, DEEPEST = tl.constexpr(frame_tables.DEPTH_BITS), tl.constexpr(frame_tables.DEEPEST)
IN_USE = tl.constexpr(frame_tables.IN_USE)
BLOCK = 256
PROGRAMS = 1024  # enough for the device, and few enough that rows which do not run cost little


def note_rows(ended: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, tables: FrameTables) -> None:
    """As reference.note_rows, in one program."""
    _note_kernel[(1,)](
        ended,
        rows,
        seq_lens,
        tables.page_of,
        tables.free,
        tables.free_count,
        tables.in_hand,
        tables.row_lens,
        tables.counts,
        len(ended),
        len(rows),
        NUM_COUNTS=len(tables.counts),
        BLOCK_B=BLOCK,
    )


def mark_pages(req_to_token: torch.Tensor, tables: FrameTables, page_size: int, now: int) -> None:
    """As reference.mark_pages. The programs of a row take its pages in turn."""
    (num_rows, num_tokens), most = req_to_token.shape, page_size * BLOCK
    assert req_to_token.stride(1) == 1 and len(tables.row_lens) <= num_rows
    parts = min(triton.cdiv(PROGRAMS, len(tables.row_lens)), triton.cdiv(num_tokens, most))
    _mark_kernel[(len(tables.row_lens), parts)](
        req_to_token,
        tables.row_lens,
        tables.frame_of,
        tables.last_use,
        tables.counts,
        req_to_token.stride(0),
        now,
        S=page_size,
        BLOCK_P=BLOCK,
    )


@triton.jit(do_not_specialize=("M", "B"))
def _note_kernel(
    p_ended,  # [M]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_of,  # [N]
    p_free,  # [N]
    p_free_count,  # [1]
    p_in_hand,  # [R]
    p_row_lens,  # [R]
    p_counts,  # [4]
    M,
    B,
    NUM_COUNTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    count = tl.load(p_free_count)
    for start in range(0, M, BLOCK_B):
        o_m = start + tl.arange(0, BLOCK_B)
        b_row = tl.load(p_ended + o_m, mask=o_m < M, other=0).to(tl.int64)
        b_hand = tl.load(p_in_hand + b_row, mask=b_row > 0, other=-1)
        tl.store(p_in_hand + b_row, -1, mask=b_row > 0)
        tl.store(p_row_lens + b_row, 0, mask=b_row > 0)
        count = push(b_hand, b_hand >= 0, p_page_of, p_free, count)
    tl.debug_barrier()  # a row may have ended and run again
    for start in range(0, B, BLOCK_B):
        o_b = start + tl.arange(0, BLOCK_B)
        b_row = tl.load(p_rows + o_b, mask=o_b < B, other=0).to(tl.int64)
        tl.store(p_row_lens + b_row, tl.load(p_seq_lens + o_b, mask=b_row > 0, other=0).to(tl.int32), mask=b_row > 0)
    tl.store(p_free_count, count)
    tl.store(p_counts + tl.arange(0, NUM_COUNTS), tl.zeros((NUM_COUNTS,), tl.int32))


@triton.jit(do_not_specialize=("token_stride_row", "now"))
def _mark_kernel(
    p_req_to_token,  # [R, T]
    p_row_lens,  # [R]
    p_frame_of,  # [host pages]
    p_last_use,  # [host pages]
    p_counts,  # [4]
    token_stride_row,
    now,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    num_pages = tl.cdiv(tl.load(p_row_lens + i_row), S)
    now = now.to(tl.int64)
    used = 0
    for start in range(tl.program_id(1) * BLOCK_P, num_pages, tl.num_programs(1) * BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P).to(tl.int64)
        b_page = tl.load(p_req_to_token + i_row * token_stride_row + o_p * S, mask=o_p < num_pages, other=0) // S
        b_mark = now << DEPTH_BITS | (DEEPEST - o_p)
        b_before = tl.atomic_max(p_last_use + b_page, b_mark, mask=b_page > 0, sem="relaxed")
        m_first = (b_page > 0) & (b_before >> DEPTH_BITS < now)
        used += tl.sum((tl.load(p_frame_of + b_page, mask=m_first, other=-1) >= 0).to(tl.int32), 0)
    if used > 0:
        tl.atomic_add(p_counts + IN_USE, used, sem="relaxed")
