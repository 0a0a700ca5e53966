# SPDX-License-Identifier: Apache-2.0
"""Score: the score of every candidate page, from its box digest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.follow import can_follow, let_next_in

# Three for each SM of an H100 or H200, all resident at once: a kernel launched beside them need not wait for programs that queue.
# Trials: benchmarks/results/bench_step-history.json.
PROGRAMS = 396


def score_pages(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    *,
    scale: float,
    selects: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`reference.score_pages`. Only candidates are written, and none for a padding request or a kv head that does not select.

    One program for each (share of the tiles of pages, kv head, request). ``queries`` may be a view of wider rows.
    """
    (batch, num_heads, head_dim), num_kv_heads, num_pages = queries.shape, digests.shape[1], page_table.shape[1]
    group = num_heads // num_kv_heads
    assert queries.stride(2) == 1 and digests.is_contiguous() and page_table.is_contiguous()
    logits = torch.empty(batch, num_heads, num_pages, dtype=torch.float32, device=queries.device)
    block_d = triton.next_power_of_2(2 * head_dim)
    block_p = max(16, min(64, 32768 // (block_d * digests.element_size())))
    shares = max(1, min(PROGRAMS // (batch * num_kv_heads), triton.cdiv(num_pages, block_p)))
    _score_pages[(shares, num_kv_heads, batch)](
        queries,
        digests,
        rows,
        seq_lens,
        page_table,
        logits,
        selects,
        queries.stride(0),
        queries.stride(1),
        num_pages,
        budget.sink,
        budget.window,
        scale,
        H=num_kv_heads,
        G=group,
        D=head_dim,
        S=page_size,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        FOLLOWED=can_follow(queries.device),
        num_warps=4,
        num_stages=2,
    )
    return logits


@triton.jit(do_not_specialize=("sink", "window"))
def _score_pages(
    p_queries,  # [B, Hq, D]
    p_digests,  # [n_page, H, 2, D]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_logits,  # [B, Hq, P]
    p_selects,  # [B, H] or None
    stride_b,
    stride_h,
    P,
    sink,
    window,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    let_next_in(FOLLOWED)
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens = tl.load(p_seq_lens + i_b).to(tl.int32) + 1
    row = tl.load(p_rows + i_b)
    end = tl.where(row != 0, tl.minimum((tokens + S - 1) // S - window, P), 0)
    if p_selects is not None:
        end = tl.where(tl.load(p_selects + i_b * H + i_h).to(tl.int32) != 0, end, 0)
    first = sink + i_n * BLOCK_P
    if first >= end:
        return

    o_t, o_g, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < G, o_d < 2 * D
    o_head = i_h * G + o_g
    b_q = tl.load(
        p_queries + i_b * stride_b + o_head[:, None] * stride_h + (o_d % D)[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0
    ).to(tl.float32)
    b_q = tl.where((o_d < D)[None, :], tl.maximum(b_q, 0.0), tl.minimum(b_q, 0.0))  # [relu(q) | -relu(-q)]
    b_q = b_q.to(p_digests.dtype.element_ty)
    p_table = p_page_table + i_b * P
    p_out = p_logits + (i_b * (H * G) + o_head[:, None]) * P
    b_page = tl.load(p_table + first + o_t, mask=first + o_t < end, other=0)
    for start in range(first, end, tl.num_programs(0) * BLOCK_P):
        o_p = start + o_t
        unit = (tl.maximum(b_page, 0).to(tl.int64) * H + i_h) * (2 * D)
        m_p = o_p < end
        b_digest = tl.load(p_digests + unit[:, None] + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0.0)  # upper | lower
        o_next = o_p + tl.num_programs(0) * BLOCK_P
        b_page = tl.load(p_table + o_next, mask=o_next < end, other=0)
        b_bound = tl.dot(b_q, tl.trans(b_digest), input_precision="ieee")
        tl.store(p_out + o_p[None, :], b_bound * scale, mask=m_g[:, None] & m_p[None, :])
