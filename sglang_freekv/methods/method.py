# SPDX-License-Identifier: Apache-2.0
"""Method: what a retrieval method decides. The engine moves the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Method:
    """The defaults of a method, and the two decisions in which methods differ. Here these are FreeKV's.

    Args:
        name: value of ``--kv-retrieval``, and name of the file.
        paper: its address.
        about: what it does, in one line.
        tau: kv heads whose queries are less like their last ones are corrected. None corrects every kv head in every step.
        digest: one of ``config.DIGESTS``: what pages are scored by.
        pooling: one of ``config.POOLINGS``: how the scores of a group become the weight by which its kv head selects.
    """

    name: str
    paper: str
    about: str
    tau: float | None
    digest: str
    pooling: str

    def corrected(self, compare: Callable[[int], torch.Tensor], num_kv_heads: int) -> torch.Tensor:
        """``[B, H]`` bool: the kv heads that select and recall before they attend.

        Args:
            compare: ``compare(parts)`` is that mask if the query heads are compared in so many equal parts: a part is corrected if the
                cosine of its queries with their last ones is below tau, in the mean.
            num_kv_heads: H.
        """
        return compare(num_kv_heads)

    def adjust(
        self, layer: int, logits: torch.Tensor, corrected: torch.Tensor | None, standing: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """``[B, Hq, P]`` float32 scores by which ``layer`` selects, in this step and ahead. Of equal pages the earlier wins.

        It is captured in a CUDA graph, so it neither waits for the device nor keeps state on the host.

        Args:
            logits: ``[B, Hq, P]`` float32 scores of the candidates by their digests; other columns hold anything.
            corrected: ``[B, H]`` bool of ``corrected``. None if an extend seeds the rows, where every kv head selects.
            standing: returns ``[B, Hq, P]`` float32 scores by which each kv head keeps the pages that it attends to if it is not corrected.
        """
        return logits
