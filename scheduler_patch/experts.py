# SPDX-License-Identifier: Apache-2.0
"""What experts compute by code that SGLang compiles at its first use, for a CPU."""

from __future__ import annotations

import torch


def clamped_swiglu(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """REPLACE gpt-oss's activation: ``[T, 2 F]``, gates at even places and what they let through at odd ones -> ``[T, F]``."""
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * (gate * gemm1_alpha).sigmoid() * (up + 1)
