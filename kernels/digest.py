# SPDX-License-Identifier: Apache-2.0
"""Digest: a box around the keys of each full page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import as_bytes, float_type, numbers
from sglang_freekv.kernels.reference import Box


def digest_pages(
    keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int, box: Box = "min-max"
) -> None:
    """As reference.digest_pages, NaN included; one program for each (page, kv head)."""
    num_heads, head_dim = keys.shape[1:]
    assert keys.stride(2) == 1 and digests.is_contiguous()
    _digest_kernel[(len(host_pages), num_heads)](
        *as_bytes(keys),
        starts,
        host_pages,
        digests,
        *keys.stride()[:2],
        *starts.stride(),
        H=num_heads,
        S=page_size,
        D=head_dim,
        BOX=box,
        FLOAT=float_type(keys),
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _digest_kernel(
    p_keys,  # [T, H, D]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_digests,  # [n_page, H, 2, D]
    stride_token,
    stride_head,
    starts_stride_page,
    starts_stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BOX: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n, i_head = tl.program_id(0), tl.program_id(1)
    i_page = tl.load(p_host_pages + i_n).to(tl.int64)
    if i_page < 0:
        return
    i_start = tl.load(p_starts + i_n * starts_stride_page + i_head * starts_stride_head).to(tl.int64)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    o_rows = i_head * stride_head + (i_start + o_s[:, None]) * stride_token + o_d[None, :]
    m_s = o_s[:, None] < S
    b_keys = numbers(tl.load(p_keys + o_rows, mask=m_s & (o_d[None, :] < D), other=0), FLOAT)
    b_max = tl.reduce(tl.where(m_s, b_keys, float("-inf")), 0, larger)
    b_min = tl.reduce(tl.where(m_s, b_keys, float("inf")), 0, smaller)
    if BOX == "cuboid-mean":
        b_centre = (b_max.to(tl.float64) + b_min.to(tl.float64)) / 2
        b_radius = tl.sum(tl.where(m_s, tl.abs(b_keys.to(tl.float64) - b_centre[None, :]), 0.0), 0) / S
        b_max, b_min = (b_centre + b_radius).to(tl.float32), (b_centre - b_radius).to(tl.float32)
    p_digest = p_digests + (i_page * H + i_head) * (2 * D) + o_d
    tl.store(p_digest, b_max, mask=o_d < D)
    tl.store(p_digest + D, b_min, mask=o_d < D)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
