# SPDX-License-Identifier: Apache-2.0
"""Policy: a method as the engine calls it, with its kernels and the user's settings.

A policy decides which pages are needed; the engine moves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import Digests, digests_of
from sglang_freekv.kernels import CORRECTED, Pooling
from sglang_freekv.methods import METHODS, Method


@dataclass(frozen=True)
class Policy:
    """The decisions of a method.

    Args:
        method: what is corrected, and what adjusts the scores.
        digests: how pages are summarised and scored.
        pooling: how a group's logits become the weight by which its kv head selects.
        tau: a kv head is corrected if its query's similarity is below ``tau`` (FreeKV, section 3.3).
    """

    method: Method
    digests: Digests
    pooling: Pooling
    tau: float

    def corrected(
        self, queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, counts: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """``[B, H]`` bool: which kv heads are corrected. ``queries`` replace ``previous``; all tensors are as in ``kernels.reference``."""

        def compare(parts: int) -> torch.Tensor:
            mask = kernels.needs_correction(queries, rows, previous, self.tau, counts, parts)
            if (heads := num_kv_heads // parts) == 1:
                return mask
            counts[:, CORRECTED].index_add_(0, rows.long(), mask.sum(1) * (heads - 1))  # the kernel counts a part as one
            return mask.repeat_interleave(heads, 1)

        return self.method.corrected(compare, num_kv_heads)

    def adjust(
        self, layer: int, logits: torch.Tensor, corrected: torch.Tensor | None, standing: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """``[B, Hq, P]`` float32 scores by which ``layer`` selects, as ``Method.adjust`` has it."""
        return self.method.adjust(layer, logits, corrected, standing)


def policy_of(config: FreeKVConfig) -> Policy:
    tau = math.inf if config.tau is None else config.tau
    return Policy(METHODS[config.method], digests_of(config), cast(Pooling, config.pooling), tau)


POLICIES: dict[str, Callable[[FreeKVConfig], Policy]] = dict.fromkeys(METHODS, policy_of)
