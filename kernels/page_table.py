# SPDX-License-Identifier: Apache-2.0
"""Page table: the host page of each logical page of a forward pass, read from SGLang's token slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


def snapshot_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> None:
    """As reference.snapshot_pages; one program for every BLOCK pages of a request."""
    num_rows, num_pages = page_table.shape
    assert req_to_token.stride(1) == page_table.stride(1) == 1
    _snapshot_kernel[(num_rows, triton.cdiv(num_pages, BLOCK))](
        req_to_token,
        rows,
        seq_lens,
        page_table,
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
    num_pages,
    num_tokens,
    token_stride_row,
    table_stride_b,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    i_row = tl.load(p_rows + i_b).to(tl.int64)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_first = o_p.to(tl.int64) * S
    begun = (o_first <= tl.load(p_seq_lens + i_b)) & (o_first < num_tokens)
    b_tokens = tl.load(p_req_to_token + i_row * token_stride_row + o_first, mask=begun & (o_p < num_pages), other=0)
    tl.store(p_page_table + i_b * table_stride_b + o_p, b_tokens // S, mask=o_p < num_pages)
