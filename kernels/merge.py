# SPDX-License-Identifier: Apache-2.0
"""Merge: add up the shares of decode attention."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.follow import await_previous, following

LOG2_E = tl.constexpr(math.log2(math.e))


def merge_shares(
    outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype, learned_sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """As :func:`reference.merge_shares`; one program for each (request, query head)."""
    batch, num_heads, num_shares, head_dim = outputs.shape
    assert learned_sinks is None or learned_sinks.shape == (num_heads,)
    output = torch.empty(batch, num_heads, head_dim, dtype=dtype, device=outputs.device)
    block_n = triton.next_power_of_2(num_shares)
    _merge_shares[(num_heads, batch)](
        outputs,
        weights,
        learned_sinks,
        output,
        num_shares,
        D=head_dim,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=max(1, block_n // 32),
        **following(output.device),
    )
    return output


@triton.jit(do_not_specialize=("N",))
def _merge_shares(
    p_parts,  # [B, Hq, N, D]
    p_weights,  # [B, Hq, N], logarithms to base 2
    p_learned_sinks,  # [Hq] or None
    p_output,  # [B, Hq, D]
    N,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    i_head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    b_weight = tl.load(p_weights + i_head * N + o_n, mask=o_n < N, other=float("-inf"))
    m_n, m_d = b_weight != float("-inf"), o_d < D  # a part of weight -inf may never have been written
    o_part = (i_head * N + o_n)[:, None] * D + o_d[None, :]
    b_part = tl.load(p_parts + o_part, mask=m_n[:, None] & m_d[None, :], other=0.0)
    top = tl.max(b_weight, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    b_share = tl.exp2(b_weight - base)
    total = tl.sum(b_share, 0)
    if p_learned_sinks is not None:
        total += tl.exp2(tl.load(p_learned_sinks + tl.program_id(0)).to(tl.float32) * LOG2_E - base)  # infinity leaves nothing
    b_out = tl.sum(b_part * b_share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(p_output + i_head * D + o_d, b_out.to(p_output.dtype.element_ty), mask=m_d)
