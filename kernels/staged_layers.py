# SPDX-License-Identifier: Apache-2.0
"""StagedLayers: host pools and token rows of all layers, and where they are in memory, for one launch over many layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_freekv.kernels.kv import Scales


class StagedLayers(NamedTuple):
    """L layers, all alike.

    Args:
        host: ``[n_page, H, 2, S, D]`` of each layer.
        keys, values: ``[T, H, D]`` of each layer.
        addresses: ``[L, 3]`` int64 addresses of these three, on the device of the keys.
        host_scales: ``[n_page, H, 2, S]`` of each layer; None if KV has no scales.
        scales: ``[T, H]`` of each layer; None if KV has no scales.
        scale_addresses: ``[L, 3]`` int64 addresses of host scales, and of scales of keys and values; None if KV has no scales.
    """

    host: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    addresses: torch.Tensor
    host_scales: Sequence[torch.Tensor] | None = None
    scales: Sequence[Scales] | None = None
    scale_addresses: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        host: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        host_scales: Sequence[torch.Tensor] | None = None,
        scales: Sequence[Scales] | None = None,
    ) -> StagedLayers:
        """Layers whose tensors must live as long as the result."""
        assert (host_scales is None) == (scales is None)
        layers = cls(host, keys, values, _addresses(host, keys, values))
        if host_scales is None or scales is None:
            return layers
        addresses = _addresses(host_scales, *([each[kind] for each in scales] for kind in range(2)))
        return layers._replace(host_scales=host_scales, scales=scales, scale_addresses=addresses)


def _addresses(host: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    assert all(tensor.stride() == layers[0].stride() for layers in (host, [*keys, *values]) for tensor in layers)
    addresses = [[tensor.data_ptr() for tensor in layer] for layer in zip(host, keys, values, strict=True)]
    return torch.tensor(addresses, dtype=torch.int64, device=keys[0].device)
