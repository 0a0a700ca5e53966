# SPDX-License-Identifier: Apache-2.0
"""Two-bit digests of full pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import WORD_TOKENS
from sglang_freekv.kernels.coded import as_bytes, float_type, numbers
from sglang_freekv.kernels.digest import larger, smaller


def digest_two_bit(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """As reference.digest_two_bit, NaN included; one program for each (page, kv head)."""
    num_heads, head_dim = keys.shape[1:]
    words = digests.view(torch.int32)
    assert head_dim % 2 == 0 and page_size % WORD_TOKENS == 0
    assert keys.stride(2) == 1 and digests.is_contiguous()
    _digest_two_bit[(len(host_pages), num_heads)](
        *as_bytes(keys),
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
        WORD=WORD_TOKENS,
        FLOAT=float_type(keys),
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )


@triton.jit
def _digest_two_bit(
    p_keys,  # [T, H, D]
    p_starts,  # [N, H]
    p_host_pages,  # [N]
    p_digests,  # [n_page, H, E]
    p_words,  # [n_page, H, E_WORDS], the memory of p_digests
    stride_token,
    stride_head,
    starts_stride_page,
    starts_stride_head,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    E_WORDS: tl.constexpr,
    WORD: tl.constexpr,
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
    m_s, m_d = o_s[:, None] < S, o_d < D // 2
    p_half = p_keys + i_head * stride_head + (i_start + o_s[:, None]) * stride_token + o_d[None, :]
    p_digest = p_digests + (i_page * H + i_head) * E + o_d
    b_codes = tl.zeros((BLOCK_S, BLOCK_D), tl.int32)
    for half in tl.static_range(2):  # the dimensions in a word's low bits, then those in its high bits
        b_keys = numbers(tl.load(p_half + half * (D // 2), mask=m_s & m_d[None, :], other=0), FLOAT)
        b_upper = tl.reduce(tl.where(m_s, b_keys, float("-inf")), 0, larger)
        b_lower = tl.reduce(tl.where(m_s, b_keys, float("inf")), 0, smaller)
        b_above, b_span = 6 * (b_keys - b_lower[None, :]), (b_upper - b_lower)[None, :]
        b_code = (b_above > b_span).to(tl.int32) + (b_above > 3 * b_span).to(tl.int32) + (b_above > 5 * b_span).to(tl.int32)
        b_codes |= tl.where(m_s, b_code, 0) << (2 * (o_s % WORD) + half * 2 * WORD)[:, None]
        tl.store(p_digest + half * (D // 2), b_upper, mask=m_d)
        tl.store(p_digest + D + half * (D // 2), b_lower, mask=m_d)
    b_words = tl.sum(tl.reshape(b_codes, (BLOCK_S // WORD, WORD, BLOCK_D)), 1)
    o_word = tl.arange(0, BLOCK_S // WORD)[:, None]
    p_word = p_words + (i_page * H + i_head + 1) * E_WORDS - S // WORD * (D // 2) + o_word * (D // 2) + o_d[None, :]
    tl.store(p_word, b_words, mask=(o_word < S // WORD) & m_d[None, :])
