# SPDX-License-Identifier: Apache-2.0
"""Stage: copy whole pages of all kv heads out of pinned host memory, which the kernels read in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import as_words, scale_arguments, scale_words, store_scales
from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.staged_layers import StagedLayers

READ_BYTES = 16384  # read by a program at once: few programs then fill the link (benchmarks/results/bench_recall.json)


def stage_pages(
    host_pool: torch.Tensor,
    host_pages: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
    programs: int = 16,
) -> None:
    """As reference.stage_pages. At most ``programs`` programs run, which leaves the rest of the device to the computation.

    A program ends at its first -1.
    """
    host_pool, keys, values = as_words(host_pool, keys, values)
    assert keys.stride() == values.stride()
    grid, strides, sizes = _launch(host_pool, host_pages, keys, programs)
    with_scales = scale_words(host_scales, scales), *scale_arguments(scales, 2)
    _stage_kernel[grid](host_pool, host_pages, starts, keys, values, *with_scales, *strides, **sizes, num_warps=8)


def stage_layers(
    layers: StagedLayers, host_pages: torch.Tensor, starts: torch.Tensor, *, first: int, last: int, programs: int = 16
) -> None:
    """As reference.stage_layers. Each program copies its part of a layer, then that of the next one."""
    host_pool, like = as_words(layers.host[0], layers.keys[0])  # of the type that addresses point to
    grid, strides, sizes = _launch(host_pool, host_pages, like, programs)
    _, _, *scale_strides = scale_arguments(None if layers.scales is None else layers.scales[0], 2)
    with_scales = layers.scale_addresses, *scale_strides
    _stage_layers_kernel[grid](layers.addresses, like, host_pages, starts, first, last, *with_scales, *strides, **sizes, num_warps=8)


def _launch(
    host_pool: torch.Tensor, host_pages: torch.Tensor, keys: torch.Tensor, programs: int
) -> tuple[tuple[int], tuple[int, ...], dict]:
    """Grid, strides and sizes for ``host_pages`` of a pool and token rows like these."""
    num_heads, _, page_size, head_dim = host_pool.shape[1:]
    num_units = len(host_pages) * num_heads
    block_s, block_d = triton.next_power_of_2(page_size), triton.next_power_of_2(head_dim)
    units = max(1, READ_BYTES // (2 * block_s * block_d * host_pool.element_size()))
    assert host_pool.stride(4) == keys.stride(2) == 1
    grid = (min(triton.cdiv(num_units, units), programs),)
    strides = (num_units, *host_pool.stride()[:4], *keys.stride()[:2])
    return grid, strides, dict(H=num_heads, S=page_size, D=head_dim, UNITS=units, BLOCK_S=block_s, BLOCK_D=block_d)


@triton.jit(do_not_specialize=("num_units",))
def _stage_kernel(
    p_host,  # [n_page, H, 2, S, D]
    p_host_pages,  # [N]
    p_starts,  # [N]
    p_keys,  # [T, H, D]
    p_values,  # [T, H, D]
    p_host_scales,  # [n_page, H, S] words, or None
    p_key_scales,  # [T, H] or None
    p_value_scales,  # [T, H] or None
    scale_stride_token,
    scale_stride_head,
    num_units,
    host_stride_page,
    host_stride_head,
    host_stride_kind,
    host_stride_token,
    stride_token,
    stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,  # units that are read at once
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    places = p_host, p_host_pages, p_starts, p_keys, p_values
    strides = host_stride_page, host_stride_head, host_stride_kind, host_stride_token, stride_token, stride_head
    scales = None
    if p_host_scales is not None:
        scales = p_host_scales, scale_stride_head, (p_key_scales, p_value_scales, scale_stride_token)
    _stage(places, scales, strides, num_units, H, S, D, UNITS, BLOCK_S, BLOCK_D)


@triton.jit(do_not_specialize=("first", "last", "num_units"))
def _stage_layers_kernel(
    p_addresses,  # [L, 3] of a layer's host pool, keys and values
    p_like,  # of the type that they point to
    p_host_pages,  # [N]
    p_starts,  # [N]
    first,
    last,
    p_scale_addresses,  # [L, 3] of a layer's host scales, and those of its keys and values; or None
    scale_stride_token,
    scale_stride_head,
    num_units,
    host_stride_page,
    host_stride_head,
    host_stride_kind,
    host_stride_token,
    stride_token,
    stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    strides = host_stride_page, host_stride_head, host_stride_kind, host_stride_token, stride_token, stride_head
    for i_layer in range(first, last):
        p_layer = p_addresses + i_layer * 3
        p_host = tl.multiple_of(tl.load(p_layer).to(p_like.dtype), 16)
        p_keys = tl.multiple_of(tl.load(p_layer + 1).to(p_like.dtype), 16)
        p_values = tl.multiple_of(tl.load(p_layer + 2).to(p_like.dtype), 16)
        places = p_host, p_host_pages, p_starts, p_keys, p_values
        scales = None
        if p_scale_addresses is not None:
            p_layer = p_scale_addresses + i_layer * 3
            p_words = tl.load(p_layer).to(tl.pointer_type(tl.int32))
            p_key_scales = tl.load(p_layer + 1).to(tl.pointer_type(tl.int16))
            p_value_scales = tl.load(p_layer + 2).to(tl.pointer_type(tl.int16))
            scales = p_words, scale_stride_head, (p_key_scales, p_value_scales, scale_stride_token)
        _stage(places, scales, strides, num_units, H, S, D, UNITS, BLOCK_S, BLOCK_D)


@triton.jit
def _stage(
    places,
    scales,
    strides,
    num_units,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    p_host, p_host_pages, p_starts, p_keys, p_values = places
    host_stride_page, host_stride_head, host_stride_kind, host_stride_token, stride_token, stride_head = strides
    o_t, o_d = tl.arange(0, UNITS * BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    o_s, o_u = o_t % BLOCK_S, 0 if UNITS == 1 else o_t // BLOCK_S
    o_host = o_s * host_stride_token + o_d
    o_rows = o_s * stride_token + o_d
    first = tl.program_id(0) * UNITS
    i_first = tl.load(p_host_pages + first // H, mask=first < num_units, other=-1)
    while i_first >= 0:
        i = first + o_u
        m = i < num_units
        i_head = i % H
        i_page = tl.load(p_host_pages + i // H, mask=m, other=-1).to(tl.int64)
        i_start = tl.load(p_starts + i // H, mask=m, other=0).to(tl.int64)
        m_unit = (i_page >= 0) & (o_s < S) & (o_d < D)
        p_unit = p_host + i_page * host_stride_page + i_head * host_stride_head + o_host
        b_keys = tl.load(p_unit, mask=m_unit, other=0)
        b_values = tl.load(p_unit + host_stride_kind, mask=m_unit, other=0)
        if scales is not None:  # all is read before anything is written
            p_words, scale_stride_head, p_scales = scales
            m_words = (i_page >= 0) & (o_s < S)
            b_words = tl.load(p_words + (i_page * H + i_head) * S + o_s, mask=m_words, other=0)
        o_unit = i_start * stride_token + i_head * stride_head + o_rows
        tl.store(p_keys + o_unit, b_keys, mask=m_unit)
        tl.store(p_values + o_unit, b_values, mask=m_unit)
        if scales is not None:
            store_scales(p_scales, i_start * p_scales[2] + i_head * scale_stride_head, o_s, b_words, m_words, S)
        first += tl.num_programs(0) * UNITS
        i_first = tl.load(p_host_pages + first // H, mask=first < num_units, other=-1)
