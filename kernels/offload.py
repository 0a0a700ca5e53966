# SPDX-License-Identifier: Apache-2.0
"""Offload: copy full pages from token rows on the device to pinned host memory, which the kernel writes in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import as_words, load_scales, scale_arguments, scale_words
from sglang_freekv.kernels.kv import Scales


def offload_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    host_pages: torch.Tensor,
    host_pool: torch.Tensor,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
    programs: int = 32,
) -> None:
    """As reference.offload_pages. At most ``programs`` programs run, which leaves the rest of the device to the computation."""
    keys, values, host_pool = as_words(keys, values, host_pool)
    num_heads, _, page_size, head_dim = host_pool.shape[1:]
    num_units = len(host_pages) * num_heads
    assert host_pool.stride(4) == keys.stride(2) == 1 and keys.stride() == values.stride()
    _offload_kernel[(min(num_units, programs),)](
        keys,
        values,
        starts,
        host_pages,
        host_pool,
        scale_words(host_scales, scales),
        *scale_arguments(scales, 2),
        num_units,
        *keys.stride()[:2],
        *starts.stride(),
        *host_pool.stride()[:4],
        H=num_heads,
        S=page_size,
        D=head_dim,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=8,
    )


@triton.jit(do_not_specialize=("num_units",))
def _offload_kernel(
    p_keys,  # [T, H, D]
    p_values,  # [T, H, D]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_host,  # [n_page, H, 2, S, D]
    p_host_scales,  # [n_page, H, S] words, or None
    p_key_scales,  # [T, H] or None
    p_value_scales,  # [T, H] or None
    scale_stride_token,
    scale_stride_head,
    num_units,
    stride_token,
    stride_head,
    starts_stride_page,
    starts_stride_head,
    host_stride_page,
    host_stride_head,
    host_stride_kind,
    host_stride_token,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_s, o_d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_unit = (o_s < S) & (o_d < D)
    o_rows = o_s * stride_token + o_d
    o_host = o_s * host_stride_token + o_d
    for i in range(tl.program_id(0), num_units, tl.num_programs(0)):
        i_page = tl.load(p_host_pages + i // H).to(tl.int64)
        if i_page >= 0:
            i_head = i % H
            i_start = tl.load(p_starts + i // H * starts_stride_page + i_head * starts_stride_head).to(tl.int64)
            o_unit = i_start * stride_token + i_head * stride_head + o_rows
            b_keys = tl.load(p_keys + o_unit, mask=m_unit, other=0)
            b_values = tl.load(p_values + o_unit, mask=m_unit, other=0)
            p_unit = p_host + i_page * host_stride_page + i_head * host_stride_head + o_host
            tl.store(p_unit, b_keys, mask=m_unit)
            tl.store(p_unit + host_stride_kind, b_values, mask=m_unit)
            if p_host_scales is not None:
                o_scales = i_start * scale_stride_token + i_head * scale_stride_head
                b_scales = load_scales((p_key_scales, p_value_scales, scale_stride_token), o_scales, o_s, o_s < S, S)
                tl.store(p_host_scales + (i_page * H + i_head) * S + o_s, b_scales, mask=o_s < S)
