# SPDX-License-Identifier: Apache-2.0
"""StagedLayers: host pools and token rows of all layers, and where they are in memory, for one launch over many layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class StagedLayers(NamedTuple):
    """L layers, all alike.

    Args:
        host: ``[n_page, H, 2, S, D]`` of each layer.
        keys, values: ``[T, H, D]`` of each layer.
        addresses: ``[L, 3]`` int64 addresses of these three, on the device of the keys.
    """

    host: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    addresses: torch.Tensor

    @classmethod
    def of(cls, host: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> StagedLayers:
        """Layers whose tensors must live as long as the result."""
        assert all(tensor.stride() == layers[0].stride() for layers in (host, [*keys, *values]) for tensor in layers)
        addresses = [[tensor.data_ptr() for tensor in layer] for layer in zip(host, keys, values, strict=True)]
        return cls(host, keys, values, torch.tensor(addresses, dtype=torch.int64, device=keys[0].device))
