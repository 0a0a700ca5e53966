# SPDX-License-Identifier: Apache-2.0
"""Scores of candidate pages from two-bit digests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.config import WORD_TOKENS, PageBudget

# By words of a round: twelve or ten for each SM of an H100 or H200, all resident at once. Trials of the score: bench_step-history.json in
# benchmarks/results.
PROGRAMS = {1: 1584, 2: 1320}
PAGES = 16  # pages of a tile: the rows of a product by one warp, which unpacks its operand in registers


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
    """As :func:`reference.score_two_bit`, with distances from the lower corner in the digests' dtype. Only candidates are written.

    Nothing is written for a padding request or a kv head that does not select. One program for each (share of the tiles of pages, kv head,
    request). ``queries`` may be a view of wider rows.
    """
    (batch, num_heads, head_dim), num_kv_heads, num_pages = queries.shape, digests.shape[1], page_table.shape[1]
    group, words = num_heads // num_kv_heads, digests.view(torch.int32)
    assert queries.stride(2) == 1 and digests.is_contiguous() and page_table.is_contiguous()
    logits = torch.empty(batch, num_heads, num_pages, dtype=torch.float32, device=queries.device)
    launch = score_launch(group, head_dim, page_size)
    shares = max(1, min(PROGRAMS[launch["WORDS"]] // (batch * num_kv_heads), triton.cdiv(num_pages, PAGES)))
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


def score_launch(group: int, head_dim: int, page_size: int) -> dict[str, int]:
    """Block sizes and launch options of the score's kernel; ``WORDS`` of a page are one round of its loop.

    Rounds of one word are faster at pages of 32 (the same trials); at pages of 16 neither was timed.
    """
    return {
        "WORDS": 2 if page_size == 2 * WORD_TOKENS else 1,
        "BLOCK_G": max(8, triton.next_power_of_2(group)),
        "BLOCK_P": PAGES,
        "BLOCK_D": max(8, triton.next_power_of_2(head_dim // 2)),
        "num_warps": 1,
        "num_stages": 2,
        "enable_fp_fusion": True,  # numbers_of relies on it
    }


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
    WORDS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    end = _end(p_rows + i_b, p_seq_lens + i_b, None if p_selects is None else p_selects + i_b * H + i_h, window, P, S)
    first = sink + i_n * BLOCK_P
    if first >= end:
        return

    HALF: tl.constexpr = D // 2
    PARTS: tl.constexpr = S // (WORD * WORDS)
    LN_2: tl.constexpr = 0.6931471805599453
    o_t, o_g, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = (o_g < G)[None, :]
    b_q = _queries(p_queries + i_b * stride_b + i_h * G * stride_h, stride_h, G, HALF, BLOCK_G, BLOCK_D).to(p_digests.dtype.element_ty)
    b_minus_one = minus_one(tl.load(p_rows + i_b + 0 * o_t)[:, None], b_q.dtype)
    p_table = p_page_table + i_b * P
    p_out = p_logits + ((i_b * H + i_h) * G + o_g[None, :]) * P
    b_page = tl.load(p_table + first + o_t, mask=first + o_t < end, other=0)
    b_top, b_sum = tl.full((BLOCK_P, BLOCK_G), float("-inf"), tl.float32), tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    stride = tl.num_programs(0) * BLOCK_P
    for i in range(tl.cdiv(end - first, stride) * PARTS):  # one loop, because Triton loads ahead in an innermost one alone
        part, o_p = i % PARTS, first + i // PARTS * stride + o_t
        m_p = (o_p < end)[:, None]
        unit = tl.maximum(b_page, 0).to(tl.int64)[:, None] * H + i_h
        p_upper = p_digests + unit * E + o_d[None, :]
        p_word = p_words + (unit + 1) * E_WORDS - S // WORD * HALF + part * (WORDS * HALF) + o_d[None, :]
        o_next = first + (i + 1) // PARTS * stride + o_t
        b_page = tl.load(p_table + o_next, mask=o_next < end, other=0)
        b_top, b_sum = tl.where(part == 0, float("-inf"), b_top), tl.where(part == 0, 0.0, b_sum)
        b_top, b_sum = _add_words(
            b_top, b_sum, p_upper, p_word, m_p & (o_d < HALF)[None, :], b_q, b_minus_one, scale / LN_2, D, WORD, WORDS
        )
        tl.store(p_out + o_p[:, None], (tl.log2(b_sum) + b_top) * LN_2, mask=m_p & m_g & (part == PARTS - 1))


@triton.jit
def _end(p_row, p_seq_len, p_selects, window, P, S: tl.constexpr):
    """Page behind the last candidate of a request and kv head; 0 if nothing is scored."""
    tokens = tl.load(p_seq_len).to(tl.int32) + 1
    end = tl.where(tl.load(p_row) != 0, tl.minimum((tokens + S - 1) // S - window, P), 0)
    if p_selects is not None:
        end = tl.where(tl.load(p_selects).to(tl.int32) != 0, end, 0)
    return end


@triton.jit
def _queries(p_heads, stride_h, G: tl.constexpr, HALF: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[2 * BLOCK_D, BLOCK_G]`` queries of a group, with d and d + D / 2 side by side, as in a word."""
    o_g, o_k = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, 2 * BLOCK_D)[None, :]
    return tl.trans(tl.load(p_heads + o_g * stride_h + o_k // 2 + o_k % 2 * HALF, mask=(o_g < G) & (o_k // 2 < HALF), other=0.0))


@triton.jit
def _add_words(b_top, b_sum, p_upper, p_word, m_pd, b_q, b_minus_one, scale, D: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Add the tokens of some words to ``b_top``, the largest logit to base 2, and ``b_sum``, the sum of exponentials relative to it.

    Both are ``[BLOCK_P, BLOCK_G]``. The logit of a page's lower corner is a part of those of all its tokens.
    """
    HALF: tl.constexpr = D // 2
    b_low = tl.load(p_upper + D, mask=m_pd, other=0.0).to(tl.float32)
    b_high = tl.load(p_upper + D + HALF, mask=m_pd, other=0.0).to(tl.float32)
    b_low_span = tl.load(p_upper, mask=m_pd, other=0.0).to(tl.float32) - b_low
    b_high_span = tl.load(p_upper + HALF, mask=m_pd, other=0.0).to(tl.float32) - b_high
    b_slope = _side_by_side(b_low_span * (-4 / 3), b_high_span * (-4 / 3), b_q.dtype)
    b_lower = tl.dot(_side_by_side(b_low, b_high, b_q.dtype), b_q, input_precision="ieee")
    for word in tl.static_range(WORDS):
        b_word = tl.load(p_word + word * HALF, mask=m_pd, other=0)
        for token in tl.static_range(0, WORD, 4):
            b_0 = _dots(b_word, token, b_slope, b_lower, b_q, b_minus_one)
            b_1 = _dots(b_word, token + 1, b_slope, b_lower, b_q, b_minus_one)
            b_2 = _dots(b_word, token + 2, b_slope, b_lower, b_q, b_minus_one)
            b_3 = _dots(b_word, token + 3, b_slope, b_lower, b_q, b_minus_one)
            b_new = tl.maximum(b_top, tl.maximum(tl.maximum(b_0, b_1), tl.maximum(b_2, b_3)) * scale)
            b_sum = b_sum * tl.exp2(b_top - b_new) + tl.exp2(b_0 * scale - b_new)
            b_sum += tl.exp2(b_1 * scale - b_new)
            b_sum += tl.exp2(b_2 * scale - b_new)
            b_sum += tl.exp2(b_3 * scale - b_new)
            b_top = b_new
    return b_top, b_sum


@triton.jit
def _side_by_side(b_low, b_high, dtype: tl.constexpr):
    """``[P, 2 * BLOCK_D]`` from two halves in float32: of narrower ones Triton 3.8 makes a layout that it reads two bytes at a time."""
    return tl.reshape(tl.join(b_low, b_high), (b_low.shape[0], 2 * b_low.shape[1])).to(dtype)


@triton.jit
def _dots(b_word, token: tl.constexpr, b_slope, b_lower, b_q, b_minus_one):
    """Products of a token's keys with the queries. Numbers of codes times the slope, plus the slope, are distances from the lower corner."""
    weight: tl.constexpr = 32 >> 2 * (token % 3) if b_q.dtype == tl.bfloat16 else 1
    b_distance = tl.reshape(numbers_of(b_word, token, b_minus_one, b_q.dtype), b_slope.shape) * b_slope + b_slope
    return tl.dot(b_distance, b_q, input_precision="ieee") * weight + b_lower


@triton.jit
def minus_one(b_zero, dtype: tl.constexpr):
    """The bits of -1, twice in a word if ``dtype`` has 16 bits. The compiler joins "and" and "or" of codes if it does not know them.

    ``b_zero`` holds numbers that are not negative, which the compiler does not know.
    """
    bits: tl.constexpr = -0x40800000 if dtype == tl.float32 else -0x407F4080 if dtype == tl.bfloat16 else -0x43FF4400
    return (b_zero >> 31).to(tl.int32) | bits


@triton.jit
def numbers_of(b_word, token: tl.constexpr, b_minus_one, dtype: tl.constexpr):
    """A token's codes ``[P, D / 2, 2]`` as numbers -1 - code / (4 * weight) of ``dtype``: the code becomes bits of the mantissa.

    They are the first bits, and the weight is 1. But in bfloat16 they are where the word has them, or has them shifted by 6 or 12, because
    the shifts take the most time; and the weight is 32, 8 or 2. A number times a slope plus the slope loses nothing if it is rounded once.
    """
    if dtype == tl.float32:
        b_pair = tl.join((b_word >> (2 * token)) & 3, (b_word >> (2 * token + 16)) & 3)
        b_pair = (b_pair << 21) | b_minus_one[:, :, None]
    else:  # both halves of the word at once
        if dtype == tl.bfloat16:
            b_bits = (b_word >> (token // 3 * 6)) & (0x00030003 << (2 * (token % 3)))
        elif token < 4:
            b_bits = (b_word << (8 - 2 * token)) & 0x03000300
        else:
            b_bits = (b_word >> (2 * token - 8)) & 0x03000300
        b_bits |= b_minus_one
        b_pair = tl.join(b_bits.to(tl.int16), (b_bits >> 16).to(tl.int16))
    return b_pair.to(dtype, bitcast=True)
