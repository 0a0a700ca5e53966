# SPDX-License-Identifier: Apache-2.0
"""The invariants of frames, checked while nothing is in flight."""

from __future__ import annotations

import torch

from sglang_freekv.kernels.frame_tables import FREE, IN_HAND, LENT, FrameTables


def check_frames(tables: FrameTables) -> None:
    """Check that each frame is in exactly one state. Waits for the device.

    Raises:
        RuntimeError: the tables of frames and of pages disagree. Or a frame is free and not on the stack, in hand of no row or of two,
            or lent and not the slot of one row. A row has a part of its slots. Or padding is in use.
    """
    device = tables.page_of.device
    num_frames, num_pages = len(tables.page_of), len(tables.frame_of)
    held, owner = tables.frame_of.long(), tables.page_of.long()
    every_page, every_frame = torch.arange(num_pages, device=device), torch.arange(num_frames, device=device)
    hands, stack = tables.in_hand[tables.in_hand >= 0], tables.free[: max(0, int(tables.free_count))]
    slots = tables.row_frames >= 0
    faults = {
        "frames in no known state": (owner < IN_HAND) | (owner >= num_pages) | (owner == 0),
        "frames whose page has another one": (owner > 0) & (held[owner.clamp(0, num_pages - 1)] != every_frame),
        "pages whose frame has another one": (held >= 0) & (owner[held.clamp(0, num_frames - 1)] != every_page),
        "free frames that are not on the stack once, or others that are": _times(stack, num_frames) != (owner == FREE),
        "frames that are not in hand of the rows they should be": _times(hands, num_frames) != (owner == IN_HAND),
        "slots that are not lent, or lent frames that are not one slot": _times(tables.row_frames[slots], num_frames) != (owner == LENT),
        "rows with a part of their slots": slots.any(1) != slots.all(1),
        "padding rows in use": (tables.row_lens[:1] != 0) | (tables.in_hand[:1] >= 0),
    }
    for fault, where in faults.items():
        if where.any():
            raise RuntimeError(f"frames: {fault}, namely {where.nonzero().squeeze(1)[:8].tolist()}, expected none")


def _times(listed: torch.Tensor, length: int) -> torch.Tensor:
    """``[length]``: how often each number is in ``listed``; numbers out of range count as the nearest one."""
    return torch.bincount(listed.clamp(0, length - 1), minlength=length)
