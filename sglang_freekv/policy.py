# SPDX-License-Identifier: Apache-2.0
"""Retrieval policies: what pages are scored by, how a group of query heads chooses among them, when a choice is corrected.

A policy decides pages; the engine moves them. A published method is its settings in ``METHODS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_freekv import kernels
from sglang_freekv.config import METHODS, FreeKVConfig
from sglang_freekv.digests import Digests, digests_of
from sglang_freekv.kernels import Pooling


@dataclass(frozen=True)
class Policy:
    """What the engine asks of a method.

    FreeKV (ICLR 2026) selects a step ahead, by the mean of a group's softmax over min-max digests. Quest (ICML 2024) and ArkVale (NeurIPS
    2024) select with each step's own query: tau is infinite. Quest's paper selects for each query head; the heads of a group share here
    what is best for one of them, by the maximum of their scores.

    Args:
        digests: what pages are summarised and scored by.
        pooling: how a group's logits become the one weight by which its kv head selects.
        tau: correction threshold (FreeKV, section 3.3).
    """

    digests: Digests
    pooling: Pooling
    tau: float

    def needs_correction(
        self, queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, counts: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """``[B, H]`` bool: kv heads for which the pages chosen a step ago will not do; ``previous`` becomes ``queries``.

        All tensors as in ``kernels.reference``.
        """
        return kernels.needs_correction(queries, rows, previous, self.tau, counts, num_kv_heads)


def policy_of(config: FreeKVConfig) -> Policy:
    return Policy(digests_of(config), config.pooling, math.inf if config.tau is None else config.tau)


POLICIES: dict[str, Callable[[FreeKVConfig], Policy]] = dict.fromkeys(METHODS, policy_of)
