# SPDX-License-Identifier: Apache-2.0
"""KV: keys and values as they are stored, and the scales of those that have some."""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOAT_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)  # codes that need no scales
LARGEST_CODE = 127  # of int8; -128 is no code, so that a number and its negative have codes of one size


class Scales(NamedTuple):
    """Scales of coded KV: a code times the scale of its token and kv head is a number of the key or value.

    Args:
        keys, values: ``[..., H]`` float16.
    """

    keys: torch.Tensor
    values: torch.Tensor


class KV(NamedTuple):
    """Keys and values in token rows or in frames.

    Args:
        keys, values: ``[..., H, D]`` numbers, or codes of them: int8 with scales, or 8-bit floats, as which numbers are rounded. Keys with
            scales are rotated, as by ``reference.rotate``.
        scales: of int8 codes; else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it lies on a GPU."""
        return self.keys.is_cuda

    @property
    def token_rows(self) -> KV:
        """Frames ``[F, S, H, D]`` as token rows ``[F * S, H, D]``."""
        scales = self.scales and Scales(*(each.flatten(0, 1) for each in self.scales))
        return KV(self.keys.flatten(0, 1), self.values.flatten(0, 1), scales)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values, and their scales if there are any."""
        return self.keys, self.values, *(self.scales or ())
