# SPDX-License-Identifier: Apache-2.0
"""Stamps on a GPU. Kernels read the GPU's clock, so replayed graphs are timed too, and the host need not wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels import reference_stamps as layout

SAMPLED, BEGIN, END, PLACES = (tl.constexpr(number) for number in (layout.SAMPLED, layout.BEGIN, layout.END, layout.PLACES))


def write_stamp(stamp: torch.Tensor) -> None:
    """As ``reference_stamps.write_stamp``."""
    _write_stamp[(1,)](stamp)


def settle_stamps(stamps: torch.Tensor, rows: torch.Tensor, totals: torch.Tensor, every: int) -> None:
    """As ``reference_stamps.settle_stamps``, in one program."""
    assert stamps.is_contiguous()
    _settle_stamps[(1,)](
        stamps,
        rows,
        totals,
        len(stamps) - 1,
        len(rows),
        every,
        CORRECTION=layout.CORRECTION,
        AHEAD=layout.AHEAD,
        ATTENTION=layout.ATTENTION,
        RECALL_NS=layout.RECALL_NS,
        WAIT_NS=layout.WAIT_NS,
        SAMPLED_STEPS=layout.SAMPLED_STEPS,
        STEPS=layout.STEPS,
        BLOCK_L=triton.next_power_of_2(len(stamps)),
        BLOCK_B=max(64, triton.next_power_of_2(len(rows))),  # one kernel for all small batches
        num_warps=1,
    )


@triton.jit
def is_sampled(p_stamp):
    """Whether the step is sampled. A kernel loads this at its beginning, so that no program waits for the load at its end."""
    return tl.load(p_stamp + SAMPLED) != 0


@triton.jit
def note_begin(p_stamp):
    """Write the time to BEGIN, in the first program of a kernel."""
    if tl.program_id(0) == 0:
        tl.store(p_stamp + BEGIN, tl.extra.cuda.globaltimer())


@triton.jit
def note_end(p_stamp):
    """Raise END to the time. The last program of a kernel leaves its time there."""
    tl.debug_barrier()  # waits for all warps of the program
    tl.atomic_max(p_stamp + END, tl.extra.cuda.globaltimer(), sem="relaxed")


@triton.jit
def _write_stamp(p_stamp):
    if is_sampled(p_stamp):
        note_end(p_stamp)


@triton.jit
def _span(p_stamp, computed, mask):
    """Nanoseconds of one kind of recall, and of its part after ``computed``, each summed over all layers."""
    b_begin, b_end = tl.load(p_stamp + BEGIN, mask=mask, other=0), tl.load(p_stamp + END, mask=mask, other=0)
    b_wait = tl.maximum(b_end - tl.maximum(b_begin, computed), 0)
    return tl.sum(tl.where(b_end > 0, b_end - b_begin, 0), 0), tl.sum(b_wait, 0)


@triton.jit(do_not_specialize=("L", "B", "every"))
def _settle_stamps(
    p_stamps,  # [L + 1, 3, PLACES]
    p_rows,  # [B]
    p_totals,  # [4]
    L,
    B,
    every,
    CORRECTION: tl.constexpr,
    AHEAD: tl.constexpr,
    ATTENTION: tl.constexpr,
    RECALL_NS: tl.constexpr,
    WAIT_NS: tl.constexpr,
    SAMPLED_STEPS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    o_l, o_b = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_B)
    p_layer, p_step = p_stamps + o_l * 3 * PLACES, p_stamps + (L * 3 + ATTENTION) * PLACES
    m_layer, zeros = o_l < L, tl.zeros([BLOCK_L], tl.int64)
    b_attended = tl.load(p_layer + ATTENTION * PLACES + END, mask=m_layer, other=0)
    recall, wait = _span(p_layer + CORRECTION * PLACES, b_attended, m_layer)
    ahead, wait_ahead = _span(p_layer + AHEAD * PLACES, tl.load(p_step + END), m_layer)
    sampled, steps = tl.load(p_step + SAMPLED), tl.load(p_totals + STEPS) + 1
    tl.debug_barrier()  # all threads have read what some overwrite
    if tl.max((tl.load(p_rows + o_b, mask=o_b < B, other=0) > 0).to(tl.int32), 0) > 0:
        if sampled != 0:
            tl.store(p_totals + RECALL_NS, tl.load(p_totals + RECALL_NS) + recall + ahead)
            tl.store(p_totals + WAIT_NS, tl.load(p_totals + WAIT_NS) + wait + wait_ahead)
            tl.store(p_totals + SAMPLED_STEPS, tl.load(p_totals + SAMPLED_STEPS) + 1)
        tl.store(p_totals + STEPS, steps)
        sampled = (steps % every == 0).to(tl.int64)
    m_all = o_l <= L
    for kind in tl.static_range(3):
        tl.store(p_layer + kind * PLACES + SAMPLED, zeros + sampled, mask=m_all)
        tl.store(p_layer + kind * PLACES + END, zeros, mask=m_all)
