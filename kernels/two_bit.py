# SPDX-License-Identifier: Apache-2.0
"""Two-bit digests of full pages, and the scores of candidate pages from them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import WORD_TOKENS, PageBudget
from sglang_freekv.kernels.digest import larger, smaller

# Trials of both numbers: benchmarks/results/bench_step-history.json.
PROGRAMS = 792  # six for each SM of an H100 or H200, all resident at once
PAGES = 32  # pages of a tile: the rows of a product by two warps, which unpack its operand in registers
UNROLLED = 2  # most words of a page that the compiler unrolls: more take minutes


def digest_two_bit(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """As reference.digest_two_bit, NaN included; one program for each (page, kv head)."""
    num_heads, head_dim = keys.shape[1:]
    words = digests.view(torch.int32)
    assert head_dim % 2 == 0 and page_size % WORD_TOKENS == 0
    assert keys.stride(2) == 1 and digests.is_contiguous()
    _digest_two_bit[(len(host_pages), num_heads)](
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
        WORD=WORD_TOKENS,
        BLOCK_S=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )


def score_two_bit(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    *,
    scale: float,
    selects: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`reference.score_two_bit`, with keys in the digests' dtype. Only candidates are written.

    Nothing is written for a padding request or a kv head that does not select. One program for each (share of the tiles of pages, kv head,
    request). ``queries`` may be a view of wider rows.
    """
    (batch, num_heads, head_dim), num_kv_heads, num_pages = queries.shape, digests.shape[1], page_table.shape[1]
    group, words = num_heads // num_kv_heads, digests.view(torch.int32)
    assert queries.stride(2) == 1 and digests.is_contiguous() and page_table.is_contiguous()
    logits = torch.empty(batch, num_heads, num_pages, dtype=torch.float32, device=queries.device)
    launch = score_launch(group, head_dim, digests.element_size())
    shares = max(1, min(PROGRAMS // (batch * num_kv_heads), triton.cdiv(num_pages, launch["BLOCK_P"])))
    _score_two_bit[(shares, num_kv_heads, batch)](
        queries,
        digests,
        words,
        rows,
        seq_lens,
        page_table,
        logits,
        selects,
        queries.stride(0),
        queries.stride(1),
        num_pages,
        budget.sink,
        budget.window,
        scale,
        H=num_kv_heads,
        G=group,
        D=head_dim,
        S=page_size,
        E=digests.shape[2],
        E_WORDS=words.shape[2],
        WORD=WORD_TOKENS,
        **launch,
    )
    return logits


def score_launch(group: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """Block sizes and launch options of the score's kernel. The corners of a tile fit the registers for every ``head_dim``."""
    block_d = max(8, triton.next_power_of_2(head_dim // 2))
    return {
        "UNROLLED": UNROLLED,
        "BLOCK_G": max(8, triton.next_power_of_2(group)),
        "BLOCK_P": max(16, min(PAGES, 4096 // (block_d * element_bytes))),
        "BLOCK_D": block_d,
        "num_warps": 2,
        "num_stages": 2,
    }


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
        b_keys = tl.load(p_half + half * (D // 2), mask=m_s & m_d[None, :], other=0).to(tl.float32)
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


@triton.jit(do_not_specialize=("sink", "window"))
def _score_two_bit(
    p_queries,  # [B, Hq, D]
    p_digests,  # [n_page, H, E]
    p_words,  # [n_page, H, E_WORDS], the memory of p_digests
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_logits,  # [B, Hq, P]
    p_selects,  # [B, H] or None
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
    WORD: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens = tl.load(p_seq_lens + i_b).to(tl.int32) + 1
    row = tl.load(p_rows + i_b)
    end = tl.where(row != 0, tl.minimum((tokens + S - 1) // S - window, P), 0)
    if p_selects is not None:
        end = tl.where(tl.load(p_selects + i_b * H + i_h).to(tl.int32) != 0, end, 0)
    first = sink + i_n * BLOCK_P
    if first >= end:
        return

    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = p_digests.dtype.element_ty
    o_t, o_g, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G), tl.arange(0, 2 * BLOCK_D)
    m_g = o_g < G
    o_head = i_h * G + o_g
    o_q = (o_head * stride_h)[None, :] + (o_k // 2 + o_k % 2 * HALF)[:, None]  # d and d + D / 2 side by side, as in a word
    b_q = tl.load(p_queries + i_b * stride_b + o_q, mask=(o_k // 2 < HALF)[:, None] & m_g[None, :], other=0.0).to(dtype)
    p_table = p_page_table + i_b * P
    p_out = p_logits + (i_b * (H * G) + o_head[None, :]) * P
    b_page = tl.load(p_table + first + o_t, mask=first + o_t < end, other=0)
    for start in range(first, end, tl.num_programs(0) * BLOCK_P):
        o_p = start + o_t
        m_p = o_p < end
        unit = tl.maximum(b_page, 0).to(tl.int64) * H + i_h
        p_upper = p_digests + unit[:, None] * E
        p_word = p_words + (unit[:, None] + 1) * E_WORDS - S // WORD * HALF
        o_next = o_p + tl.num_programs(0) * BLOCK_P
        b_page = tl.load(p_table + o_next, mask=o_next < end, other=0)
        b_logit = _page_logits(b_q, p_upper, p_word, m_p, scale, D, S, WORD, UNROLLED)
        tl.store(p_out + o_p[:, None], b_logit, mask=m_p[:, None] & m_g[None, :])


@triton.jit
def _page_logits(b_q, p_upper, p_word, m_p, scale, D: tl.constexpr, S: tl.constexpr, WORD: tl.constexpr, UNROLLED: tl.constexpr):
    """``[BLOCK_P, BLOCK_G]`` logarithms of a page's sum of exponentials over its tokens, from the digests of a tile of pages."""
    HALF: tl.constexpr = D // 2
    BLOCK_P: tl.constexpr = m_p.shape[0]
    BLOCK_D: tl.constexpr = b_q.shape[0] // 2
    BLOCK_G: tl.constexpr = b_q.shape[1]
    LN_2: tl.constexpr = 0.6931471805599453
    o_d = tl.arange(0, BLOCK_D)
    m_pd = m_p[:, None] & (o_d < HALF)[None, :]
    p_upper += o_d[None, :]
    p_word += o_d[None, :]
    b_low_base, b_low_slope = _line(p_upper, p_upper + D, m_pd)
    b_high_base, b_high_slope = _line(p_upper + HALF, p_upper + D + HALF, m_pd)
    b_base = tl.reshape(tl.join(b_low_base, b_high_base).to(b_q.dtype), (BLOCK_P, 2 * BLOCK_D))
    b_slope = tl.reshape(tl.join(b_low_slope, b_high_slope).to(b_q.dtype), (BLOCK_P, 2 * BLOCK_D))
    b_top = tl.full((BLOCK_P, BLOCK_G), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    if S // WORD <= UNROLLED:
        for word in tl.static_range(S // WORD):
            b_word = tl.load(p_word + word * HALF, mask=m_pd, other=0)
            b_top, b_sum = _add_tokens(b_top, b_sum, b_word, b_slope, b_base, b_q, scale / LN_2, WORD)
    else:
        for word in range(S // WORD):
            b_word = tl.load(p_word + word * HALF, mask=m_pd, other=0)
            b_top, b_sum = _add_tokens(b_top, b_sum, b_word, b_slope, b_base, b_q, scale / LN_2, WORD)
    return (tl.log2(b_sum) + b_top) * LN_2


@triton.jit
def _add_tokens(b_top, b_sum, b_word, b_slope, b_base, b_q, scale, WORD: tl.constexpr):
    """Add a word's tokens to ``b_top``, the largest logit to base 2, and ``b_sum``, the sum of exponentials relative to it."""
    for token in tl.static_range(WORD):
        b_keys = tl.reshape(codes_of(b_word, token, b_q.dtype), b_slope.shape) * b_slope + b_base
        b_dots = tl.dot(b_keys, b_q, input_precision="ieee") * scale
        b_new = tl.maximum(b_top, b_dots)
        b_sum = b_sum * tl.exp2(b_top - b_new) + tl.exp2(b_dots - b_new)
        b_top = b_new
    return b_top, b_sum


@triton.jit
def _line(p_upper, p_lower, mask):
    """Base and slope of a key as a linear function of 1 + code / 4."""
    b_lower = tl.load(p_lower, mask=mask, other=0.0).to(tl.float32)
    b_slope = (tl.load(p_upper, mask=mask, other=0.0).to(tl.float32) - b_lower) * (4 / 3)
    return b_lower - b_slope, b_slope


@triton.jit
def codes_of(b_word, token: tl.constexpr, dtype: tl.constexpr):
    """A token's codes ``[P, D / 2, 2]`` as numbers 1 + code / 4 of ``dtype``: the code becomes the first bits of the mantissa."""
    if dtype == tl.float32:
        b_pair = tl.join((b_word >> (2 * token)) & 3, (b_word >> (2 * token + 16)) & 3)
        b_pair = (b_pair << 21) | 0x3F800000
    else:  # both halves of the word at once
        first: tl.constexpr = 5 if dtype == tl.bfloat16 else 8
        one: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
        if 2 * token < first:
            b_bits = b_word << (first - 2 * token)
        else:
            b_bits = b_word >> (2 * token - first)
        b_bits = (b_bits & (0x00030003 << first)) | one
        b_pair = tl.join(b_bits.to(tl.int16), (b_bits >> 16).to(tl.int16))
    return b_pair.to(dtype, bitcast=True)
