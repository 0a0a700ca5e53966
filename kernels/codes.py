# SPDX-License-Identifier: Apache-2.0
"""Codes: store vectors as they are, or as codes of 8 bits with scales, bit for bit as reference_codes.code_vectors."""

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
    tl.store(p_x + o_x, b_x, mask=m_x)


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
