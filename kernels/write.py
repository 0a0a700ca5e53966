# SPDX-License-Identifier: Apache-2.0
"""Write: put the new tokens of an extend where its contexts lie, and keep each request's last queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.codes import store_vectors
from sglang_freekv.kernels.kv import Scales


def write_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    queries: torch.Tensor,
    token_rows: torch.Tensor,
    last_tokens: torch.Tensor,
    rows: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    previous_queries: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """As reference.write_tokens; one program for each token, and one for each request."""
    (num_tokens, num_heads, head_dim), query_heads = new_keys.shape, queries.shape[1]
    assert all(x.stride(2) == 1 for x in (new_keys, new_values, queries, keys)) and keys.stride() == values.stride()
    assert previous_queries.is_contiguous()
    assert scales is None or scales.keys.stride() == scales.values.stride()
    last_queries = torch.empty((len(rows), query_heads, head_dim), dtype=queries.dtype, device=queries.device)
    _write_kernel[(num_tokens + len(rows),)](
        new_keys,
        new_values,
        queries,
        token_rows,
        last_tokens,
        rows,
        keys,
        values,
        *(scales or (None, None)),
        previous_queries,
        last_queries,
        num_tokens,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *queries.stride()[:2],
        *keys.stride()[:2],
        *((None,) * 2 if scales is None else scales.keys.stride()),
        H=num_heads,
        HQ=query_heads,
        D=head_dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_HQ=triton.next_power_of_2(query_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    return last_queries


@triton.jit(do_not_specialize=("num_tokens",))
def _write_kernel(
    p_new_keys,  # [T, H, D]
    p_new_values,  # [T, H, D]
    p_queries,  # [T, Hq, D]
    p_token_rows,  # [T]
    p_last_tokens,  # [B]
    p_rows,  # [B]
    p_keys,  # [N, H, D]
    p_values,  # [N, H, D]
    p_key_scales,  # [N, H]
    p_value_scales,  # [N, H]
    p_previous,  # [R, Hq, D]
    p_last_queries,  # [B, Hq, D]
    num_tokens,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    query_stride_token,
    query_stride_head,
    stride_token,
    stride_head,
    scale_stride_token,
    scale_stride_head,
    H: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    if i < num_tokens:
        o_h = tl.arange(0, BLOCK_H)[:, None]
        m_key = (o_h < H) & (o_d < D)
        i_place = tl.load(p_token_rows + i).to(tl.int64)
        o_place = i_place * stride_token + o_h * stride_head + o_d
        b_key = tl.load(p_new_keys + i * key_stride_token + o_h * key_stride_head + o_d, mask=m_key)
        b_value = tl.load(p_new_values + i * value_stride_token + o_h * value_stride_head + o_d, mask=m_key)
        o_scale = 0
        if p_key_scales is not None:
            o_scale = i_place * scale_stride_token + o_h * scale_stride_head
        store_vectors(p_keys, p_key_scales, b_key, o_place, o_scale, m_key, o_h < H)
        store_vectors(p_values, p_value_scales, b_value, o_place, o_scale, m_key, o_h < H)
    else:
        i_b = i - num_tokens
        o_q = tl.arange(0, BLOCK_HQ)[:, None]
        m_query = (o_q < HQ) & (o_d < D)
        i_token, i_row = tl.load(p_last_tokens + i_b).to(tl.int64), tl.load(p_rows + i_b).to(tl.int64)
        b_query = tl.load(p_queries + i_token * query_stride_token + o_q * query_stride_head + o_d, mask=m_query)
        o_query = o_q * D + o_d
        tl.store(p_previous + i_row * HQ * D + o_query, b_query, mask=m_query)
        tl.store(p_last_queries + i_b * HQ * D + o_query, b_query, mask=m_query)
