"""Retrieval policies: what a page is summarised by, how it is scored, when a choice is corrected.

A policy decides pages; the engine moves them. A published method is one class here and one entry in ``POLICIES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig


class RetrievalPolicy(Protocol):
    """What the engine asks of a method. All tensors as in ``kernels.reference``."""

    def digest_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of the digest of one (page, kv head)."""

    def digest(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int):
        """Write the digests of full pages."""

    def score(self, queries: torch.Tensor, digests: torch.Tensor, page_table: torch.Tensor, first: int, last: torch.Tensor):
        """``[B, H, P]`` float32 scores of candidate pages, higher is better, -inf where a page is no candidate."""

    def needs_correction(self, queries: torch.Tensor, previous: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """``[B, H]`` bool: kv heads for which the pages chosen a step ago will not do."""


@dataclass(frozen=True)
class FreeKV:
    """FreeKV (ICLR 2026): min-max digests, group-mean softmax scores, correction by query similarity.

    Args:
        tau: correction threshold (section 3.3).
    """

    tau: float

    def digest_shape(self, head_dim: int) -> tuple[int, ...]:
        return (2, head_dim)

    def digest(self, keys, starts, host_pages, digests, page_size) -> None:
        kernels.digest_pages(keys, starts, host_pages, digests, page_size)

    def score(self, queries, digests, page_table, first, last) -> torch.Tensor:
        return kernels.score_pages(queries, digests, page_table, first, last)

    def needs_correction(self, queries, previous, num_kv_heads) -> torch.Tensor:
        return kernels.needs_correction(queries, previous, num_kv_heads, self.tau)


POLICIES: dict[str, Callable[[FreeKVConfig], RetrievalPolicy]] = {
    "freekv": lambda config: FreeKV(tau=config.tau),
}
