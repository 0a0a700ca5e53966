# SPDX-License-Identifier: Apache-2.0
"""What kernels of coded KV share: codes as words and as bytes, and the scales that go with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_freekv.kernels.kv import FLOAT_CODES, Scales

TYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}  # of codes


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of 8-bit codes, viewed as 32-bit words along their last axis; tensors of other types as they are."""
    return tuple(tensor.view(torch.int32) if tensor.element_size() == 1 else tensor for tensor in tensors)


def as_bytes(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of 8-bit floats, viewed as bytes; tensors of other types as they are. Triton makes no 8-bit float of the 0 of a masked load."""
    return tuple(tensor.view(torch.int8) if tensor.dtype in FLOAT_CODES else tensor for tensor in tensors)


def float_type(tensor: torch.Tensor) -> tl.dtype | None:
    """The type of 8-bit floats, which ``as_bytes`` hides; None for other tensors."""
    return TYPES[tensor.dtype] if tensor.dtype in FLOAT_CODES else None


@triton.jit
def numbers(b_x, FLOAT: tl.constexpr):
    """Elements as they were loaded, in float32. They are bytes of 8-bit floats if ``FLOAT``, their type, is not None."""
    if FLOAT is not None:
        b_x = b_x.to(FLOAT, bitcast=True)
    return b_x.to(tl.float32)


def scale_arguments(scales: Scales | None, axes: int) -> tuple[torch.Tensor | int | None, ...]:
    """Scales ``[.., H]`` of ``axes`` axes as kernels take them: as integers, and their strides. All are None without scales."""
    if scales is None:
        return (None,) * (2 + axes)
    keys, values = scales
    assert keys.dim() == axes and keys.stride() == values.stride() and keys.element_size() == values.element_size() == 2
    return keys.view(torch.int16), values.view(torch.int16), *keys.stride()


def scale_words(host_scales: torch.Tensor | None, scales: Scales | None) -> torch.Tensor | None:
    """``[n_page, H, S]`` int32: host scales ``[n_page, H, 2, S]``, two to a word; None if ``scales`` beside codes on the device are None.

    A word of an odd S may have the scale of a key and that of a value.
    """
    assert (host_scales is None) == (scales is None), "scales are on the device and in host memory, or in neither"
    if host_scales is None:
        return None
    assert host_scales.is_contiguous() and host_scales.element_size() == 2
    return host_scales.flatten(2).view(torch.int32)


@triton.jit
def load_scales(places, o_unit, o_s, m, S):
    """Word ``o_s`` of units as they lie in host memory, from token rows on the device.

    Args:
        places: pointers to the scales of keys and of values, and the stride of a token.
        o_unit: offset of the scale of a unit's first token.
        m: mask of the words.
    """
    b_low = tl.load(_place(places, o_unit, 2 * o_s, S), mask=m, other=0)
    b_high = tl.load(_place(places, o_unit, 2 * o_s + 1, S), mask=m, other=0)
    return (b_low.to(tl.int32) & 0xFFFF) | (b_high.to(tl.int32) << 16)


@triton.jit
def store_scales(places, o_unit, o_s, b_words, m, S):
    """The other way: word ``o_s`` of units to token rows. Arguments are as of ``load_scales``."""
    tl.store(_place(places, o_unit, 2 * o_s, S), b_words.to(tl.int16), mask=m)
    tl.store(_place(places, o_unit, 2 * o_s + 1, S), (b_words >> 16).to(tl.int16), mask=m)


@triton.jit
def _place(places, o_unit, i_scale, S):
    """Pointers to scale ``i_scale`` of units: scales of keys come first."""
    p_keys, p_values, stride_token = places
    return tl.where(i_scale < S, p_keys, p_values) + o_unit + i_scale % S * stride_token
