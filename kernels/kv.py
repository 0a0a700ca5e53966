# SPDX-License-Identifier: Apache-2.0
"""KV: keys and values as they are stored, and the scales of coded ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_CODE = 127  # -128 is no code, so that a number and its negative have codes of one size


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
        keys, values: ``[..., H, D]`` numbers, or int8 codes of them. Keys that are coded are rotated, as by ``reference.rotate``.
        scales: of codes; None for numbers.
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
