"""Retrieval policies: what a page is summarised by, how it is scored, when a choice is corrected.

A policy decides pages; the engine moves them. A published method is one class here and one entry in ``POLICIES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import FreeKVConfig, PageBudget
from sglang_freekv.kernels import Box, Pooling


class RetrievalPolicy(Protocol):
    """What the engine asks of a method. All tensors as in ``kernels.reference``.

    Args:
        pooling: how a group's logits become the one weight by which its kv head selects.
    """

    pooling: ClassVar[Pooling]

    def digest_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of the digest of one (page, kv head)."""

    def digest(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int):
        """Write the digests of full pages."""

    def score(self, queries: torch.Tensor, digests: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """``[B, Hq, P]`` float32 logits of the pages that are candidates for the next step, higher is better."""

    def needs_correction(
        self, queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, counts: torch.Tensor, num_kv_heads: int
    ) -> torch.Tensor:
        """``[B, H]`` bool: kv heads for which the pages chosen a step ago will not do; ``previous`` becomes ``queries``."""


@dataclass(frozen=True)
class Boxes:
    """What these methods share: a page is summarised by a box around its keys, and scored by the largest logit of a key inside it.

    Args:
        budget: sink and window bound the candidates.
        page_size: S.
        box: which one.
    """

    budget: PageBudget
    page_size: int
    box: Box

    def digest_shape(self, head_dim: int) -> tuple[int, ...]:
        return (2, head_dim)

    def digest(self, keys, starts, host_pages, digests, page_size) -> None:
        kernels.digest_pages(keys, starts, host_pages, digests, page_size, self.box)

    def score(self, queries, digests, batch) -> torch.Tensor:
        return kernels.score_pages(queries, digests, batch.rows, batch.seq_lens, batch.page_table, self.budget, self.page_size)


@dataclass(frozen=True)
class FreeKV(Boxes):
    """FreeKV (ICLR 2026): group-mean softmax scores, correction by query similarity. The paper's digests are min-max.

    Args:
        tau: correction threshold (section 3.3).
    """

    pooling: ClassVar[Pooling] = "softmax-mean"

    tau: float

    def needs_correction(self, queries, rows, previous, counts, num_kv_heads) -> torch.Tensor:
        return kernels.needs_correction(queries, rows, previous, self.tau, counts, num_kv_heads)


@dataclass(frozen=True)
class Quest(Boxes):
    """Quest (ICML 2024): in every step the pages that its own query selects: all kv heads are corrected.

    The paper selects for each query head. The heads of a group share here what is best for one of them, by the maximum of their scores.
    """

    pooling: ClassVar[Pooling] = "max"

    def needs_correction(self, queries, rows, previous, counts, num_kv_heads) -> torch.Tensor:
        return kernels.needs_correction(queries, rows, previous, math.inf, counts, num_kv_heads)


@dataclass(frozen=True)
class ArkVale(Quest):
    """ArkVale (NeurIPS 2024): the mean of a group's scores; like Quest, in every step what its query selects."""

    pooling: ClassVar[Pooling] = "mean"


POLICIES: dict[str, Callable[[FreeKVConfig], RetrievalPolicy]] = {
    "freekv": lambda config: FreeKV(config.pages, config.page_size, config.digest, config.tau),
    "quest": lambda config: Quest(config.pages, config.page_size, config.digest),
    "arkvale": lambda config: ArkVale(config.pages, config.page_size, config.digest),
}
