# SPDX-License-Identifier: Apache-2.0
"""Rotation: multiply queries and keys by a Hadamard matrix, which each program makes for itself and multiplies rows by on tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.reference_rotation import rotated_together

ROW_BYTES = 128  # of a column, multiplied at once: 64 rows of 16 bits, as tensor cores take them
PROGRAMS = 512  # enough for the device; each then multiplies more rows by one matrix
MATRIX = {
    2: 8192,
    4: 4096,
}  # elements of a program's columns, by their bytes: more take longer to make than rows of a decode step to multiply


def rotate(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.rotate, but for the order of sums. Only the last axis need be contiguous."""
    (query_heads, head_dim), num_heads = queries.shape[-2:], keys.shape[-2]
    (flat_queries, flat_keys), together = (x.reshape(-1, *x.shape[-2:]) for x in (queries, keys)), rotated_together(head_dim)
    assert flat_queries.stride(2) == flat_keys.stride(2) == 1 and queries.dtype == keys.dtype and len(flat_queries) == len(flat_keys)
    rotated_queries, rotated_keys = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys))
    block_d, block_n = blocks(head_dim, queries.element_size())
    num_tokens, rows = len(flat_queries), ROW_BYTES // queries.element_size()
    programs = triton.cdiv(num_tokens * query_heads, rows) + triton.cdiv(num_tokens * num_heads, rows)
    _rotate_kernel[(min(programs, PROGRAMS), triton.cdiv(head_dim, block_n))](
        flat_queries,
        flat_keys,
        rotated_queries,
        rotated_keys,
        num_tokens,
        *flat_queries.stride()[:2],
        *flat_keys.stride()[:2],
        HQ=query_heads,
        H=num_heads,
        D=head_dim,
        TOGETHER=together,
        SIZE=together**-0.5,
        ROWS=rows,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=8,
    )
    return rotated_queries, rotated_keys


def blocks(head_dim: int, element_size: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a program makes, powers of two."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    return block_d, max(16, min(block_d, MATRIX[element_size] // block_d))


@triton.jit(do_not_specialize=("num_tokens",))
def _rotate_kernel(
    p_queries,  # [T, Hq, D]
    p_keys,  # [T, H, D]
    p_rotated_queries,  # [T, Hq, D]
    p_rotated_keys,  # [T, H, D]
    num_tokens,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first, step, i_n = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    query_blocks = tl.cdiv(num_tokens * HQ, ROWS)
    num_blocks = query_blocks + tl.cdiv(num_tokens * H, ROWS)
    o_d, o_n = tl.arange(0, BLOCK_D)[None, :], i_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tensors = p_queries, p_keys, p_rotated_queries, p_rotated_keys
    strides = query_stride_token, query_stride_head, key_stride_token, key_stride_head
    p_x, p_y, m_x = _rows(first, query_blocks, tensors, strides, num_tokens, HQ, H, D, ROWS)
    b_x = tl.load(p_x + o_d, mask=m_x & (o_d < D), other=0)  # they come while the matrix is made
    b_signs = signs(i_n * BLOCK_N, D, TOGETHER, BLOCK_D, BLOCK_N).to(b_x.dtype)
    for i in range(first + step, num_blocks + step, step):
        b_y = tl.dot(b_x, b_signs, input_precision="ieee") * SIZE
        p_x, p_next, m_next = _rows(i, query_blocks, tensors, strides, num_tokens, HQ, H, D, ROWS)
        b_x = tl.load(p_x + o_d, mask=m_next & (o_d < D), other=0)
        tl.store(p_y + o_n, b_y.to(b_x.dtype), mask=m_x & (o_n < D))
        p_y, m_x = p_next, m_next


@triton.jit
def _rows(i, query_blocks, tensors, strides, num_tokens, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Pointers ``[ROWS, 1]`` to block ``i`` of the rows of queries, then of keys, and to where they go; and which of them there are."""
    p_queries, p_keys, p_rotated_queries, p_rotated_keys = tensors
    query_stride_token, query_stride_head, key_stride_token, key_stride_head = strides
    o_row = tl.arange(0, ROWS)[:, None]
    if i < query_blocks:
        o_row += i * ROWS
        p_x = p_queries + (o_row // HQ).to(tl.int64) * query_stride_token + o_row % HQ * query_stride_head
        p_y = p_rotated_queries + o_row.to(tl.int64) * D
        m_x = o_row < num_tokens * HQ
    else:
        o_row += (i - query_blocks) * ROWS
        p_x = p_keys + (o_row // H).to(tl.int64) * key_stride_token + o_row % H * key_stride_head
        p_y = p_rotated_keys + o_row.to(tl.int64) * D
        m_x = o_row < num_tokens * H
    return p_x, p_y, m_x


@triton.jit
def signs(first, D: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """``[BLOCK_D, BLOCK_N]`` columns of reference_rotation.signs_of_rotation from ``first`` on, 0 beyond ``D``."""
    o_i, o_j = tl.arange(0, BLOCK_D)[:, None], first + tl.arange(0, BLOCK_N)[None, :]
    b_common = (o_i & o_j) % TOGETHER
    b_odd = b_common ^ (b_common >> 4)
    b_odd = (0x6996 >> ((b_odd ^ (b_odd >> 8)) & 15)) & 1  # bit n is the parity of n
    b_sign = tl.where(b_odd == 1, -1.0, 1.0)
    if TOGETHER < BLOCK_D:
        b_sign = tl.where((o_i // TOGETHER == o_j // TOGETHER) & (o_i < D), b_sign, 0.0)
    return b_sign
