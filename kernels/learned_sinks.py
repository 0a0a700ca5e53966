# SPDX-License-Identifier: Apache-2.0
"""Learned sinks: let them take their part of an attention that was computed without them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.merge import LOG2_E

ELEMENTS = 4096  # of a program's tile


def add_learned_sinks(outputs: torch.Tensor, weights: torch.Tensor, learned_sinks: torch.Tensor) -> torch.Tensor:
    """As :func:`reference.add_learned_sinks`; one program for each tile of (token, query head)."""
    num_heads, head_dim = outputs.shape[1:]
    assert outputs.is_contiguous() and weights.is_contiguous() and learned_sinks.shape == (num_heads,)
    output, block_d = torch.empty_like(outputs), triton.next_power_of_2(head_dim)
    block_n = max(1, ELEMENTS // block_d)
    _add_learned_sinks[(triton.cdiv(weights.numel(), block_n),)](
        outputs, weights, learned_sinks, output, weights.numel(), HEADS=num_heads, D=head_dim, BLOCK_N=block_n, BLOCK_D=block_d
    )
    return output


@triton.jit(do_not_specialize=("N",))
def _add_learned_sinks(
    p_outputs,  # [T, Hq, D]
    p_weights,  # [T, Hq], logarithms to base 2
    p_learned_sinks,  # [Hq]
    p_output,  # [T, Hq, D]
    N,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_n, o_d = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_n = o_n < N
    b_weight = tl.load(p_weights + o_n, mask=m_n, other=0.0)
    b_sink = tl.load(p_learned_sinks + o_n % HEADS, mask=m_n, other=0.0).to(tl.float32) * LOG2_E
    b_share = 1.0 / (1.0 + tl.exp2(b_sink - b_weight))
    o_out, m_out = o_n[:, None] * D + o_d[None, :], m_n[:, None] & (o_d < D)[None, :]
    b_out = tl.load(p_outputs + o_out, mask=m_out, other=0.0).to(tl.float32) * b_share[:, None]
    tl.store(p_output + o_out, b_out.to(p_output.dtype.element_ty), mask=m_out)
