"""Where a decode step appends its tokens, for tests of the kernel that does it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_freekv.kernels import Tables


class Step(NamedTuple):
    """Arguments of ``append_tokens`` between the new tokens and what is written; shapes as there."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    frames: torch.Tensor
    tables: Tables


def some_step(batch: int, heads: int, slots: int, page: int, pages: int, device: str) -> Step:
    """Tokens that go into slots, into a resident page, and nowhere, for a padding request.

    There is a row more than requests, and request 7 has the frame behind those of all slots.
    """
    rows = torch.arange(batch, device=device)
    seq_lens = rows % (pages * page) + 1
    current = ((seq_lens - 1) // page).to(torch.int32)
    slot_pages = torch.full((batch + 1, heads, slots), -1, dtype=torch.int32, device=device)
    slot_pages[rows, :, slots - 1] = current[:, None]
    row_frames = torch.randperm((batch + 1) * slots).view(batch + 1, slots).to(torch.int32).to(device)
    frames = torch.full((batch, pages), -1, dtype=torch.int32, device=device)
    frames[7, current[7]] = (batch + 1) * slots
    page_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    return Step(rows, seq_lens, page_table, frames, Tables(slot_pages, slot_pages, row_frames))
