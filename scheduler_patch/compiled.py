# SPDX-License-Identifier: Apache-2.0
"""What SGLang compiles at its first use, for a CPU: gpt-oss's activation, and Command-A's norm."""

from __future__ import annotations

import torch


def clamped_swiglu(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """REPLACE gpt-oss's activation: ``[T, 2 F]``, gates at even places and what they let through at odd ones -> ``[T, F]``."""
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * (gate * gemm1_alpha).sigmoid() * (up + 1)


def layer_norm(hidden_states: torch.Tensor, weight: torch.Tensor, variance_epsilon: float) -> torch.Tensor:
    """REPLACE Command-A's norm without a bias, of the last dimension of ``[T, ..., D]`` with ``weight [D]`` or ``[..., D]``, in float32."""
    centred = hidden_states.float() - hidden_states.float().mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + variance_epsilon)
    return (weight.float() * (centred * scale)).to(hidden_states.dtype)
