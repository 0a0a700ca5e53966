# SPDX-License-Identifier: Apache-2.0
"""Units: what came from the host pool, and where it is on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Units(NamedTuple):
    """Units that a recall or a staging brought. ``verify_units`` compares them with their checksums.

    Args:
        starts: ``[M]``; a unit's first token is in token row ``start * tokens_per_start``.
        tokens_per_start: the page size if ``starts`` are frames, 1 if they are token rows.
        heads, host_pages: ``[M]`` kv head and host page of each unit.
        length: ``[2]`` int32: the number of units among the M entries, and a number that differs from call to call.
    """

    starts: torch.Tensor
    tokens_per_start: int
    heads: torch.Tensor
    host_pages: torch.Tensor
    length: torch.Tensor
