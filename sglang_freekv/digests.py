# SPDX-License-Identifier: Apache-2.0
"""Digests: the summaries of pages on the device, and the scores that queries give to pages by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import FreeKVConfig, PageBudget, Refusal
from sglang_freekv.kernels import Box


class Digests(Protocol):
    """One kind of digest. All tensors are as in ``kernels.reference``."""

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        """Shape of one unit's digest, in elements of the KV's dtype.

        Raises:
            Refusal: the kind cannot summarise keys of this ``head_dim``.
        """

    def write(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the digests of full pages, in place."""

    def score(
        self, queries: torch.Tensor, digests: torch.Tensor, batch: DecodeBatch, scale: float, selects: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[B, Hq, P]`` float32 scores of the candidates for the next step; higher is better.

        ``scale`` is the factor of the layer's attention logits. It makes a softmax over pages as sharp as the layer's over tokens.
        ``selects [B, H]`` are the kv heads whose pages are scored; None means all.
        """


@dataclass(frozen=True)
class Boxes:
    """A box around the keys of a page. A page's score is the largest logit of a point in its box (FreeKV, section 3.2).

    Args:
        budget: its sink and window delimit the candidates.
        page_size: S.
        box: "cuboid-mean" or "min-max", as in ``kernels.reference.digest_pages``.
    """

    budget: PageBudget
    page_size: int
    box: Box

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        return (2, head_dim)

    def write(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor) -> None:
        kernels.digest_pages(keys, starts, host_pages, digests, self.page_size, self.box)

    def score(
        self, queries: torch.Tensor, digests: torch.Tensor, batch: DecodeBatch, scale: float, selects: torch.Tensor | None = None
    ) -> torch.Tensor:
        where = batch.rows, batch.seq_lens, batch.page_table, self.budget, self.page_size
        return kernels.score_pages(queries, digests, *where, scale=scale, selects=selects)


@dataclass(frozen=True)
class TwoBit:
    """The min-max box of a page, and two bits for each dimension of each key in it.

    Two bits a dimension approximate each key. A page's score is the log-sum-exp of these keys' logits, so a softmax over pages is a
    softmax over tokens.

    Args:
        budget, page_size: as in ``Boxes``.
    """

    budget: PageBudget
    page_size: int

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        """As ``Digests.shape``; an odd ``head_dim`` is refused, because two dimensions share a word."""
        if head_dim % 2:
            raise Refusal(
                f"--freekv-digest two-bit: expected an even head_dim, but the model's is {head_dim}; use --freekv-digest cuboid-mean"
            )
        return (2 * head_dim + head_dim * self.page_size // 4 // element_bytes,)

    def write(self, keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor) -> None:
        kernels.digest_two_bit(keys, starts, host_pages, digests, self.page_size)

    def score(
        self, queries: torch.Tensor, digests: torch.Tensor, batch: DecodeBatch, scale: float, selects: torch.Tensor | None = None
    ) -> torch.Tensor:
        where = batch.rows, batch.seq_lens, batch.page_table, self.budget, self.page_size
        return kernels.score_two_bit(queries, digests, *where, scale=scale, selects=selects)


def digests_of(config: FreeKVConfig) -> Digests:
    if config.digest == "two-bit":
        return TwoBit(config.pages, config.page_size)
    return Boxes(config.pages, config.page_size, cast(Box, config.digest))
