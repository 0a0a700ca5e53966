# SPDX-License-Identifier: Apache-2.0
"""Checksums of units: written when a page leaves the device, compared when its units come back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.reference import SPREAD
from sglang_freekv.kernels.units import Units


def checksum_pages(
    keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, checksums: torch.Tensor, page_size: int
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
        len(units.host_pages),
        layer,
        len(faults) - 1,
        units.tokens_per_start * keys.stride(0),
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
        tl.store(p_checksums + i_page * H + i_head, _sum(p_keys + o_unit, p_values + o_unit, stride_token, S, D, BLOCK_S, BLOCK_D, SPREAD))


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
    M,
    layer,
    F,
    stride_start,
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
        found = _sum(p_keys + o_unit, p_values + o_unit, stride_token, S, D, BLOCK_S, BLOCK_D, SPREAD)
        expected = tl.load(p_checksums + i_page * H + i_head)
        if found != expected:
            p_fault = p_faults + (1 + tl.atomic_add(p_faults, 1) % F) * 5
            tl.store(p_fault, layer)
            tl.store(p_fault + 1, i_page.to(tl.int32))
            tl.store(p_fault + 2, i_head.to(tl.int32))
            tl.store(p_fault + 3, found)
            tl.store(p_fault + 4, expected)


@triton.jit
def _sum(p_keys, p_values, stride_token, S, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPREAD: tl.constexpr):
    """Checksum of one unit, as reference.checksum_pages defines it."""
    o_s, o_d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_unit = (o_s < S) & (o_d < D)
    o_rows, i_word = o_s * stride_token + o_d, o_s * D + o_d
    b_keys = tl.load(p_keys + o_rows, mask=m_unit, other=0)
    b_values = tl.load(p_values + o_rows, mask=m_unit, other=0)
    b_words = b_keys * (i_word * SPREAD | 1) + b_values * ((i_word + S * D) * SPREAD | 1)
    return tl.sum(tl.sum(b_words.to(tl.int64), 1), 0).to(tl.int32)
