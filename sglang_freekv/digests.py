# SPDX-License-Identifier: Apache-2.0
"""Digests: what a page is summarised by on the device, and how a query scores the page by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import FreeKVConfig, PageBudget, Refusal
from sglang_freekv.kernels import Box


class Digests(Protocol):
    """One way of it. All tensors as in ``kernels.reference``."""

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        """Shape of the digest of one (page, kv head), in elements of the KV's dtype."""

    def write(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the digests of full pages."""

    def score(self, queries: torch.Tensor, digests: torch.Tensor, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """``[B, Hq, P]`` float32 logits of the pages that are candidates for the next step, higher is better; ``scale`` is that of the
        layer's attention, so that a softmax over pages is as sharp as the layer's over tokens."""


@dataclass(frozen=True)
class Boxes:
    """A box around the keys of a page, which is scored by the largest logit of a key inside it.

    Args:
        budget: sink and window bound the candidates.
        page_size: S.
        box: which one.
    """

    budget: PageBudget
    page_size: int
    box: Box

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        return (2, head_dim)

    def write(self, keys, starts, host_pages, digests) -> None:
        kernels.digest_pages(keys, starts, host_pages, digests, self.page_size, self.box)

    def score(self, queries, digests, batch, scale) -> torch.Tensor:
        where = batch.rows, batch.seq_lens, batch.page_table, self.budget, self.page_size
        return kernels.score_pages(queries, digests, *where, scale)


@dataclass(frozen=True)
class TwoBit:
    """The box that holds the keys of a page, and each key in two bits a dimension inside it. The page's score is the logarithm of the
    sum of its keys' exponentials, so that a softmax over pages is the softmax over tokens, of keys so approximated.

    Args:
        budget, page_size: as of ``Boxes``.
    """

    budget: PageBudget
    page_size: int

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        """Raises Refusal for an odd number of dimensions, of which two share a word."""
        if head_dim % 2:
            raise Refusal(
                f"--freekv-digest two-bit: expected an even head_dim, but the model's is {head_dim}; use --freekv-digest cuboid-mean"
            )
        return (2 * head_dim + head_dim * self.page_size // 4 // element_bytes,)

    def write(self, keys, starts, host_pages, digests) -> None:
        kernels.digest_two_bit(keys, starts, host_pages, digests, self.page_size)

    def score(self, queries, digests, batch, scale) -> torch.Tensor:
        where = batch.rows, batch.seq_lens, batch.page_table, self.budget, self.page_size
        return kernels.score_two_bit(queries, digests, *where, scale)


def digests_of(config: FreeKVConfig) -> Digests:
    if config.digest == "two-bit":
        return TwoBit(config.pages, config.page_size)
    return Boxes(config.pages, config.page_size, config.digest)
