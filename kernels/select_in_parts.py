# SPDX-License-Identifier: Apache-2.0
"""Select in parts, inside a kernel: the heaviest of many pages, whose weights lie in the notes of ``placement``."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.select import EXCLUDED, FAINT, HEAVIEST, counted, narrow, ordered, pooled_logits, thresholds

AT_ONCE = tl.constexpr(4096)  # logits of a group, of which each thread keeps 16 largest ones and 16 sums


@triton.jit
def weigh_in_parts(p_group, p_weights, end, P, SIZES: tl.constexpr, POOLING: tl.constexpr, PART: tl.constexpr):
    """Write to ``p_weights [P]`` what ``weigh`` returns of the candidates, which lie between the sink and ``end``."""
    b_top, b_log_sum = tl.full([SIZES.G_BLOCK], 0, tl.float32), tl.full([SIZES.G_BLOCK], 0, tl.float32)
    if POOLING == "softmax-mean":
        b_top, b_log_sum = norms(p_group, SIZES.SINK, end, P, SIZES, min(PART, AT_ONCE // SIZES.G_BLOCK))
    weigh_pages(p_group, p_weights, SIZES.SINK, end, b_top, b_log_sum, P, SIZES, POOLING, PART)


@triton.jit
def weigh_pages(p_group, p_weights, begin, end, b_top, b_log_sum, P, SIZES: tl.constexpr, POOLING: tl.constexpr, PART: tl.constexpr):
    """Write the weights of the candidates from ``begin`` to ``end``, with ``norms`` of all candidates if softmax needs them."""
    if POOLING == "softmax-mean":
        SPAN: tl.constexpr = min(PART, AT_ONCE // SIZES.G_BLOCK)
        o_g = tl.arange(0, SIZES.G_BLOCK)[:, None]
        for first in range(begin, end, SPAN):
            o_p = first + tl.arange(0, SPAN)
            b_logits = tl.load(p_group + o_g * P + o_p[None, :], mask=(o_g < SIZES.G) & (o_p < end)[None, :], other=float("-inf"))
            b_logits = b_logits - b_top[:, None] - b_log_sum[:, None]
            b_logits = tl.where(o_g < SIZES.G, tl.maximum(b_logits, FAINT), FAINT)  # NaN becomes FAINT too, as in weigh
            b_most = tl.max(b_logits, 0)
            b_weight = b_most + tl.log(tl.sum(tl.exp(b_logits - b_most[None, :]), 0))
            tl.store(p_weights + o_p, ordered(b_weight), mask=o_p < end)
    else:
        for first in range(begin, end, PART):
            o_p = first + tl.arange(0, PART)
            b_weight = pooled_logits(p_group, o_p, o_p < end, P, SIZES.G, POOLING)
            tl.store(p_weights + o_p, ordered(b_weight), mask=o_p < end)


@triton.jit
def norms(p_group, begin, end, P, SIZES: tl.constexpr, SPAN: tl.constexpr):
    """``[G_BLOCK]`` largest logits of the candidates from ``begin`` to ``end``, and logarithms of the sums of exponentials relative to them.

    Each thread keeps what it has seen of a logit's place, so that the block meets once, behind the loop.
    """
    o_g = tl.arange(0, SIZES.G_BLOCK)[:, None]
    b_most, b_sums = tl.full([SIZES.G_BLOCK, SPAN], FAINT, tl.float32), tl.full([SIZES.G_BLOCK, SPAN], 0, tl.float32)
    for first in range(begin, end, SPAN):
        o_p = first + tl.arange(0, SPAN)
        b_logits = tl.load(p_group + o_g * P + o_p[None, :], mask=(o_g < SIZES.G) & (o_p < end)[None, :], other=float("-inf"))
        b_less = tl.exp(-tl.abs(b_logits - b_most))  # NaN stays, so that all of the head's weights become FAINT
        b_sums = tl.where(b_logits > b_most, b_sums * b_less + 1, b_sums + b_less)
        b_most = tl.maximum(b_logits, b_most)
    b_top = tl.max(b_most, 1)
    # A product here would be fused with the first addition between threads, which then have sums that differ, and tell equal pages apart.
    return b_top, tl.log(tl.sum(tl.exp(b_most + tl.log(b_sums) - b_top[:, None]), 1))


@triton.jit
def threshold(p_weights, begin, end, num, PART: tl.constexpr):
    """The lightest of the ``num`` heaviest of ``p_weights`` from ``begin`` to ``end``, how many of its equals are among them, and of how many."""
    if end - begin <= PART:
        low, fitting, num_equal = _threshold_at_once(p_weights, begin, end, num, PART)
    else:
        low, fitting, num_equal = _threshold_in_parts(p_weights, begin, end, num, PART)
    return low, fitting, num_equal


@triton.jit
def heaviest_of_part(b_weight, found, seen):
    """Mask of the integers of a part that are among the heaviest, and how many equals of the lightest there are up to it.

    ``found`` is what ``threshold`` returned, and ``seen`` are those equals in the parts before. They are counted only if not all fit.
    """
    low, fitting, num_equal = found
    m_chosen = b_weight >= low
    if num_equal > fitting:
        b_equal = (b_weight == low).to(tl.int32)
        m_chosen = m_chosen & ((b_equal == 0) | (seen + tl.cumsum(b_equal, 0) <= fitting))
        seen += tl.sum(b_equal, 0)
    return m_chosen, seen


@triton.jit
def _threshold_in_parts(p_weights, begin, end, num, PART: tl.constexpr):
    """As ``threshold``, of any number of weights."""
    free = tl.maximum(end - begin, 0)
    num = tl.minimum(free, num)
    b_most, b_least = tl.full([PART], EXCLUDED, tl.int32), tl.full([PART], HEAVIEST, tl.int32)
    for first in range(begin, end, PART):
        o_p = first + tl.arange(0, PART)
        b_weight = tl.load(p_weights + o_p, mask=o_p < end, other=EXCLUDED)
        b_most = tl.maximum(b_most, b_weight)
        b_least = tl.minimum(b_least, tl.where(o_p < end, b_weight, HEAVIEST))
    high = tl.max(b_most, 0) + 1
    low, num_above = tl.where(num > 0, tl.min(b_least, 0), high), tl.where(num > 0, free, 0)
    while (num_above > num) & (low + 1 < high):
        first, second, third = thresholds(low, high)
        b_count = tl.zeros([PART], tl.int64)
        for start in range(begin, end, PART):
            o_p = start + tl.arange(0, PART)
            b_weight = tl.load(p_weights + o_p, mask=o_p < end, other=EXCLUDED)
            b_count += counted(b_weight, first, second, third)
        low, high, num_above = narrow(low, high, num_above, num, tl.sum(b_count, 0), first, second, third)
    b_count = tl.zeros([PART], tl.int32)
    for first in range(begin, end, PART):
        o_p = first + tl.arange(0, PART)
        b_weight = tl.load(p_weights + o_p, mask=o_p < end, other=EXCLUDED)
        b_count += (b_weight > low).to(tl.int32) + ((b_weight >= low).to(tl.int32) << 16)
    b_heavier, b_least = b_count & 0xFFFF, b_count >> 16
    heavier = tl.sum(b_heavier, 0)
    return low, num - heavier, tl.sum(b_least, 0) - heavier


@triton.jit
def _threshold_at_once(p_weights, begin, end, num, PART: tl.constexpr):
    """As ``threshold``, of at most ``PART`` weights, which stay in registers."""
    free = tl.maximum(end - begin, 0)
    num = tl.minimum(free, num)
    o_p = begin + tl.arange(0, PART)
    b_weight = tl.load(p_weights + o_p, mask=o_p < end, other=EXCLUDED)
    high = tl.max(b_weight, 0) + 1
    low, num_above = tl.where(num > 0, tl.min(tl.where(o_p < end, b_weight, HEAVIEST), 0), high), tl.where(num > 0, free, 0)
    while (num_above > num) & (low + 1 < high):
        first, second, third = thresholds(low, high)
        low, high, num_above = narrow(low, high, num_above, num, tl.sum(counted(b_weight, first, second, third), 0), first, second, third)
    counts = tl.sum((b_weight > low).to(tl.int64) + ((b_weight >= low).to(tl.int64) << 32), 0)
    heavier = (counts & 0xFFFFFFFF).to(tl.int32)
    return low, num - heavier, (counts >> 32).to(tl.int32) - heavier
