"""What lies outside a selection, as pseudo-tokens: a block's mean key and value, which count as often as the block has tokens.

Letters as in ``pages``; N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .gather import Growing, logits
from .pages import Pages, Pseudo


class Tail:
    """The candidates that a step does not attend to. What it attends to is left out of the means of its block.

    Args:
        pages: the context and its layout.
        block: tokens of a block, whole pages.
        scale: of attention logits.

    Raises:
        ValueError: ``block`` is not in whole pages.
    """

    def __init__(self, pages: Pages, block: int, scale: float) -> None:
        size = pages.layout.page
        if block < 1 or block % size:
            raise ValueError(f"tail {block}: expected a multiple of {size}, the page")
        self.pages, self.block, self.scale = pages, block // size, scale
        self._means = [Growing(self._mean(each)) for each in pages.context.prompt]

    def append(self) -> None:
        """After ``pages.append``."""
        n, size = self.pages.context.count, self.pages.layout.page
        if n % size == 0:
            filled = self.pages.context.take(torch.arange(n - size, n, device=self._means[0].data.device))
            for means, each in zip(self._means, filled):
                means.append(self._mean(each))

    def beside(self, query: torch.Tensor, chosen: torch.Tensor, n: int) -> Pseudo | None:
        """Pseudo-tokens, of blocks in whole multiples from token 0, for queries ``[B, Hq, D]`` that attend to the pages ``[B, H, K]``."""
        candidates = self.pages.layout.candidates(n)
        if candidates.start == candidates.stop:
            return None
        left = ~self.pages.marked(chosen, n)[..., : candidates.stop, None]
        left[:, :, : candidates.start] = False
        counts = self._summed(left.float())
        keys, values = (self._summed(means.data[:, :, : candidates.stop].where(left, 0)) / counts.clamp(min=1) for means in self._means)
        return Pseudo(logits(query, keys, self.scale, (counts[..., 0] * self.pages.layout.page).log()), values)

    def _mean(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, H, P, D]`` float32 of tokens ``[B, H, T, D]``, of full pages only."""
        size = self.pages.layout.page
        return tokens[:, :, : tokens.shape[2] // size * size].unflatten(2, (-1, size)).float().mean(3)

    def _summed(self, pages: torch.Tensor) -> torch.Tensor:
        """``[B, H, P, *]`` to ``[B, H, N, *]``."""
        return F.pad(pages, (0, 0, 0, -pages.shape[2] % self.block)).unflatten(2, (-1, self.block)).sum(3)
