# SPDX-License-Identifier: Apache-2.0
"""Shares: what each of several calls found of a decode attention, until they are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shares(NamedTuple):
    """Made by ``allocate_shares``, written by ``attend_present`` and ``attend_rest`` in any order or at once, read by ``merge_shares``.

    Args:
        outputs: ``[B, Hq, N, D]`` attention to a part of the tokens each, of which a call has its own; anything where it weighs nothing.
            float32 on a GPU, of the queries' dtype elsewhere.
        weights: ``[B, Hq, N]`` float32 logarithm to base 2 of what a part weighs; -inf for nothing.
    """

    outputs: torch.Tensor
    weights: torch.Tensor
