# SPDX-License-Identifier: Apache-2.0
"""Correction: which kv heads have a query unlike their last one, and which select."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.candidates import Turn
from sglang_freekv.kernels.reference import CORRECTED
from sglang_freekv.kernels.select import due


def needs_correction(
    queries: torch.Tensor,
    rows: torch.Tensor,
    previous: torch.Tensor,
    tau: float,
    counts: torch.Tensor,
    num_kv_heads: int,
    *,
    turn: Turn | None = None,
) -> torch.Tensor:
    """As :func:`reference.needs_correction`; one program for each (request, kv head). ``queries`` may be a view of wider rows."""
    batch, num_heads, head_dim = queries.shape
    group = num_heads // num_kv_heads
    assert queries.stride(2) == 1 and previous.is_contiguous() and counts.is_contiguous()
    corrected = torch.empty(batch, num_kv_heads, dtype=torch.bool, device=queries.device)
    given, sizes = launch_of(turn)
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
        *given,
        H=num_kv_heads,
        G=group,
        D=head_dim,
        COUNTS=counts.shape[1],
        COLUMN=CORRECTED,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        num_warps=min(4, max(1, block_g * block_d // 1024)),
        **sizes,
    )
    return corrected


def launch_of(turn: Turn | None) -> tuple[tuple[torch.Tensor | int | None, ...], dict[str, int]]:
    """Arguments of a kernel that calls ``note_turn``: from ``p_seq_lens`` to ``P``, and sizes."""
    if turn is None:
        return (None, None, None, None, 1), dict.fromkeys(("S", "A", "A_BLOCK", "BUDGET"), 1)
    attended = turn.tables.attended
    assert attended.is_contiguous() and turn.frames.is_contiguous() and turn.selects.is_contiguous()
    given = turn.seq_lens, attended, turn.frames, turn.selects, turn.frames.shape[1]
    width = attended.shape[2]
    return given, {"S": turn.page_size, "A": width, "A_BLOCK": triton.next_power_of_2(width), "BUDGET": turn.budget.total}


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
    p_seq_lens,  # [B] or None
    p_attended,  # [R, H, A] or None
    p_frames,  # [B, P] or None
    p_selects,  # [B, H] or None
    P,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COUNTS: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    BUDGET: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if row == 0:
        tl.store(p_corrected + i_b * H + i_h, row != 0)
        if p_selects is not None:
            tl.store(p_selects + i_b * H + i_h, row != 0)
        return
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (o_g < G)[:, None] & (o_d < D)[None, :]
    o_head = i_h * G + o_g
    b_new = tl.load(p_queries + i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :], mask=mask, other=0.0)
    p_old = p_previous + row * (H * G * D) + o_head[:, None] * D + o_d[None, :]
    b_old = tl.load(p_old, mask=mask, other=0.0)

    x, y = b_new.to(tl.float32), b_old.to(tl.float32)
    x /= tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-8)[:, None]  # divided before the product, as torch does, so that nothing overflows
    y /= tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-8)[:, None]
    corrected = tl.sum(tl.sum(x * y, 1), 0) / G < tau
    if p_selects is not None:
        p_list = p_attended + (row * H + i_h) * A
        mask = mask & note_turn(p_selects + i_b * H + i_h, p_seq_lens + i_b, p_list, p_frames + i_b * P, corrected, S, A, A_BLOCK, BUDGET)
    tl.debug_barrier()  # all threads have read the last query before one overwrites it
    tl.store(p_old, b_new.to(p_previous.dtype.element_ty), mask=mask)
    tl.store(p_corrected + i_b * H + i_h, corrected)
    tl.atomic_add(p_counts + row * COUNTS + COLUMN, corrected.to(tl.int64), mask=corrected, sem="relaxed")


@triton.jit
def note_turn(
    p_selects, p_seq_len, p_list, p_frames, corrected, S: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, BUDGET: tl.constexpr
):
    """Write whether a kv head needs scores; returns whether it selects for itself, so that its query is remembered."""
    selects = tl.where(corrected, True, due(tl.load(p_seq_len).to(tl.int32), S, A, BUDGET))
    o_a = tl.arange(0, A_BLOCK)
    b_entry = tl.load(p_list + o_a, mask=o_a < A, other=-1)
    b_frame = tl.load(p_frames + (-2 - b_entry), mask=b_entry < -1, other=0)  # of a page that was resident
    lost = tl.max((b_frame < 0).to(tl.int32), 0) > 0
    tl.store(p_selects, selects | lost)
    return selects
