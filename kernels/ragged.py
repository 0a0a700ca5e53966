# SPDX-License-Identifier: Apache-2.0
"""Ragged lists: different numbers of items for each request, laid out on the host and copied to the device without a wait."""

from __future__ import annotations

import torch


def ragged(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``counts[i]`` items for each request i: ``[N]`` request of each item, and ``[N]`` index of the item within its request."""
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``. The host does not wait for the device, which may still compute the batch before."""
    if tensor.is_cuda or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """``tensors [N]`` of int64 on ``device``, in one copy. Each lies at a multiple of 16 bytes, for which kernels are compiled."""
    lengths = [len(tensor) + len(tensor) % 2 for tensor in tensors]
    packed = torch.zeros(sum(lengths), dtype=torch.int64)
    for tensor, place in zip(tensors, packed.split(lengths)):
        place[: len(tensor)] = tensor
    return [place[: len(tensor)] for tensor, place in zip(tensors, to_device(packed, device).split(lengths))]
