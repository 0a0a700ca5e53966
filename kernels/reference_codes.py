# SPDX-License-Identifier: Apache-2.0
"""Specification of KV that is coded in 8 bits; letters and layouts as in ``reference``.

A vector is the key or value of one token and kv head. Its int8 codes are whole numbers from -127 to 127, and a code times its scale is a
number again. A float of 8 bits is a number of its own, and has no scale.
"""

from __future__ import annotations

import torch

from sglang_freekv.kernels.kv import KV, LARGEST_CODE

LARGEST_SCALE = torch.finfo(torch.float16).max


def code_vectors(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors along the last axis. A decoded number differs from its number by half a scale, and by what the scale was rounded by.

    Args:
        numbers: ``[..., D]``.

    Returns:
        ``(codes [..., D] int8, scales [...] float16)``. A vector that is too small to have a scale has codes of 0. One that is not finite
        everywhere has a scale of NaN, so its decoded numbers are NaN.
    """
    numbers = numbers.float()
    largest = numbers.abs().amax(-1)  # NaN if there is any
    wanted = largest / torch.full_like(largest, LARGEST_CODE)  # by a number PyTorch multiplies on a GPU, which rounds otherwise
    scales = wanted.clamp(max=LARGEST_SCALE).half().masked_fill(~largest.isfinite(), torch.nan)
    divisors = scales.float()[..., None]
    codes = (numbers / divisors).clamp(-LARGEST_CODE, LARGEST_CODE).round()
    return codes.where(divisors > 0, 0).to(torch.int8), scales


def code_floats(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest 8-bit floats, half to even. What is beyond the largest becomes that, infinity too, and NaN stays NaN.

    Args:
        numbers: of any shape.
        dtype: one of ``FLOAT_CODES``.
    """
    largest = torch.finfo(dtype).max
    return numbers.float().clamp(-largest, largest).to(dtype)


def decode_vectors(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """``[..., D]`` float32 numbers of ``codes [..., D]`` with ``scales [...]``, or the numbers that they are without scales."""
    return codes.float() if scales is None else codes.float() * scales.float()[..., None]


def decode_tokens(kv: KV, rows: torch.Tensor | None, out: KV) -> None:
    """Decode token rows of all kv heads: the context of an extend. Keys stay rotated.

    Args:
        kv: ``[T, H, D]`` token rows to read. Without scales their numbers are taken over.
        rows: ``[N]`` token rows, or None for the first N in their order.
        out: ``[N or more, H, D]``, written in place in its own dtype: the first N. Without ``rows`` N is all of it. It has no scales.
    """
    rows = torch.arange(len(out.keys), device=out.keys.device) if rows is None else rows
    scales = kv.scales or (None, None)
    for codes, scale, numbers in zip((kv.keys, kv.values), scales, (out.keys, out.values)):
        numbers[: len(rows)] = decode_vectors(codes[rows], None if scale is None else scale[rows])
