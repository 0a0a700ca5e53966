# SPDX-License-Identifier: Apache-2.0
"""Codes: store vectors as they are, or as codes of 8 bits, bit for bit as reference_codes.code_vectors and code_floats."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.digest import larger
from sglang_freekv.kernels.kv import LARGEST_CODE
from sglang_freekv.kernels.reference_codes import LARGEST_SCALE

CODE, SCALE = tl.constexpr(float(LARGEST_CODE)), tl.constexpr(LARGEST_SCALE)
WHOLE = tl.constexpr(1.5 * 2**23)  # a float32 near it is whole, so adding it rounds, half to even


@triton.jit
def store_vectors(p_x, p_scales, b_x, o_x, o_scale, m_x, m_scale):
    """Store vectors along the last axis. With ``p_scales``, codes and scales; ``o_scale`` has one element in that axis."""
    if p_scales is not None:
        b_x, b_scale = coded(tl.where(m_x, b_x, 0).to(tl.float32))
        tl.store(p_scales + o_scale, b_scale, mask=m_scale)
    if p_x.dtype.element_ty == tl.float8e4nv:
        b_x = floats_of_8_bits(b_x.to(tl.float32), MANTISSA=3, BIAS=7, LARGEST=448.0).to(tl.float8e4nv, bitcast=True)
    if p_x.dtype.element_ty == tl.float8e5:
        b_x = floats_of_8_bits(b_x.to(tl.float32), MANTISSA=2, BIAS=15, LARGEST=57344.0).to(tl.float8e5, bitcast=True)
    tl.store(p_x + o_x, b_x, mask=m_x)


@triton.jit
def floats_of_8_bits(b_x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The bits, as int8, of the 8-bit floats that are nearest to float32 numbers, half to even, and at most ``LARGEST``.

    It is done by hand because Triton's interpreter cuts off where a device rounds. Above the smallest normal number the mantissa is rounded
    in place, and the exponent changes its bias. Below it a sum with a power of two, whose last bit is worth as much as that of the result, has
    the result in its last bits.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    NORMAL: tl.constexpr = (128 - BIAS) << 23  # the smallest normal number, as float32
    ADDED: tl.constexpr = (151 - BIAS - MANTISSA) << 23  # the power of two
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    m_nan = b_size > 0x7F800000
    b_size = tl.where(m_nan, 0, tl.minimum(b_size, tl.full([], LARGEST, tl.float32).to(tl.int32, bitcast=True)))
    b_rounded = (b_size - ((127 - BIAS) << 23) + ((1 << (DROPPED - 1)) - 1) + ((b_size >> DROPPED) & 1)) >> DROPPED
    b_sum = b_size.to(tl.float32, bitcast=True) + tl.full([], ADDED, tl.int32).to(tl.float32, bitcast=True)
    b_code = tl.where(b_size < NORMAL, b_sum.to(tl.int32, bitcast=True) - ADDED, b_rounded)
    return (tl.where(m_nan, 0x7F, b_code) | ((b_bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def coded(b_x):
    """Codes of float32 vectors along the last axis, and their scales, with one element in that axis."""
    b_largest = tl.reduce(tl.abs(b_x), len(b_x.shape) - 1, larger, keep_dims=True)
    b_scale = tl.minimum(tl.div_rn(b_largest, CODE), SCALE).to(tl.float16)
    b_scale = tl.where(b_largest < float("inf"), b_scale, float("nan"))
    m_coded = b_scale > 0
    b_code = tl.div_rn(b_x, tl.where(m_coded, b_scale.to(tl.float32), 1.0))
    b_code = (tl.minimum(tl.maximum(b_code, -CODE), CODE) + WHOLE) - WHOLE
    return tl.where(m_coded, b_code, 0.0).to(tl.int8), b_scale
