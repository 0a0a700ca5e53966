# SPDX-License-Identifier: Apache-2.0
"""Stamps: when a kernel of a sampled decode step began and ended, and what they come to."""

from __future__ import annotations

import time

import torch

PLACES = 4  # of a stamp [4] int64; the last is unused, and makes all of them as aligned as a kernel is compiled for
SAMPLED, BEGIN, END = range(3)  # whether to write it; nanoseconds of a clock, an END of 0 for what did not happen
KINDS = CORRECTION, AHEAD, ATTENTION = range(3)  # a layer's stamps: its recalls, and its attention to present pages
RECALL_NS, WAIT_NS, SAMPLED_STEPS, STEPS = range(4)  # of the totals [4] int64


def write_stamp(stamp: torch.Tensor) -> None:
    """Write down the time of the stream as the END of ``stamp [4]`` int64, if the step is sampled."""
    if stamp[SAMPLED]:
        stamp[END] = time.perf_counter_ns()


def settle_stamps(stamps: torch.Tensor, rows: torch.Tensor, totals: torch.Tensor, every: int) -> None:
    """Add up a step's stamps, if it was sampled, and decide whether the next one is.

    A recall takes from its begin to its end. The computation waits for that part of a correction's recall which comes behind the end of the
    attention to present pages. It waits for that part of a recall ahead which comes behind the end of the computation.

    Args:
        stamps: ``[L + 1, 3, 4]`` int64, of each layer, and of the computation: its end is ``stamps[L, ATTENTION, END]``. Ends become 0.
        rows: ``[B]`` rows of the step's requests; a step of padding alone is none.
        totals: ``[4]`` int64, added to: nanoseconds of recall and of waiting, steps that were sampled, and all steps.
        every: one step of so many is sampled.
    """
    layers = stamps[:-1]
    if (rows > 0).any():
        if stamps[-1, ATTENTION, SAMPLED]:
            for kind, computed in ((CORRECTION, layers[:, ATTENTION, END]), (AHEAD, stamps[-1, ATTENTION, END])):
                begin, end = layers[:, kind, BEGIN], layers[:, kind, END]
                totals[RECALL_NS] += (end - begin).where(end > 0, 0).sum()
                totals[WAIT_NS] += (end - begin.maximum(computed)).clamp(min=0).sum()
            totals[SAMPLED_STEPS] += 1
        totals[STEPS] += 1
        stamps[..., SAMPLED] = totals[STEPS] % every == 0
    stamps[..., END] = 0
