# SPDX-License-Identifier: Apache-2.0
"""Page table: the host page and the frame of each logical page of a forward pass, read from SGLang's KV indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables

ABSENT = tl.constexpr(frame_tables.ABSENT)
BLOCK = 256


def snapshot_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    tables: FrameTables | None = None,
    frames: torch.Tensor | None = None,
) -> None:
    """As reference.snapshot_pages; one program for every BLOCK pages of a request."""
    num_rows, num_pages = page_table.shape
    assert req_to_token.stride(1) == page_table.stride(1) == 1
    assert frames is None or frames.shape == page_table.shape and frames.stride() == page_table.stride()
    _snapshot_kernel[(num_rows, triton.cdiv(num_pages, BLOCK))](
        req_to_token,
        rows,
        seq_lens,
        page_table,
        frames,
        *((None, None, None, None) if tables is None else (tables.frame_of, tables.in_hand, tables.row_absent, tables.counts)),
        num_pages,
        req_to_token.shape[1],
        req_to_token.stride(0),
        page_table.stride(0),
        S=page_size,
        BLOCK_P=BLOCK,
    )


@triton.jit(do_not_specialize=("num_pages", "num_tokens", "token_stride_row", "table_stride_b"))
def _snapshot_kernel(
    p_req_to_token,  # [R, T]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_frames,  # [B, P] or None
    p_frame_of,  # [host pages] or None
    p_in_hand,  # [R] or None
    p_row_absent,  # [R] or None
    p_counts,  # [7] or None
    num_pages,
    num_tokens,
    token_stride_row,
    table_stride_b,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    length = tl.load(p_seq_lens + i_b).to(tl.int64)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_first, o_table = o_p.to(tl.int64) * S, i_b * table_stride_b + o_p
    m_begun = (o_first <= length) & (o_first < num_tokens) & (o_p < num_pages)
    b_page = tl.load(p_req_to_token + i_row * token_stride_row + o_first, mask=m_begun, other=0) // S
    tl.store(p_page_table + o_table, b_page, mask=o_p < num_pages)
    if p_frames is not None:
        m_page = m_begun & (o_first < length) & (i_row > 0)
        b_frame = tl.load(p_frame_of + b_page, mask=m_page, other=-1)
        absent = tl.sum((m_page & (b_frame < 0)).to(tl.int32), 0)
        m_next = m_begun & (o_first == length) & (i_row > 0)
        b_frame = tl.where(m_next, tl.load(p_in_hand + i_row), b_frame)
        tl.store(p_frames + o_table, b_frame, mask=o_p < num_pages)
        if absent > 0:
            tl.atomic_add(p_row_absent + i_row, absent, sem="relaxed")
            tl.atomic_add(p_counts + ABSENT, absent.to(tl.int64), sem="relaxed")
