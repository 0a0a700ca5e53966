"""gpt-oss's activation on a CPU is SGLang's own."""

from __future__ import annotations

import torch
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_gpt_oss_sigmoid_alpha

from sglang_freekv.scheduler_patch.experts import clamped_swiglu


def test_gates_and_values_are_clamped_as_sglang_does():
    x = torch.randn(7, 2 * 48, generator=torch.Generator().manual_seed(0)) * 6
    assert x.max() > 7 and x.min() < -7
    uncompiled = swiglu_gpt_oss_sigmoid_alpha.__wrapped__
    torch.testing.assert_close(clamped_swiglu(x, 1.702, 7.0), uncompiled(x, 1.702, 7.0), rtol=0, atol=0)
