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
        frames: ``[B, P]`` int32 frame of each logical page, -1 for an absent one. A page that the next token begins has one if its row
            has a frame in hand.
        budget: pages of the sink, to choose, and of the window, in contexts that are not attended to in full.
        page_size: S.
        pooling: how the logits of a group become the weight by which its kv head selects, as in ``reference.select_pages``.
        hysteresis: nats by which the pages of a kv head's last selection weigh more, 0 or above. Seeding has no last selection.
        on_turn: a kv head that is not corrected plans ahead only in a row that is ``due``. Elsewhere it keeps what it attends to.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    frames: torch.Tensor
    budget: PageBudget
    page_size: int
    pooling: Pooling = "softmax-mean"
    hysteresis: float = 0.0
    on_turn: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.logits.is_cuda


class Tables(NamedTuple):
    """What each kv head of each row has on the device, and what it attends to.

    Args:
        slot_pages: ``[R, H, C]`` int32 logical page in each slot, -1 for an empty one.
        attended: ``[R, H, A]`` int32 pages to attend to, then -1. A slot for a page in a slot, ``-2 - page`` for one that is resident. A is
            at least the budget. A context of at most A pages is attended to in full.
        row_frames: ``[R, C]`` int32 frame of each slot.
    """

    slot_pages: torch.Tensor
    attended: torch.Tensor
    row_frames: torch.Tensor

    def pages(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, H, A]`` int32 logical pages that ``rows [B]`` attend to, then -1. A padding request has none."""
        listed = self.attended[rows].where((rows > 0)[:, None, None], -1)
        in_slots = self.slot_pages[rows].gather(2, listed.clamp(min=0).long())
        return in_slots.where(listed >= 0, (-2 - listed).where(listed < -1, -1)).to(torch.int32)

    def marked(self, rows: torch.Tensor, num_pages: int) -> torch.Tensor:
        """``[B, H, P]`` bool: which of the first ``num_pages`` pages, P, ``rows [B]`` attend to."""
        pages = self.pages(rows)
        marks = torch.zeros((*pages.shape[:2], num_pages + 1), dtype=torch.bool, device=pages.device)  # the last: no page
        return marks.scatter_(2, pages.where(pages >= 0, num_pages).clamp(max=num_pages).long(), True)[..., :num_pages]

    def frames(self, rows: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """``[B, H, A]`` int32 frames of these pages, -1 for a page that was resident and is absent now; ``frames`` as in ``Candidates``."""
        listed, pages = self.attended[rows], self.pages(rows)
        slots = self.row_frames[rows][:, None].expand(-1, listed.shape[1], -1).gather(2, listed.clamp(min=0).long())
        resident = frames[:, None].expand(-1, listed.shape[1], -1).gather(2, pages.clamp(min=0).long())
        return slots.where(listed >= 0, resident).where(pages >= 0, -1).to(torch.int32)

    def lost(self, rows: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """``[B, H]`` bool: a page that a kv head of ``rows [B]`` attends to has become absent; ``frames`` as in ``Candidates``."""
        return any_absent(self.pages(rows), self.frames(rows, frames))


def any_absent(pages: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """``[B, H]`` bool: one of the ``pages [B, H, A]`` of a kv head, -1 for none, has no frame in ``frames [B, H, A]``."""
    return ((pages >= 0) & (frames < 0)).any(-1)


def due(seq_lens: torch.Tensor, page_size: int, num_attended: int, budget: PageBudget) -> torch.Tensor:
    """``[B]`` bool: all kv heads of a row select, because its next token begins a page, or because memory decides what it attends to.

    It decides so between the budget and A pages, ``num_attended``: there all kv heads attend in full, or none does.
    """
    by_memory = seq_lens <= num_attended * page_size if num_attended > budget.total else torch.zeros_like(seq_lens, dtype=torch.bool)
    return (seq_lens % page_size == 0) | by_memory


class Turn(NamedTuple):
    """What tells which kv heads select in a step, if they select on turn only.

    Args:
        seq_lens, frames, budget, page_size: as in ``Candidates``.
        tables: of the layer, as the last step left them.
        selects: ``[B, H]`` bool, written by ``needs_correction``: the kv heads that need scores.
    """

    seq_lens: torch.Tensor
    frames: torch.Tensor
    budget: PageBudget
    page_size: int
    tables: Tables
    selects: torch.Tensor


class Heads(NamedTuple):
    """The kv heads that may recall for this step.

    Args:
        corrected: ``[B, H]`` bool: it selects again before it attends.
        lost: ``[B, H]`` bool, written by a plan: it is not corrected, and a page that it attends to has become absent.
    """

    corrected: torch.Tensor
    lost: torch.Tensor
