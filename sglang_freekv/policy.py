"""Retrieval policies: what pages are scored by, how a group of query heads chooses among them, when a choice is corrected.

A policy decides pages; the engine moves them. A published method is an entry in ``POLICIES``, and its settings one in ``METHODS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import Digests, digests_of
from sglang_freekv.kernels import Pooling


class RetrievalPolicy(Protocol):
    """What the engine asks of a method. All tensors as in ``kernels.reference``.

    Args:
        digests: what pages are summarised and scored by.
        pooling: how a group's logits become the one weight by which its kv head selects.
    """

    digests: Digests
    pooling: Pooling

    def needs_correction(
        self, queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, counts: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """``[B, H]`` bool: kv heads for which the pages chosen a step ago will not do; ``previous`` becomes ``queries``."""


@dataclass(frozen=True)
class FreeKV:
    """FreeKV (ICLR 2026): correction by query similarity. The paper's digests are min-max, its pooling softmax-mean.

    Args:
        tau: correction threshold (section 3.3).
    """

    digests: Digests
    pooling: Pooling
    tau: float

    def needs_correction(self, queries, rows, previous, counts, num_kv_heads) -> torch.Tensor:
        return kernels.needs_correction(queries, rows, previous, self.tau, counts, num_kv_heads)


@dataclass(frozen=True)
class Blocking:
    """In every step what its own query selects: all kv heads are corrected.

    Quest (ICML 2024) has min-max digests and selects for each query head; the heads of a group share here what is best for one of
    them, by the maximum of their scores. ArkVale (NeurIPS 2024) has cuboid-mean digests and the mean of a group's scores.
    """

    digests: Digests
    pooling: Pooling

    def needs_correction(self, queries, rows, previous, counts, num_kv_heads) -> torch.Tensor:
        return kernels.needs_correction(queries, rows, previous, math.inf, counts, num_kv_heads)


POLICIES: dict[str, Callable[[FreeKVConfig], RetrievalPolicy]] = {
    "freekv": lambda config: FreeKV(digests_of(config), config.pooling, config.tau),
    "quest": lambda config: Blocking(digests_of(config), config.pooling),
    "arkvale": lambda config: Blocking(digests_of(config), config.pooling),
}
