# SPDX-License-Identifier: Apache-2.0
"""Shares: partial results of a decode attention, until they are merged."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shares(NamedTuple):
    """N partial results. ``attend_present`` and ``attend_rest`` each write their own, in any order or at once; ``merge_shares`` reads all.

    Args:
        outputs: ``[B, Hq, N, D]`` attention over a part of the tokens; undefined where the part's weight is -inf. float32 on a GPU, and
            the dtype of the queries elsewhere.
        weights: ``[B, Hq, N]`` float32 logarithm to base 2 of the part's sum of exponentials, -inf for a part without tokens.
    """

    outputs: torch.Tensor
    weights: torch.Tensor
