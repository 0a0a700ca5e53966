# SPDX-License-Identifier: Apache-2.0
"""The tokens that a program attends to, where keys and values are codes of 8 bits: as ``attended_tokens``, four codes at a time.

A word of memory holds the codes of four neighbouring dimensions, and each product is made in four parts, one for each byte of the words.
So threads read words of shared memory, and convert them in registers. Bytes of values would be read one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_freekv.kernels.attended_tokens import locate

WORD = tl.constexpr(4)  # codes
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no PTX
# Of weights times scales in float16, which has few small numbers. Scales of float16 values are at most 516, so what is lifted has a number.
LIFT = tl.constexpr(64.0)


@triton.jit
def attend_codes(
    b_q,
    p_keys,  # words [F, S, H, D / 4]
    p_values,
    p_scales,  # of keys and of values, each [F, S, H] or None
    p_reads,
    head,
    first,
    last,
    seq_len,
    scale,
    CODE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """As ``attend_tokens``. ``CODE`` is the type of a code: int8, or a float of 8 bits."""
    BLOCK_G: tl.constexpr = b_q.shape[0]
    BLOCK_W: tl.constexpr = b_q.shape[1] // WORD
    W: tl.constexpr = D // WORD
    dtype: tl.constexpr = b_q.dtype
    lift: tl.constexpr = LIFT if dtype == tl.float16 else 1.0
    p_frames, p_pages = p_reads
    p_key_scales, p_value_scales = p_scales
    o_t, o_w = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_W)
    m_w = o_w < W
    b_q0, b_q1, b_q2, b_q3 = _apart(b_q)
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_0 = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    b_1, b_2, b_3 = b_0, b_0, b_0
    o_row, m_visible = locate(p_frames, p_pages, first + o_t, last, seq_len, S)
    b_key_scale, b_value_scale = _scales(p_key_scales, p_value_scales, o_row * H + head, m_visible)
    for start in range(first, last, BLOCK_T):
        o_kv, m_kv = (o_row[:, None] * H + head) * W + o_w[None, :], m_visible[:, None] & m_w[None, :]
        b_k = tl.load(p_keys + o_kv, mask=m_kv, other=0)  # [BLOCK_T, BLOCK_W]
        b_v = tl.load(p_values + o_kv, mask=m_kv, other=0)
        m_logit, b_scale, b_weight = m_visible, b_key_scale * scale, b_value_scale * lift
        o_row, m_visible = locate(p_frames, p_pages, start + BLOCK_T + o_t, last, seq_len, S)

        b_logit = tl.dot(b_q0, tl.trans(numbers_of(b_k, 0, CODE, dtype)), input_precision="ieee")
        b_logit = tl.dot(b_q1, tl.trans(numbers_of(b_k, 1, CODE, dtype)), b_logit, input_precision="ieee")
        b_logit = tl.dot(b_q2, tl.trans(numbers_of(b_k, 2, CODE, dtype)), b_logit, input_precision="ieee")
        b_logit = tl.dot(b_q3, tl.trans(numbers_of(b_k, 3, CODE, dtype)), b_logit, input_precision="ieee")
        b_logit = tl.where(m_logit[None, :], b_logit * b_scale[None, :], float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logit, 1))
        b_base = tl.where(b_new > float("-inf"), b_new, 0.0)  # no token visible yet: avoids inf - inf
        b_p = tl.exp2(b_logit - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_p = (b_p * b_weight[None, :]).to(dtype)
        b_0 = tl.dot(b_p, numbers_of(b_v, 0, CODE, dtype), b_0 * b_decay[:, None], input_precision="ieee")
        b_1 = tl.dot(b_p, numbers_of(b_v, 1, CODE, dtype), b_1 * b_decay[:, None], input_precision="ieee")
        b_2 = tl.dot(b_p, numbers_of(b_v, 2, CODE, dtype), b_2 * b_decay[:, None], input_precision="ieee")
        b_3 = tl.dot(b_p, numbers_of(b_v, 3, CODE, dtype), b_3 * b_decay[:, None], input_precision="ieee")
        b_max = b_new
        b_key_scale, b_value_scale = _scales(p_key_scales, p_value_scales, o_row * H + head, m_visible)  # a tile ahead
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)  # keeps NaN, as in attend_tokens
    return _together(b_0, b_1, b_2, b_3) / (b_sum * lift)[:, None], b_sum, b_max


@triton.jit
def _scales(p_key_scales, p_value_scales, o_row, m_visible):
    """Scales of keys and values of a tile's tokens, 0 for those that must not be seen; ones without scales."""
    if p_key_scales is None:
        b_key_scale = tl.where(m_visible, 1.0, 0.0)
        b_value_scale = b_key_scale
    else:
        b_key_scale = tl.load(p_key_scales + o_row, mask=m_visible, other=0.0).to(tl.float32)
        b_value_scale = tl.load(p_value_scales + o_row, mask=m_visible, other=0.0).to(tl.float32)
    return b_key_scale, b_value_scale


@triton.jit
def _apart(b_x):
    """``[N, 4 W]`` as four of ``[N, W]``: dimension 4 w + i is in the i-th."""
    b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // WORD, 2, 2)))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def _together(b_0, b_1, b_2, b_3):
    """What ``_apart`` parts."""
    return tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), (b_0.shape[0], WORD * b_0.shape[1]))


@triton.jit
def numbers_of(b_word, byte: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr):
    """The codes in a byte of each word, as numbers of ``dtype``: int8 is exact in all of them."""
    if CODE == tl.int8 and dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(bfloat16_ptx(byte), "=r,r,r", [b_word], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif CODE == tl.int8 and dtype == tl.float16 and not INTERPRETED:
        return tl.inline_asm_elementwise(float16_ptx(byte), "=r,r,r", [b_word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return (b_word >> (8 * byte)).to(tl.int8).to(CODE, bitcast=True).to(tl.float32).to(dtype)


@triton.constexpr_function
def bfloat16_ptx(byte: int) -> str:
    """One byte of two words as two numbers, in four instructions. Triton's own take seven.

    ``prmt`` takes the byte of both words. Seven bits of a code become the mantissa of 128 + bits. Its sign makes -128 or -256, and the sum is
    exact.
    """
    return f"""{{
        .reg .b32 codes, bits, signs, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 codes, $1, $2, 0x0{byte + 4}0{byte};
        lop3.b32 bits, codes, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 signs, codes, 0x00800080, 0xC300C300, 0xEA;
        fma.rn.bf16x2 $0, bits, one, signs;
    }}"""


@triton.constexpr_function
def float16_ptx(byte: int) -> str:
    """As ``bfloat16_ptx``, in three: a mantissa of float16 holds all eight bits, of 1024 + 128 + the code."""
    return f"""{{
        .reg .b32 codes, bits, offset;
        mov.b32 offset, 0x64806480;
        prmt.b32 codes, $1, $2, 0x0{byte + 4}0{byte};
        lop3.b32 bits, codes, 0x00FF00FF, 0x64806480, 0x6A;
        sub.rn.f16x2 $0, bits, offset;
    }}"""
