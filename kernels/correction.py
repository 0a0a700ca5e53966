# SPDX-License-Identifier: Apache-2.0
"""Correction: which kv heads have a query unlike their last one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.reference import CORRECTED


def needs_correction(
    queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, tau: float, counts: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """As :func:`reference.needs_correction`; one program for each (request, kv head). ``queries`` may be a view of wider rows."""
    batch, num_heads, head_dim = queries.shape
    group = num_heads // num_kv_heads
    assert queries.stride(2) == 1 and previous.is_contiguous() and counts.is_contiguous()
    corrected = torch.empty(batch, num_kv_heads, dtype=torch.bool, device=queries.device)
    block_g, block_d = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _needs_correction[(batch, num_kv_heads)](
        queries,
        rows,
        previous,
        counts,
        corrected,
        float(tau),
        queries.stride(0),
        queries.stride(1),
        H=num_kv_heads,
        G=group,
        D=head_dim,
        COUNTS=counts.shape[1],
        COLUMN=CORRECTED,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        num_warps=min(4, max(1, block_g * block_d // 1024)),
    )
    return corrected


@triton.jit
def _needs_correction(
    p_queries,  # [B, Hq, D]
    p_rows,  # [B]
    p_previous,  # [R, Hq, D]
    p_counts,  # [R, COUNTS]
    p_corrected,  # [B, H]
    tau,
    stride_b,
    stride_h,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COUNTS: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if row == 0:
        tl.store(p_corrected + i_b * H + i_h, row != 0)
        return
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (o_g < G)[:, None] & (o_d < D)[None, :]
    o_head = i_h * G + o_g
    b_new = tl.load(p_queries + i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :], mask=mask, other=0.0)
    p_old = p_previous + row * (H * G * D) + o_head[:, None] * D + o_d[None, :]
    b_old = tl.load(p_old, mask=mask, other=0.0)
    tl.debug_barrier()  # all threads have read the last query before one overwrites it
    tl.store(p_old, b_new.to(p_previous.dtype.element_ty), mask=mask)

    x, y = b_new.to(tl.float32), b_old.to(tl.float32)
    x /= tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-8)[:, None]  # divided before the product, as torch does, so that nothing overflows
    y /= tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-8)[:, None]
    corrected = tl.sum(tl.sum(x * y, 1), 0) / G < tau
    tl.store(p_corrected + i_b * H + i_h, corrected)
    tl.atomic_add(p_counts + row * COUNTS + COLUMN, corrected.to(tl.int64), mask=corrected, sem="relaxed")
