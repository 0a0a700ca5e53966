# SPDX-License-Identifier: Apache-2.0
"""Stamps: the times at which kernels of a sampled decode step began and ended, and their sums. This file specifies ``stamps.py``."""

from __future__ import annotations

import time

import torch

PLACES = 4  # elements of a stamp, int64. The last is unused; it aligns every stamp to 16 bytes, for which kernels are compiled
SAMPLED, BEGIN, END = range(3)  # elements of a stamp: whether the step is sampled, then nanoseconds; END is 0 without work
KINDS = CORRECTION, AHEAD, ATTENTION = range(3)  # stamps of a layer: its two recalls, and its attention to present pages
RECALL_NS, WAIT_NS, SAMPLED_STEPS, STEPS = range(4)  # elements of the totals [4] int64


def write_stamp(stamp: torch.Tensor) -> None:
    """Write the present time of the stream to END of ``stamp [4]`` int64, if the step is sampled."""
    if stamp[SAMPLED]:
        stamp[END] = time.perf_counter_ns()


def settle_stamps(stamps: torch.Tensor, rows: torch.Tensor, totals: torch.Tensor, every: int) -> None:
    """Add up a step's stamps, if it was sampled, and decide whether the next one is.

    A recall lasts from its begin to its end. The computation waits for the part of a correction's recall that comes after attention to
    present pages has ended. It waits for the part of a recall ahead that comes after all layers have been computed.

    Args:
        stamps: ``[L + 1, 3, 4]`` int64: three stamps of each of L layers. ``stamps[L, ATTENTION, END]`` is the end of the computation.
            Every END becomes 0, and every SAMPLED tells whether the next step is sampled.
        rows: ``[B]`` rows of the step's requests. A step with padding (row 0) only is not counted.
        totals: ``[4]`` int64, added to in place: nanoseconds of recall, nanoseconds of waiting, sampled steps, and all steps.
        every: one step in ``every`` is sampled.
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
