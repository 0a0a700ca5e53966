# SPDX-License-Identifier: Apache-2.0
"""Checksums of units: written when a page leaves the device, compared when its units come back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import scale_arguments
from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.reference import SPREAD
from sglang_freekv.kernels.units import Units


def checksum_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    host_pages: torch.Tensor,
    checksums: torch.Tensor,
    page_size: int,
    *,
    scales: Scales | None = None,
) -> None:
    """As reference.checksum_pages; one program for each (page, kv head)."""
    keys, values = keys.view(torch.int32), values.view(torch.int32)
    num_heads, row_words = keys.shape[1:]
    assert keys.stride(2) == 1 and keys.stride() == values.stride() and checksums.is_contiguous()
    _checksum_kernel[(len(host_pages), num_heads)](
        keys,
        values,
        starts,
        host_pages,
        checksums,
        *scale_arguments(scales, 2),
        *keys.stride()[:2],
        *starts.stride(),
        H=num_heads,
        S=page_size,
        D=row_words,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(row_words),
        SPREAD=SPREAD,
    )


def verify_units(
    keys: torch.Tensor,
    values: torch.Tensor,
    units: Units,
    checksums: torch.Tensor,
    faults: torch.Tensor,
    *,
    every: int,
    layer: int,
    page_size: int,
    scales: Scales | None = None,
    programs: int = 128,
) -> None:
    """As reference.verify_units. Only ``programs`` programs run, which leaves the rest of the device to the computation."""
    keys, values = keys.view(torch.int32), values.view(torch.int32)
    num_heads, row_words = keys.shape[1:]
    assert keys.stride(2) == 1 and keys.stride() == values.stride() and checksums.is_contiguous() and faults.is_contiguous()
    _verify_kernel[(programs,)](
        keys,
        values,
        units.starts,
        units.heads,
        units.host_pages,
        units.length,
        checksums,
        faults,
        *scale_arguments(scales, 2),
        len(units.host_pages),
        layer,
        len(faults) - 1,
        units.tokens_per_start * keys.stride(0),
        None if scales is None else units.tokens_per_start * scales.keys.stride(0),
        *keys.stride()[:2],
        H=num_heads,
        S=page_size,
        D=row_words,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(row_words),
        SPREAD=SPREAD,
        EVERY=every,
    )


@triton.jit
def _checksum_kernel(
    p_keys,  # [T, H, D]
    p_values,  # [T, H, D]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_checksums,  # [n_page, H]
    p_key_scales,  # [T, H] or None
    p_value_scales,  # [T, H] or None
    scale_stride_token,
    scale_stride_head,
    stride_token,
    stride_head,
    starts_stride_page,
    starts_stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPREAD: tl.constexpr,
):
    i_n, i_head = tl.program_id(0), tl.program_id(1)
    i_page = tl.load(p_host_pages + i_n).to(tl.int64)
    if i_page >= 0:
        i_start = tl.load(p_starts + i_n * starts_stride_page + i_head * starts_stride_head).to(tl.int64)
        o_unit = i_start * stride_token + i_head * stride_head
        p_checksum = p_checksums + i_page * H + i_head
        scales = None
        if p_key_scales is not None:
            o_scales = i_start * scale_stride_token + i_head * scale_stride_head
            scales = p_key_scales + o_scales, p_value_scales + o_scales, scale_stride_token
        tl.store(p_checksum, _sum(p_keys + o_unit, p_values + o_unit, stride_token, scales, S, D, BLOCK_S, BLOCK_D, SPREAD))


@triton.jit(do_not_specialize=("M", "layer", "F"))
def _verify_kernel(
    p_keys,  # [T, H, D]
    p_values,  # [T, H, D]
    p_starts,  # [M]
    p_heads,  # [M]
    p_host_pages,  # [M]
    p_count,  # [2]
    p_checksums,  # [n_page, H]
    p_faults,  # [1 + F, 5]
    p_key_scales,  # [T, H] or None
    p_value_scales,  # [T, H] or None
    scale_stride_token,
    scale_stride_head,
    M,
    layer,
    F,
    stride_start,
    scale_stride_start,
    stride_token,
    stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPREAD: tl.constexpr,
    EVERY: tl.constexpr,
):
    count = tl.minimum(tl.load(p_count), M)
    turn = tl.load(p_count + 1).to(tl.uint32)
    turn = (turn ^ turn >> 16) * 0x7FEB352D
    turn = (turn ^ turn >> 15) * 0x846CA68B
    first = ((turn ^ turn >> 16) % EVERY).to(tl.int32)
    for i in range(first + tl.program_id(0) * EVERY, count, tl.num_programs(0) * EVERY):
        i_page, i_head = tl.load(p_host_pages + i).to(tl.int64), tl.load(p_heads + i).to(tl.int64)
        o_unit = tl.load(p_starts + i).to(tl.int64) * stride_start + i_head * stride_head
        scales = None
        if p_key_scales is not None:
            o_scales = tl.load(p_starts + i).to(tl.int64) * scale_stride_start + i_head * scale_stride_head
            scales = p_key_scales + o_scales, p_value_scales + o_scales, scale_stride_token
        found = _sum(p_keys + o_unit, p_values + o_unit, stride_token, scales, S, D, BLOCK_S, BLOCK_D, SPREAD)
        expected = tl.load(p_checksums + i_page * H + i_head)
        if found != expected:
            p_fault = p_faults + (1 + tl.atomic_add(p_faults, 1) % F) * 5
            tl.store(p_fault, layer)
            tl.store(p_fault + 1, i_page.to(tl.int32))
            tl.store(p_fault + 2, i_head.to(tl.int32))
            tl.store(p_fault + 3, found)
            tl.store(p_fault + 4, expected)


@triton.jit
def _sum(p_keys, p_values, stride_token, scales, S, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPREAD: tl.constexpr):
    """Checksum of one unit, as reference.checksum_pages defines it."""
    o_s, o_d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_unit = (o_s < S) & (o_d < D)
    o_rows, i_word = o_s * stride_token + o_d, o_s * D + o_d
    b_keys = tl.load(p_keys + o_rows, mask=m_unit, other=0)
    b_values = tl.load(p_values + o_rows, mask=m_unit, other=0)
    b_words = b_keys * (i_word * SPREAD | 1) + b_values * ((i_word + S * D) * SPREAD | 1)
    total = tl.sum(tl.sum(b_words.to(tl.int64), 1), 0)
    if scales is not None:
        p_key_scales, p_value_scales, scale_stride_token = scales
        o_scales, i_scale = o_s * scale_stride_token, 2 * S * D + o_s
        b_keys = tl.load(p_key_scales + o_scales, mask=o_s < S, other=0).to(tl.int32)
        b_values = tl.load(p_value_scales + o_scales, mask=o_s < S, other=0).to(tl.int32)
        b_scales = b_keys * (i_scale * SPREAD | 1) + b_values * ((i_scale + S) * SPREAD | 1)
        total += tl.sum(tl.sum(b_scales.to(tl.int64), 1), 0)
    return total.to(tl.int32)
