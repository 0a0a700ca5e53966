"""How many pages a kv head needs: the fewest best ones that hold a share of its attention (top-p, as Twilight, arXiv 2502.02770).

Letters as in ``pages``.
"""

from __future__ import annotations

from typing import Literal

import torch

from .pages import NONE, Pages

BEYOND = ("nothing", "in-hand")


class Need:
    """A budget that follows the need, up to that of the pages' layout.

    Args:
        top_p: the share that sink, window and selected pages hold, by the masses of digests, in the mean of the group.
        beyond: what the rest of the budget is for: "nothing"; or what is "in-hand". Then a corrected kv head fills it with the best pages that
            were selected a step ahead, and a selection ahead takes as many pages as without ``top_p``.
    """

    def __init__(self, pages: Pages, top_p: float, beyond: Literal["nothing", "in-hand"]) -> None:
        self.pages, self.top_p, self.fills = pages, top_p, beyond == "in-hand"

    def select(
        self, query: torch.Tensor, n: int, logits: torch.Tensor, ranking: torch.Tensor, in_hand: torch.Tensor | None
    ) -> torch.Tensor:
        """Pages ``[B, H, K]`` of a context of n tokens, best first, and ``NONE`` in unused places.

        Args:
            query: ``[B, H, G, D]``.
            logits: ``[B, H, G, C]`` logarithms of the candidates' masses.
            ranking: ``[B, H, C]`` by which they are chosen.
            in_hand: pages ``[B, H, K]`` that a correction finds there; None selects ahead.
        """
        if self.fills and in_hand is None:
            return self.pages.best(ranking)
        order, layout = self.pages.ordered(ranking), self.pages.layout
        masses = torch.cat((logits, self.pages.pinned_logits(query, n)), dim=-1).softmax(-1).mean(2)
        held = masses.gather(-1, order)
        needed = masses[..., -1:] + held.cumsum(-1) - held < self.top_p
        if in_hand is None or not self.fills:
            return (order + layout.sink).where(needed, NONE)[..., : layout.selected]
        there = self.pages.marked(in_hand, n)[..., layout.candidates(n)].gather(-1, order)
        first = self.pages.ordered(2 * needed + (there & ~needed))
        return order.gather(-1, first)[..., : layout.selected] + layout.sink
