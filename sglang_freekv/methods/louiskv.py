# SPDX-License-Identifier: Apache-2.0
"""LouisKV's trigger, our pages: a layer selects when its query changes, and keeps what it selected until then (ICLR 2026, section 4.1).

The paper's units are clusters of the prompt and segments of the output. Here they are pages, so only the trigger is LouisKV's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_freekv.methods.method import Method

if TYPE_CHECKING:
    import torch


class LouisKV(Method):
    def corrected(self, compare: Callable[[int], torch.Tensor], num_kv_heads: int) -> torch.Tensor:
        """All kv heads of a layer or none, by the mean cosine over all query heads."""
        return compare(1)

    def adjust(
        self, layer: int, logits: torch.Tensor, corrected: torch.Tensor | None, standing: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """What is held stands until the next correction. A page that leaves the window is the last of what is held, so it goes."""
        if corrected is None:
            return logits
        group = logits.shape[1] // corrected.shape[1]
        return logits.where(corrected.repeat_interleave(group, 1)[..., None], standing())


METHOD = LouisKV(
    name="louiskv",
    paper="https://arxiv.org/abs/2510.11292",
    about="LouisKV's trigger, our pages: a layer selects when the mean of its queries changes, and waits for its pages",
    tau=0.85,
    digest="cuboid-mean",
    pooling="softmax-mean",
)
