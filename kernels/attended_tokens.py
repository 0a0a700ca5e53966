# SPDX-License-Identifier: Apache-2.0
"""The tokens that a program attends to: a loop over tiles of its list, with a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tokens_of(i_n, splits, present, seq_len, A, BUDGET, REST: tl.constexpr, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """The first and the last token of split ``i_n`` of the present pages, or of the rest, in whole tiles."""
    num_pages = tl.cdiv(seq_len, S)
    tokens = S * tl.where(num_pages <= A, num_pages, BUDGET)
    begin, end = 0, tl.minimum(present * S, tokens)
    if REST:
        begin, end = end, tokens
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_T), splits) * BLOCK_T
    first = begin + i_n * share
    return first, tl.minimum(first + share, end), end


@triton.jit
def attend_tokens(
    b_q,
    p_keys,
    p_values,
    p_reads,
    head,
    first,
    last,
    seq_len,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Attention of ``b_q [BLOCK_G, BLOCK_D]`` to the listed tokens from ``first`` to ``last``: output, sum and maximum of its softmax."""
    BLOCK_G: tl.constexpr = b_q.shape[0]
    BLOCK_D: tl.constexpr = b_q.shape[1]
    p_frames, p_pages = p_reads
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    o_row, m_visible = locate(p_frames, p_pages, first + o_t, last, seq_len, S)
    for start in range(first, last, BLOCK_T):
        o_kv, m_kv = (o_row[:, None] * H + head) * D + o_d[None, :], m_visible[:, None] & m_d[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0.0)  # [BLOCK_T, BLOCK_D]
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0.0)
        m_logit = m_visible
        o_row, m_visible = locate(p_frames, p_pages, start + BLOCK_T + o_t, last, seq_len, S)

        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_logit = tl.where(m_logit[None, :], b_logit, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_base = tl.where(b_new > float("-inf"), b_new, 0.0)  # no token visible yet: avoids inf - inf
        b_p = tl.exp2(b_logit - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
        b_max = b_new
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)  # keeps NaN, which makes the weight NaN: a weight of -inf would leave it out of the merge
    return b_acc / b_sum[:, None], b_sum, b_max


@triton.jit
def locate(p_frames, p_pages, o_token, last, seq_len, S: tl.constexpr):
    """Token rows of the listed tokens ``o_token`` in the device cache, and a mask of those that may be read."""
    frame = tl.load(p_frames + o_token // S, mask=o_token < last, other=-1).to(tl.int64)
    page = tl.load(p_pages + o_token // S, mask=o_token < last, other=0)
    return frame * S + o_token % S, (frame >= 0) & (page * S + o_token % S < seq_len)
