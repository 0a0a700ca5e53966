# SPDX-License-Identifier: Apache-2.0
"""Reads: the frames and pages that one step attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_freekv.kernels.candidates import Tables


class Reads(NamedTuple):
    """What attention reads in one step. ``plan_pages`` writes it, because the tables may be those of the next step before attention runs.

    A kv head has P entries in a context of P pages, if these are at most A, and else ``budget``. A context whose absent pages do not fit the
    slots has ``budget`` entries, too. A padding request has none.

    Args:
        frames: ``[B, H, A]`` int32 frames of the device cache, -1 for none. Those of present pages come first.
        pages: ``[B, H, A]`` int32 logical page in each frame; undefined where that is -1.
        present: ``[B, H]`` int32 number of leading entries that the correction's recall does not fill; A for a kv head that is not
            corrected. ``attend_present`` takes these entries and ``attend_rest`` the others; ``attend_pages`` takes all. None means all.
        budget: pages to attend to in a context of more than A. None means A.
    """

    frames: torch.Tensor
    pages: torch.Tensor
    present: torch.Tensor | None
    budget: int | None = None

    @classmethod
    def allocate(cls, batch: int, num_kv_heads: int, num_attended: int, device: torch.device, budget: int | None = None) -> Reads:
        """Uninitialised tensors for a plan to write, with A = ``num_attended``."""
        frames, pages = torch.empty(2, batch, num_kv_heads, num_attended, dtype=torch.int32, device=device)
        return cls(frames, pages, torch.empty(batch, num_kv_heads, dtype=torch.int32, device=device), budget)

    @classmethod
    def of(cls, rows: torch.Tensor, tables: Tables, frames: torch.Tensor) -> Reads:
        """The entries that ``tables`` have now for ``rows [B]``, all present; ``frames`` as in ``Candidates``."""
        return cls(tables.frames(rows, frames), tables.pages(rows), None)
