# SPDX-License-Identifier: Apache-2.0
"""Reads: where the pages lie that one step attends to, written down before the slots are planned anew."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reads(NamedTuple):
    """Written by ``plan_pages``, read by attention, when the tables may be those of the next step already.

    Of a context of P pages a kv head has the smaller of P and A; a request of padding has none.

    Args:
        slots: ``[B, H, A]`` int32 slots of the device cache, -1 for none: those whose page is there come first.
        pages: ``[B, H, A]`` int32 logical page in each; anything where there is none.
        present: ``[B, H]`` int32: pages at the head of a list that nothing is recalled into, A if that is all of them. None: all, of every
            kv head. For ``attend_present`` and ``attend_rest``; when ``attend_pages`` reads, all are there.
    """

    slots: torch.Tensor
    pages: torch.Tensor
    present: torch.Tensor | None

    @classmethod
    def allocate(cls, batch: int, num_kv_heads: int, num_attended: int, device: torch.device) -> Reads:
        """Room for a plan to write."""
        slots, pages = torch.empty(2, batch, num_kv_heads, num_attended, dtype=torch.int32, device=device)
        return cls(slots, pages, torch.empty(batch, num_kv_heads, dtype=torch.int32, device=device))

    @classmethod
    def of(cls, rows: torch.Tensor, slot_pages: torch.Tensor, attended: torch.Tensor) -> Reads:
        """What the tables ``[R, H, C]`` and ``[R, H, A]`` say now of ``rows [B]``, all of it there."""
        listed = attended[rows].where((rows > 0)[:, None, None], -1)
        pages = slot_pages[rows].gather(2, listed.clamp(min=0).long())
        slots = (rows[:, None, None] * slot_pages.shape[2] + listed).where(listed >= 0, -1)
        return cls(slots.to(torch.int32), pages.to(torch.int32), None)
