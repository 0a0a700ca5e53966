# SPDX-License-Identifier: Apache-2.0
"""Recall: copy missing units to their slots, out of pinned host memory that the kernel reads in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.coded import scale_arguments, scale_words, store_scales
from sglang_freekv.kernels.follow import await_previous, following
from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.stage import READ_BYTES
from sglang_freekv.kernels.stamps import is_sampled, note_begin, note_end


def recall_pages(
    host_pool: torch.Tensor,
    misses: Misses,
    keys: torch.Tensor,
    values: torch.Tensor,
    programs: int = 8,
    closely: bool = False,
    stamp: torch.Tensor | None = None,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
    prefetch: bool = True,
) -> None:
    """As reference.recall_pages. Few programs keep much in flight, which leaves the rest of the device to the computation.

    Args:
        programs: number of programs. Eight fill the link (benchmarks/results/bench_recall.json).
        closely: the programs start while the plan before them still runs.
        prefetch: a program keeps two reads in flight instead of one. A read is one unit, or as many small units as make 16 KiB.
    """
    # Rows are read as 32-bit words. Triton would unpack and pack 16-bit elements, and so wait for a unit that is still in flight.
    host_pool, keys, values = (tensor.view(torch.int32) for tensor in (host_pool, keys, values))
    page_size, row_words = host_pool.shape[3:]
    block_s, block_d = triton.next_power_of_2(page_size), triton.next_power_of_2(row_words)
    units = max(1, READ_BYTES // (8 * block_s * block_d))
    assert host_pool.stride(4) == keys.stride(3) == 1 and keys.stride() == values.stride()
    host_words = scale_words(host_scales, scales)
    _recall_kernel[(programs,)](
        host_pool,
        misses.length,
        misses.host_pages,
        misses.heads,
        misses.frames,
        keys,
        values,
        stamp,
        host_words,
        *scale_arguments(scales, 3),
        misses.frames.shape[0],
        *host_pool.stride()[:4],
        *keys.stride()[:3],
        *((None, None) if host_words is None else host_words.stride()[:2]),
        S=page_size,
        D=row_words,
        UNITS=units,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        PREFETCH=prefetch and block_s * block_d <= 8192,  # two units of up to 64 KiB fit the registers
        num_warps=8,
        **following(keys.device, closely),
    )


@triton.jit(do_not_specialize=("M",))
def _recall_kernel(
    p_host,  # [n_page, H, 2, S, D]
    p_length,  # [4]
    p_host_pages,  # [M]
    p_heads,  # [M]
    p_frames,  # [M]
    p_keys,  # [F, S, H, D]
    p_values,  # [F, S, H, D]
    p_stamp,  # [4] or None
    p_host_scales,  # [n_page, H, S] words, or None
    p_key_scales,  # [F, S, H] or None
    p_value_scales,  # [F, S, H] or None
    scale_stride_frame,
    scale_stride_token,
    scale_stride_head,
    M,
    host_stride_page,
    host_stride_head,
    host_stride_kind,
    host_stride_token,
    stride_frame,
    stride_token,
    stride_head,
    host_scale_stride_page,
    host_scale_stride_head,
    S: tl.constexpr,
    D: tl.constexpr,
    UNITS: tl.constexpr,  # units that are read at once
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PREFETCH: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    await_previous(FOLLOWS)
    sampled = False
    if p_stamp is not None:
        sampled = is_sampled(p_stamp)
        note_begin(p_stamp)
    o_t, o_d = tl.arange(0, UNITS * BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    o_s = o_t % BLOCK_S
    m_unit = (o_s < S) & (o_d < D)
    p_host_keys = p_host + o_s * host_stride_token + o_d
    p_in = p_host_keys, p_host_keys + host_stride_kind
    o_out = o_s * stride_token + o_d
    p_out = p_keys + o_out, p_values + o_out
    first, step = tl.program_id(0) * UNITS, tl.num_programs(0) * UNITS
    count = tl.minimum(tl.load(p_length), M)
    o_u = 0 if UNITS == 1 else o_t // BLOCK_S  # a scalar with UNITS == 1, which is looked up once instead of once a row
    misses = p_host_pages, p_heads, p_frames
    codes = p_in, p_out, m_unit, (host_stride_page, host_stride_head, stride_frame, stride_head)
    scales = None
    if p_host_scales is not None:
        strides = host_scale_stride_page, host_scale_stride_head, scale_stride_frame, scale_stride_head
        scales = p_host_scales + o_s, (p_key_scales, p_value_scales, scale_stride_token), o_s < S, strides
    _copy(first, count, step, o_u, o_s, misses, codes, scales, S, PREFETCH)
    _finish(p_length, p_stamp, count, sampled)


@triton.jit
def _copy(first, count, step, o_u, o_s, misses, codes, scales, S, PREFETCH: tl.constexpr):
    """Every ``step``-th read from ``first``. ``codes`` and ``scales`` each say where to read and write, with a mask and strides."""
    if PREFETCH:  # even and odd units have registers of their own: one is read while the other is written
        even = _read(first + o_u, count, misses, codes, scales)
        for i in range(first, count, 2 * step):
            odd = _read(i + step + o_u, count, misses, codes, scales)
            _write(even, o_s, codes, scales, S)
            even = _read(i + 2 * step + o_u, count, misses, codes, scales)
            _write(odd, o_s, codes, scales, S)
    else:
        for i in range(first, count, step):
            _write(_read(i + o_u, count, misses, codes, scales), o_s, codes, scales, S)


@triton.jit
def _read(i, count, misses, codes, scales):
    """Unit ``i``, or several units: keys, values, their offset in the device cache, and a mask; of coded KV the scales in the same way."""
    p_in, _, m_unit, strides = codes
    p_host_keys, p_host_values = p_in
    o_in, o_out, m = _places(i, count, misses, strides)
    m_unit = m_unit & m
    unit = tl.load(p_host_keys + o_in, mask=m_unit, other=0), tl.load(p_host_values + o_in, mask=m_unit, other=0), o_out, m_unit
    if scales is None:
        return unit
    else:
        p_host_scales, _, m_scales, strides = scales
        o_in, o_out, m = _places(i, count, misses, strides)
        m_scales = m_scales & m
        return unit, (tl.load(p_host_scales + o_in, mask=m_scales, other=0), o_out, m_scales)


@triton.jit
def _places(i, count, misses, strides):
    """Offsets of unit ``i`` in the host pool and in the device cache, and whether there is one."""
    p_host_pages, p_heads, p_frames = misses
    host_stride_page, host_stride_head, stride_frame, stride_head = strides
    m = i < count
    i_page = tl.load(p_host_pages + i, mask=m, other=0).to(tl.int64)
    i_head = tl.load(p_heads + i, mask=m, other=0).to(tl.int64)
    i_frame = tl.load(p_frames + i, mask=m, other=0).to(tl.int64)
    return i_page * host_stride_page + i_head * host_stride_head, i_frame * stride_frame + i_head * stride_head, m


@triton.jit
def _write(unit, o_s, codes, scales, S):
    p_keys, p_values = codes[1]
    if scales is not None:
        unit, read = unit
        b_scales, o_scales, m_scales = read
        store_scales(scales[1], o_scales, o_s, b_scales, m_scales, S)
    b_keys, b_values, o_out, m = unit
    tl.store(p_keys + o_out, b_keys, mask=m)
    tl.store(p_values + o_out, b_values, mask=m)


@triton.jit
def _finish(p_length, p_stamp, count, sampled):
    """The last program to finish empties the list. The barrier comes first, because a warp of it may not have read the length yet."""
    tl.debug_barrier()
    if tl.atomic_add(p_length + 1, 1) == tl.num_programs(0) - 1:
        if p_stamp is not None:
            if sampled & (count > 0):
                note_end(p_stamp)
        tl.store(p_length, 0)
        tl.store(p_length + 1, 0)
        tl.store(p_length + 2, count)
        tl.store(p_length + 3, tl.load(p_length + 3) + 1)
