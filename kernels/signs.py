"""One bit for each dimension of each key: digests of full pages, and the logits of candidate pages from them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.reference import sign_word

TOKENS = 128  # whose keys are unpacked at once
PROGRAMS = 792  # six for each SM of an H100 or H200, all at once


def digest_signs(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """As reference.digest_signs; a program for every (page, kv head)."""
    num_heads, head_dim = keys.shape[1:]
    words = digests.view(sign_word(page_size))
    assert keys.stride(2) == 1 and digests.is_contiguous()
    _digest_signs[(len(host_pages), num_heads)](
        keys,
        starts,
        host_pages,
        digests,
        words,
        *keys.stride()[:2],
        *starts.stride(),
        H=num_heads,
        S=page_size,
        D=head_dim,
        E=digests.shape[2],
        E_WORDS=words.shape[2],
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


def score_signs(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
) -> torch.Tensor:
    """As :func:`reference.score_signs`; only candidates are written, and none of a row of padding.

    One program for each (share of the tiles of pages, kv head, request). ``queries`` may be a view of wider rows.
    """
    (batch, num_heads, head_dim), num_kv_heads, num_pages = queries.shape, digests.shape[1], page_table.shape[1]
    group, words = num_heads // num_kv_heads, digests.view(sign_word(page_size))
    assert queries.stride(2) == 1 and digests.is_contiguous() and page_table.is_contiguous()
    logits = torch.empty(batch, num_heads, num_pages, dtype=torch.float32, device=queries.device)
    block_s = triton.next_power_of_2(page_size)
    block_p = max(1, TOKENS // block_s)
    shares = max(1, min(PROGRAMS // (batch * num_kv_heads), triton.cdiv(num_pages, block_p)))
    _score_signs[(shares, num_kv_heads, batch)](
        queries,
        digests,
        words,
        rows,
        seq_lens,
        page_table,
        logits,
        queries.stride(0),
        queries.stride(1),
        num_pages,
        budget.sink,
        budget.window,
        1 / head_dim**0.5,
        H=num_kv_heads,
        G=group,
        D=head_dim,
        S=page_size,
        E=digests.shape[2],
        E_WORDS=words.shape[2],
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_P=block_p,
        BLOCK_S=block_s,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        num_stages=2,
    )
    return logits


@triton.jit
def _digest_signs(
    p_keys,  # [T, H, D]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_digests,  # [n_page, H, E]
    p_words,  # the same memory, [n_page, H, E_WORDS]
    stride_token,
    stride_head,
    starts_stride_page,
    starts_stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    E_WORDS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n, i_head = tl.program_id(0), tl.program_id(1)
    i_page = tl.load(p_host_pages + i_n).to(tl.int64)
    if i_page < 0:
        return
    i_start = tl.load(p_starts + i_n * starts_stride_page + i_head * starts_stride_head).to(tl.int64)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_s, m_d = o_s[:, None] < S, o_d < D
    o_rows = i_head * stride_head + (i_start + o_s[:, None]) * stride_token + o_d[None, :]
    b_keys = tl.load(p_keys + o_rows, mask=m_s & m_d[None, :], other=0).to(tl.float64)
    b_centre = tl.sum(b_keys, 0) / S
    b_radius = tl.sum(tl.where(m_s, tl.abs(b_keys - b_centre[None, :]), 0.0), 0) / S
    b_above = (m_s & (b_keys >= b_centre[None, :])).to(tl.int32)
    b_words = tl.sum(b_above << o_s[:, None], 0)
    p_digest = p_digests + (i_page * H + i_head) * E + o_d
    tl.store(p_digest, (b_centre + b_radius).to(tl.float32), mask=m_d)
    tl.store(p_digest + D, (b_centre - b_radius).to(tl.float32), mask=m_d)
    tl.store(p_words + (i_page * H + i_head + 1) * E_WORDS - D + o_d, b_words.to(p_words.dtype.element_ty), mask=m_d)


@triton.jit
def _score_signs(
    p_queries,  # [B, Hq, D]
    p_digests,  # [n_page, H, E]
    p_words,  # the same memory, [n_page, H, E_WORDS]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_logits,  # [B, Hq, P]
    stride_b,
    stride_h,
    P,
    sink,
    window,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    E_WORDS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens = tl.load(p_seq_lens + i_b).to(tl.int32) + 1
    row = tl.load(p_rows + i_b)
    end = tl.where(row != 0, tl.minimum((tokens + S - 1) // S - window, P), 0)
    first = sink + i_n * BLOCK_P
    if first >= end:
        return

    o_t, o_g, o_s, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < G, o_d < D
    o_head = i_h * G + o_g
    b_q = tl.load(p_queries + i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_q = b_q.to(p_digests.dtype.element_ty)
    p_table = p_page_table + i_b * P
    p_out = p_logits + (i_b * (H * G) + o_head[:, None]) * P
    b_page = tl.load(p_table + first + o_t, mask=first + o_t < end, other=0)
    for start in range(first, end, tl.num_programs(0) * BLOCK_P):
        o_p = start + o_t
        m_p = o_p < end
        m_pd = m_p[:, None] & m_d[None, :]
        unit = tl.maximum(b_page, 0).to(tl.int64) * H + i_h
        p_unit = p_digests + unit[:, None] * E + o_d[None, :]
        b_upper = tl.load(p_unit, mask=m_pd, other=0.0)
        b_lower = tl.load(p_unit + D, mask=m_pd, other=0.0)
        b_words = tl.load(p_words + (unit[:, None] + 1) * E_WORDS - D + o_d[None, :], mask=m_pd, other=0).to(tl.int32)
        o_next = o_p + tl.num_programs(0) * BLOCK_P
        b_page = tl.load(p_table + o_next, mask=o_next < end, other=0)
        b_above = (b_words[:, None, :] >> o_s[None, :, None]) & 1  # [BLOCK_P, BLOCK_S, BLOCK_D]
        b_keys = tl.where(b_above != 0, b_upper[:, None, :], b_lower[:, None, :])
        b_keys = tl.reshape(b_keys, (BLOCK_P * BLOCK_S, BLOCK_D))
        b_dots = tl.reshape(tl.dot(b_q, tl.trans(b_keys), input_precision="ieee"), (BLOCK_G, BLOCK_P, BLOCK_S)) * scale
        b_dots = tl.where((o_s < S)[None, None, :], b_dots, float("-inf"))
        b_top = tl.max(b_dots, 2)
        b_top = tl.where(tl.abs(b_top) == float("inf"), 0.0, b_top)
        b_sum = tl.log(tl.sum(tl.exp(b_dots - b_top[:, :, None]), 2)) + b_top
        tl.store(p_out + o_p[None, :], b_sum, mask=m_g[:, None] & m_p[None, :])
