# SPDX-License-Identifier: Apache-2.0
"""FrameTables: which host page each frame of the device cache holds, and which frames are free."""

from __future__ import annotations

from typing import NamedTuple

import torch

FREE, LENT, IN_HAND = -1, -2, -3  # in page_of, of a frame that holds no page
IN_USE, ABSENT, LEFT, UNSERVED = range(4)  # places in counts
DEPTH_BITS = 20  # of last_use
DEEPEST = (1 << DEPTH_BITS) - 1


class FrameTables(NamedTuple):
    """The state of N frames. A frame is memory for one page, at the same number in every retrieval layer. All ranks have equal tables.

    Host page 0 is padding and has no frame; row 0 is padding and is never in use. Tables change between passes only.

    Args:
        frame_of: ``[host pages]`` int32 frame of each host page, -1 for an absent page.
        page_of: ``[N]`` int32 host page in each frame; FREE, LENT to a row as a slot, or IN_HAND.
        last_use: ``[host pages]`` int64 pass that used the page last, times 2^20, plus 2^20 - 1 - the logical page: of the pages of one
            pass, the deepest one is the smallest.
        free: ``[N]`` int32 stack of free frames.
        free_count: ``[1]`` int32 length of the stack.
        in_hand: ``[R]`` int32 frame that the next page of each row will take, -1 for none.
        row_lens: ``[R]`` int32 tokens of each running row, 0 where none runs.
        counts: ``[4]`` int32 counts of this pass. IN_USE: resident pages of the running rows, before the pass took and freed frames.
            ABSENT: absent pages of the batch. LEFT: free frames. UNSERVED: pages that wanted a frame and found none.
    """

    frame_of: torch.Tensor
    page_of: torch.Tensor
    last_use: torch.Tensor
    free: torch.Tensor
    free_count: torch.Tensor
    in_hand: torch.Tensor
    row_lens: torch.Tensor
    counts: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.frame_of.is_cuda

    @classmethod
    def allocate(cls, num_frames: int, num_host_pages: int, num_rows: int, num_lent: int, device: torch.device | str) -> FrameTables:
        """No page is resident, no row runs, and the first ``num_lent`` frames are lent."""

        def table(length: int, value: int = -1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((length,), value, dtype=dtype, device=device)

        page_of, free = table(num_frames, FREE), torch.arange(num_frames - 1, -1, -1, dtype=torch.int32, device=device)
        page_of[:num_lent] = LENT
        return cls(
            frame_of=table(num_host_pages),
            page_of=page_of,
            last_use=table(num_host_pages, 0, torch.int64),
            free=free,
            free_count=table(1, num_frames - num_lent),
            in_hand=table(num_rows),
            row_lens=table(num_rows, 0),
            counts=table(4, 0),
        )
