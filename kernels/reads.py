# SPDX-License-Identifier: Apache-2.0
"""Reads: the slots and pages that one step attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reads(NamedTuple):
    """What attention reads in one step. ``plan_pages`` writes it, because the tables may be those of the next step before attention runs.

    A kv head has min(P, A) entries in a context of P pages. A padding request has none.

    Args:
        slots: ``[B, H, A]`` int32 slots of the device cache, -1 for none. Slots of present pages come first.
        pages: ``[B, H, A]`` int32 logical page in each slot; undefined where the slot is -1.
        present: ``[B, H]`` int32 number of leading entries that the correction's recall does not fill; A for a kv head that is not
            corrected. ``attend_present`` takes these entries and ``attend_rest`` the others; ``attend_pages`` takes all. None means all.
    """

    slots: torch.Tensor
    pages: torch.Tensor
    present: torch.Tensor | None

    @classmethod
    def allocate(cls, batch: int, num_kv_heads: int, num_attended: int, device: torch.device) -> Reads:
        """Uninitialised tensors for a plan to write, with A = ``num_attended``."""
        slots, pages = torch.empty(2, batch, num_kv_heads, num_attended, dtype=torch.int32, device=device)
        return cls(slots, pages, torch.empty(batch, num_kv_heads, dtype=torch.int32, device=device))

    @classmethod
    def of(cls, rows: torch.Tensor, slot_pages: torch.Tensor, attended: torch.Tensor) -> Reads:
        """The entries that ``slot_pages [R, H, C]`` and ``attended [R, H, A]`` have now for ``rows [B]``, all present."""
        listed = attended[rows].where((rows > 0)[:, None, None], -1)
        pages = slot_pages[rows].gather(2, listed.clamp(min=0).long())
        slots = (rows[:, None, None] * slot_pages.shape[2] + listed).where(listed >= 0, -1)
        return cls(slots.to(torch.int32), pages.to(torch.int32), None)
