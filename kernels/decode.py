# SPDX-License-Identifier: Apache-2.0
"""Decode: make numbers of codes, for the attention of an extend, and rotated back, for digests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import as_bytes, float_type, numbers
from sglang_freekv.kernels.kv import KV
from sglang_freekv.kernels.reference_rotation import rotated_together
from sglang_freekv.kernels.rotation import blocks, signs

DECODED_AT_ONCE = 8192  # elements of keys, and of values: 16 of a thread are one read of 16 bytes
ROWS = 64  # rotated at once
PARTS = 4  # times so many rows of a page are a program's


def decode_tokens(kv: KV, rows: torch.Tensor | None, out: KV) -> None:
    """As reference.decode_tokens. Equal bit for bit: a product of a code and a scale is exact, and is rounded once."""
    (_, num_heads, head_dim), num_tokens = kv.keys.shape, len(out.keys if rows is None else rows)
    assert kv.keys.stride() == kv.values.stride() and out.keys.stride() == out.values.stride()
    assert kv.keys.stride(2) == out.keys.stride(2) == 1 and (kv.scales is None or kv.scales.keys.stride() == kv.scales.values.stride())
    block_d = triton.next_power_of_2(head_dim)
    block_r = min(128, DECODED_AT_ONCE // block_d)
    _decode_kernel[(triton.cdiv(num_tokens * num_heads, block_r),)](
        *as_bytes(kv.keys, kv.values),
        *(kv.scales or (None, None)),
        rows,
        out.keys,
        out.values,
        num_tokens,
        *kv.keys.stride()[:2],
        *((None, None) if kv.scales is None else kv.scales.keys.stride()),
        *out.keys.stride()[:2],
        H=num_heads,
        D=head_dim,
        FLOAT=float_type(kv.keys),
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )


@triton.jit(do_not_specialize=("num_tokens",))
def _decode_kernel(
    p_keys,  # [T, H, D]
    p_values,  # [T, H, D]
    p_key_scales,  # [T, H]
    p_value_scales,  # [T, H]
    p_rows,  # [N]
    p_out_keys,  # [N, H, D]
    p_out_values,  # [N, H, D]
    num_tokens,
    stride_token,
    stride_head,
    scale_stride_token,
    scale_stride_head,
    out_stride_token,
    out_stride_head,
    H: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_d = tl.arange(0, BLOCK_D)[None, :]
    i_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_token, i_head = i_r // H, i_r % H
    m_r = i_token < num_tokens
    i_row = i_token
    if p_rows is not None:
        i_row = tl.load(p_rows + i_token, mask=m_r, other=0).to(tl.int64)
    o_code, m = (i_row * stride_token + i_head * stride_head)[:, None] + o_d, m_r[:, None] & (o_d < D)
    b_keys = numbers(tl.load(p_keys + o_code, mask=m, other=0), FLOAT)
    b_values = numbers(tl.load(p_values + o_code, mask=m, other=0), FLOAT)
    if p_key_scales is not None:
        o_scale = i_row * scale_stride_token + i_head * scale_stride_head
        b_keys *= tl.load(p_key_scales + o_scale, mask=m_r, other=0).to(tl.float32)[:, None]
        b_values *= tl.load(p_value_scales + o_scale, mask=m_r, other=0).to(tl.float32)[:, None]
    o_out = (i_token * out_stride_token + i_head * out_stride_head)[:, None] + o_d
    tl.store(p_out_keys + o_out, b_keys.to(p_out_keys.dtype.element_ty), mask=m)
    tl.store(p_out_values + o_out, b_values.to(p_out_values.dtype.element_ty), mask=m)


def unrotated_keys(kv: KV, starts: torch.Tensor, host_pages: torch.Tensor, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    """As reference.unrotated_keys, bit for bit. Programs of skipped pages end at once; those of a page take its rows in turn."""
    assert kv.scales is not None and kv.keys.stride(2) == 1
    _, num_heads, head_dim = kv.keys.shape
    keys = torch.empty((len(host_pages) * page_size, num_heads, head_dim), dtype=dtype, device=kv.keys.device)
    together = rotated_together(head_dim)
    block_d, block_n = blocks(head_dim, 2)
    _unrotate_kernel[(len(host_pages), triton.cdiv(page_size * num_heads, PARTS * ROWS), triton.cdiv(head_dim, block_n))](
        kv.keys,
        kv.scales.keys,
        starts,
        host_pages,
        keys,
        *kv.keys.stride()[:2],
        *kv.scales.keys.stride(),
        *starts.stride(),
        H=num_heads,
        S=page_size,
        D=head_dim,
        TOGETHER=together,
        SIZE=together**-0.5,
        ROWS=ROWS,
        PARTS=min(PARTS, triton.cdiv(page_size * num_heads, ROWS)),
        BLOCK_D=block_d,
        BLOCK_N=block_n,
    )
    return keys


@triton.jit
def _unrotate_kernel(
    p_codes,  # [T, H, D]
    p_scales,  # [T, H]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_keys,  # [N, S, H, D]
    stride_token,
    stride_head,
    scale_stride_token,
    scale_stride_head,
    starts_stride_page,
    starts_stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    if tl.load(p_host_pages + i_n) < 0:
        return
    first = tl.program_id(2) * BLOCK_N
    o_d, o_n = tl.arange(0, BLOCK_D)[None, :], first + tl.arange(0, BLOCK_N)[None, :]
    b_signs = signs(first, D, TOGETHER, BLOCK_D, BLOCK_N).to(tl.float16)  # which holds codes, and their sums are exact
    for i in range(PARTS):
        i_r = (tl.program_id(1) * PARTS + i) * ROWS + tl.arange(0, ROWS)
        i_head, m_r = i_r % H, i_r < S * H
        i_start = tl.load(p_starts + i_n * starts_stride_page + i_head * starts_stride_head, mask=m_r, other=0).to(tl.int64)
        i_row = i_start + i_r // H
        o_code = (i_row * stride_token + i_head * stride_head)[:, None] + o_d
        b_code = tl.load(p_codes + o_code, mask=m_r[:, None] & (o_d < D), other=0)
        b_scale = tl.load(p_scales + i_row * scale_stride_token + i_head * scale_stride_head, mask=m_r, other=0).to(tl.float32)
        b_sum = tl.dot(b_code.to(tl.float16), b_signs, input_precision="ieee")
        b_key = (b_sum * b_scale[:, None] * SIZE).to(p_keys.dtype.element_ty)
        tl.store(p_keys + (i_n * S * H + i_r)[:, None] * D + o_n, b_key, mask=m_r[:, None] & (o_n < D))
