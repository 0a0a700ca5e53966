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
from sglang_freekv.kernels import CORRECTED, Pooling, Turn
from sglang_freekv.methods import METHODS, Method


@dataclass(frozen=True)
class Policy:
    """The decisions of a method.

    Args:
        method: what is corrected, and what adjusts the scores.
        digests: how pages are summarised and scored.
        pooling: how a group's logits become the weight by which its kv head selects.
        tau: a kv head is corrected if its query's similarity is below ``tau`` (FreeKV, section 3.3). One of all retrieval layers, or one
            for each.
    """

    method: Method
    digests: Digests
    pooling: Pooling
    tau: float | tuple[float, ...]

    def tau_of(self, layer: int) -> float:
        """The threshold of a retrieval layer, by its place among them."""
        return self.tau[layer] if isinstance(self.tau, tuple) else self.tau

    def corrected(
        self,
        layer: int,
        queries: torch.Tensor,
        rows: torch.Tensor,
        previous: torch.Tensor,
        counts: torch.Tensor,
        num_kv_heads: int,
        *,
        turn: Turn | None = None,
    ) -> torch.Tensor:
        """``[B, H]`` bool: which kv heads of ``layer`` are corrected. ``queries`` replace ``previous``; all is as in ``kernels.reference``."""

        def compare(parts: int) -> torch.Tensor:
            mask = kernels.needs_correction(queries, rows, previous, self.tau_of(layer), counts, parts, turn=turn)
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
    tau: float | tuple[float, ...] = math.inf if config.tau is None else config.tau
    if config.tau_by_layer is not None:
        tau = config.tau_by_layer.of_retrieval(config.dense_layers)
    return Policy(METHODS[config.method], digests_of(config), cast(Pooling, config.pooling), tau)


POLICIES: dict[str, Callable[[FreeKVConfig], Policy]] = dict.fromkeys(METHODS, policy_of)
