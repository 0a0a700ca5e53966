# SPDX-License-Identifier: Apache-2.0
"""What a plan selects among, and the tables that it keeps."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sglang_freekv.config import PageBudget

Pooling = Literal["softmax-mean", "mean", "max"]  # how a group's logits become the weight of a page; one of config.POOLINGS


class Candidates(NamedTuple):
    """The pages of B contexts, their scores, and how many of them to select.

    Args:
        logits: ``[B, Hq, P]`` float32 scores of ``score_pages``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context.
        page_table: ``[B, P]`` logical page -> host page.
        budget: pages of the sink, to choose, and of the window.
        page_size: S.
        pooling: how the logits of a group become the weight by which its kv head selects, as in ``reference.select_pages``.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    budget: PageBudget
    page_size: int
    pooling: Pooling = "softmax-mean"

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.logits.is_cuda


class Tables(NamedTuple):
    """What each kv head of each row has on the device, and what it attends to.

    Args:
        slot_pages: ``[R, H, C]`` int32 logical page in each slot, -1 for an empty one.
        attended: ``[R, H, A]`` int32 slots of the pages to attend to, then -1.
    """

    slot_pages: torch.Tensor
    attended: torch.Tensor
