# SPDX-License-Identifier: Apache-2.0
"""Retrieval policies: how pages are scored, how the query heads of a group select together, and when a kv head is corrected.

A policy decides which pages are needed; the engine moves them. Each published method is one entry of ``METHODS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from sglang_freekv import kernels
from sglang_freekv.config import METHODS, FreeKVConfig
from sglang_freekv.digests import Digests, digests_of
from sglang_freekv.kernels import Pooling


@dataclass(frozen=True)
class Policy:
    """The decisions of a method.

    FreeKV (ICLR 2026) selects a step ahead and pools a group by the mean of its softmax. Its digest here is cuboid-mean by default; the
    paper has min-max. Quest (ICML 2024) and ArkVale (NeurIPS 2024) select with each step's own query, so their tau is infinite. Quest's
    paper selects for each query head. Here the heads of a group share one selection, by the maximum of their scores.

    Args:
        digests: how pages are summarised and scored.
        pooling: how a group's logits become the weight by which its kv head selects.
        tau: a kv head is corrected if its query's similarity is below ``tau`` (FreeKV, section 3.3).
    """

    digests: Digests
    pooling: Pooling
    tau: float

    def corrected(
        self, queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, counts: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """``[B, H]`` bool: which kv heads are corrected. ``queries`` replace ``previous``; all tensors are as in ``kernels.reference``."""
        return kernels.needs_correction(queries, rows, previous, self.tau, counts, num_kv_heads)

    def adjust(self, layer: int, logits: torch.Tensor, corrected: torch.Tensor | None, held: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``[B, Hq, P]`` float32 scores by which ``layer`` selects, in this step and ahead; the digests' ``logits`` here.

        Args:
            logits: ``[B, Hq, P]`` float32 scores of the candidates by their digests.
            corrected: ``[B, H]`` bool of ``corrected``. None if an extend seeds the rows, where every kv head selects.
            held: returns ``[B, H, P]`` bool: the pages that each kv head attends to if it is not corrected.
        """
        return logits


def policy_of(config: FreeKVConfig) -> Policy:
    return Policy(digests_of(config), cast(Pooling, config.pooling), math.inf if config.tau is None else config.tau)


POLICIES: dict[str, Callable[[FreeKVConfig], Policy]] = dict.fromkeys(METHODS, policy_of)
