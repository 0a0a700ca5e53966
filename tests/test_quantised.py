"""Packed weights, unpacked as their formats are described, are the weights."""

from __future__ import annotations

import pytest
import torch

from quantised import AWQ_ORDER, GROUP, packed


def nibbles(words: torch.Tensor) -> torch.Tensor:
    return words[..., None] >> torch.arange(0, 32, 4) & 15


def unpacked(tensors: dict[str, torch.Tensor], kind: str, order=AWQ_ORDER) -> torch.Tensor:
    """``[out, in]`` of the tensors of a projection."""
    codes, zeros = nibbles(tensors["qweight"]), nibbles(tensors["qzeros"])
    if kind == "awq":
        places = torch.tensor(order).argsort()
        codes, zeros = codes[..., places].flatten(1), zeros[..., places].flatten(1)
    else:
        codes, zeros = codes.transpose(1, 2).flatten(0, 1), zeros.flatten(1) + 1
    per_input = [part.repeat_interleave(GROUP, 0) for part in (zeros, tensors["scales"].float())]
    return ((codes - per_input[0]) * per_input[1]).T


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_unpacked_weights_are_half_a_scale_away_at_most(kind):
    weight = torch.randn(64, 3 * GROUP)
    tensors = packed(weight, kind)
    scales = tensors["scales"].float().repeat_interleave(GROUP, 0).T
    assert ((unpacked(tensors, kind) - weight).abs() <= 0.51 * scales).all()
    if kind == "awq":
        assert ((unpacked(tensors, kind, range(8)) - weight).abs() > scales).any()
