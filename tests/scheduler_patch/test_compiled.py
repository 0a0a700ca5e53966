"""What SGLang compiles is on a CPU SGLang's own, uncompiled."""

from __future__ import annotations

import torch
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_gpt_oss_sigmoid_alpha
from sglang.srt.models.commandr import layer_norm_func

from sglang_freekv.scheduler_patch.compiled import clamped_swiglu, layer_norm


def test_gates_and_values_are_clamped_as_sglang_does():
    x = torch.randn(7, 2 * 48, generator=torch.Generator().manual_seed(0)) * 6
    assert x.max() > 7 and x.min() < -7
    uncompiled = swiglu_gpt_oss_sigmoid_alpha.__wrapped__
    torch.testing.assert_close(clamped_swiglu(x, 1.702, 7.0), uncompiled(x, 1.702, 7.0), rtol=0, atol=0)


def test_norms_of_tokens_and_of_heads_are_sglang_s():
    draw = torch.Generator().manual_seed(0)
    for shape, weighed in (((7, 48), (48,)), ((5, 3, 16), (3, 16))):
        x, weight = (torch.randn(shape, generator=draw) + 2).bfloat16(), torch.randn(weighed, generator=draw).bfloat16()
        torch.testing.assert_close(layer_norm(x, weight, 1e-5), layer_norm_func.__wrapped__(x, weight, 1e-5), rtol=0, atol=0)
