# SPDX-License-Identifier: Apache-2.0
"""Select, inside a kernel: the weights of one kv head's candidate pages, and the heaviest of them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sglang_freekv.config import PART_PAGES
from sglang_freekv.kernels.candidates import Candidates, Tables

# Weights are compared as integers of at least LIGHTEST. EXCLUDED takes no part in a choice.
EXCLUDED = tl.constexpr(-(2**31))
LIGHTEST = tl.constexpr(-(2**31) + 1)
HEAVIEST = tl.constexpr(2**31 - 1)
FAINT = tl.constexpr(-3.0e38)  # as in reference_plan

BLOCKS = (1024, PART_PAGES)  # P_FEW and P_MANY, if the longest possible context has more pages than the first


class Sizes(NamedTuple):
    """Sizes for which a kernel that selects is compiled; letters as in ``reference``."""

    SINK: int
    SELECTED: int
    WINDOW: int
    H: int
    G: int
    S: int
    C: int
    A: int
    BUDGET: int  # pages that a context of more than A pages attends to; A if no context attends to more
    G_BLOCK: int
    C_BLOCK: int
    A_BLOCK: int
    BUDGET_BLOCK: int
    P_FEW: int  # a context with at most so many candidates takes the shorter path
    P_MANY: int  # pages that a program holds at a time; a context with more is preselected in parts of so many
    P_BLOCK: int  # not less than the longest possible context has


def sizes_of(candidates: Candidates, tables: Tables) -> Sizes:
    (_, num_heads, num_pages), (_, num_kv_heads, capacity) = candidates.logits.shape, tables.slot_pages.shape
    group, num_attended, block = num_heads // num_kv_heads, tables.attended.shape[2], triton.next_power_of_2(num_pages)
    return Sizes(
        SINK=candidates.budget.sink,
        SELECTED=candidates.budget.selected,
        WINDOW=candidates.budget.window,
        H=num_kv_heads,
        G=group,
        S=candidates.page_size,
        C=capacity,
        A=num_attended,
        BUDGET=candidates.budget.total,
        G_BLOCK=triton.next_power_of_2(group),
        C_BLOCK=triton.next_power_of_2(capacity),
        A_BLOCK=triton.next_power_of_2(num_attended),
        BUDGET_BLOCK=triton.next_power_of_2(candidates.budget.total),
        P_FEW=min(block, BLOCKS[0]),
        P_MANY=min(block, BLOCKS[1]),
        P_BLOCK=block,
    )


@triton.jit
def most_to_choose(p_frames, num_pages, P, SIZES: tl.constexpr):
    """As reference_plan.most_to_choose, for one context with ``p_frames [P]``."""
    most = SIZES.SELECTED
    if SIZES.A > SIZES.BUDGET:
        o_a = tl.arange(0, SIZES.A_BLOCK)
        b_frame = tl.load(p_frames + o_a, mask=o_a < tl.minimum(num_pages, P), other=0)
        absent = tl.sum((b_frame < 0).to(tl.int32), 0)
        most = tl.where((num_pages <= SIZES.A) & (absent <= SIZES.C), SIZES.A, SIZES.SELECTED)
    return most


@triton.jit
def most_finds(P, SIZES: tl.constexpr):
    """How many pages the parts of a context of at most ``P`` pages find at most; no plan chooses more than A of a part."""
    return tl.cdiv(P, SIZES.P_MANY) * min(SIZES.P_MANY, SIZES.A)


@triton.jit
def due(seq_len, S: tl.constexpr, A: tl.constexpr, BUDGET: tl.constexpr):
    """As candidates.due, for one row."""
    is_due = seq_len % S == 0
    if A > BUDGET:
        is_due = is_due | (seq_len <= A * S)
    return is_due


@triton.jit
def stands_still(corrected, lost, seq_len, SIZES: tl.constexpr, REST: tl.constexpr, AHEAD_FIRST: tl.constexpr, ON_TURN: tl.constexpr):
    """Whether a kv head of a request selects nothing in a plan before attention, or behind it (``REST``)."""
    keeps = ON_TURN & ~due(seq_len, SIZES.S, SIZES.A, SIZES.BUDGET)  # nobody plans ahead
    if REST:
        stands = keeps | ((corrected == 0) & (lost == 0) & AHEAD_FIRST) | ((corrected != 0) & (seq_len % SIZES.S != 0))
    else:
        stands = (keeps | (not AHEAD_FIRST)) & (corrected == 0) & (lost == 0)
    return stands


@triton.jit
def weigh(p_logits, first, num_pages, P, SIZES: tl.constexpr, POOLING: tl.constexpr, P_BLOCK: tl.constexpr):
    """Weights of the pages from ``first`` on, from ``p_logits [G, P]``, and how many of all pages are candidates.

    The weights are those of reference.select_pages as integers in the same order, without a term that all pages share.
    """
    o_p = first + tl.arange(0, P_BLOCK)
    m_candidate = (o_p >= SIZES.SINK) & (o_p < tl.minimum(num_pages - SIZES.WINDOW, P))
    if POOLING == "softmax-mean":
        b_weight = _softmax_mean(p_logits, o_p, m_candidate, P, SIZES.G, SIZES.G_BLOCK, P_BLOCK)
    else:
        b_weight = pooled_logits(p_logits, o_p, m_candidate, P, SIZES.G, POOLING)
    free = tl.maximum(tl.minimum(num_pages - SIZES.WINDOW, P) - SIZES.SINK, 0)
    return tl.where(m_candidate, ordered(b_weight), EXCLUDED), free


@triton.jit
def ordered(b_weight):
    """Floats as integers in the same order."""
    b_bits = b_weight.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(b_order):
    """The floats of which ``ordered`` made these integers."""
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _softmax_mean(p_logits, o_p, m_candidate, P, G: tl.constexpr, G_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr):
    """Logarithm of the softmax over the candidates, summed over the group. The mean's term ``-log(G)`` is left out."""
    if G_BLOCK * P_BLOCK <= 16384:  # the whole group at once
        o_g = tl.arange(0, G_BLOCK)[:, None]
        b_logits = tl.load(p_logits + o_g * P + o_p[None, :], mask=(o_g < G) & m_candidate[None, :], other=float("-inf"))
        b_logits -= tl.max(b_logits, 1)[:, None]
        b_logits -= tl.log(tl.sum(tl.exp(b_logits), 1))[:, None]
        b_logits = tl.where(o_g < G, tl.maximum(b_logits, FAINT), FAINT)  # NaN becomes FAINT too: from here on all is finite
        b_top = tl.max(b_logits, 0)
        b_sum = tl.sum(tl.exp(b_logits - b_top[None, :]), 0)
    else:
        b_top, b_sum = tl.full([P_BLOCK], FAINT, tl.float32), tl.zeros([P_BLOCK], tl.float32)
        b_next = tl.load(p_logits + o_p, mask=m_candidate, other=float("-inf"))
        for g in range(1, G + 1):
            b_logit = b_next
            b_next = tl.load(p_logits + g * P + o_p, mask=m_candidate & (g < G), other=float("-inf"))  # loads while this head is reduced
            b_logit -= tl.max(b_logit, 0)
            b_logit -= tl.log(tl.sum(tl.exp(b_logit), 0))
            b_logit = tl.maximum(b_logit, FAINT)  # NaN too
            b_less = tl.exp(tl.minimum(b_logit, b_top) - tl.maximum(b_logit, b_top))
            b_sum = tl.where(b_logit > b_top, b_sum * b_less + 1, b_sum + b_less)
            b_top = tl.maximum(b_logit, b_top)
    return b_top + tl.log(b_sum)


@triton.jit
def pooled_logits(p_logits, o_p, m_candidate, P, G: tl.constexpr, POOLING: tl.constexpr):
    """Mean or maximum of the group's logits. A logit that overflowed does not count."""
    b_weight = tl.full(o_p.shape, 0.0 if POOLING == "mean" else FAINT, tl.float32)
    for g in tl.static_range(G):
        b_logit = tl.load(p_logits + g * P + o_p, mask=m_candidate, other=0.0)
        m_finite = tl.abs(b_logit) < -FAINT
        if POOLING == "mean":
            b_weight += tl.where(m_finite, b_logit / G, 0.0)
        else:
            b_weight = tl.maximum(b_weight, tl.where(m_finite, b_logit + 0.0, FAINT))  # -0 becomes 0, so that the two tie
    return b_weight


@triton.jit
def heaviest(b_weight, free, num):
    """Mask of the ``num`` greatest of the ``free`` integers that are not EXCLUDED, or of all of them; of equal integers the first.

    Each round of the search divides its range by four. A round costs a barrier of the block, and three thresholds share it.
    """
    num = tl.minimum(free, num)
    # Invariant: num_above integers are at least low, and num_above >= num. Fewer than num are at least high.
    num_above = tl.where(num > 0, free, 0)
    high = tl.max(b_weight, 0) + 1
    low = tl.where(num > 0, tl.min(tl.where(b_weight != EXCLUDED, b_weight, HEAVIEST), 0), high)
    while (num_above > num) & (low + 1 < high):
        first, second, third = thresholds(low, high)
        counts = tl.sum(counted(b_weight, first, second, third), 0)
        low, high, num_above = narrow(low, high, num_above, num, counts, first, second, third)
    m_chosen = b_weight >= low
    if num_above > num:
        b_equal = (b_weight == low).to(tl.int32)
        fitting = num - num_above + tl.sum(b_equal, 0)
        m_chosen = m_chosen & ((b_equal == 0) | (tl.cumsum(b_equal, 0) <= fitting))
    return m_chosen


@triton.jit
def thresholds(low, high):
    """Three integers that divide the range of a search by four."""
    span = (high - low).to(tl.uint32, bitcast=True)
    step = tl.maximum(span >> 2, 1)
    first = low + step.to(tl.int32, bitcast=True)
    second = low + tl.minimum(2 * step, span).to(tl.int32, bitcast=True)
    third = low + tl.minimum(3 * step, span).to(tl.int32, bitcast=True)
    return first, second, third


@triton.jit
def counted(b_weight, first, second, third):
    """Which integers are at least each threshold, in 20 bits of an int64 each."""
    return (b_weight >= first).to(tl.int64) + ((b_weight >= second).to(tl.int64) << 20) + ((b_weight >= third).to(tl.int64) << 40)


@triton.jit
def narrow(low, high, num_above, num, counts, first, second, third):
    """The part of a search's range that the sums of ``counted`` leave."""
    above_first = (counts & 0xFFFFF).to(tl.int32)
    above_second = (counts >> 20 & 0xFFFFF).to(tl.int32)
    above_third = (counts >> 40).to(tl.int32)
    high = tl.where(above_third >= num, high, tl.where(above_second >= num, third, tl.where(above_first >= num, second, first)))
    num_above = tl.where(above_first >= num, above_first, num_above)
    low = tl.where(above_first >= num, first, low)
    num_above = tl.where(above_second >= num, above_second, num_above)
    low = tl.where(above_second >= num, second, low)
    num_above = tl.where(above_third >= num, above_third, num_above)
    low = tl.where(above_third >= num, third, low)
    return low, high, num_above
