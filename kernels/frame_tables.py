# SPDX-License-Identifier: Apache-2.0
"""FrameTables: which host page each frame of the device cache holds, which frames are slots of rows, and which are free."""

from __future__ import annotations

from typing import NamedTuple

import torch

FREE, LENT, IN_HAND = -1, -2, -3  # in page_of, of a frame that holds no page
WHOLE, ASKED = -1, -2  # in row_frames[:, 0]: of a row without slots, and of one that is lent slots in this pass
IN_USE, ABSENT, LEFT, UNSERVED, STRANDED, BROUGHT, GIVEN_UP = range(7)  # places in counts
DEPTH_BITS = 20  # of last_use
DEEPEST = (1 << DEPTH_BITS) - 1


class FrameCounts(NamedTuple):
    """Pages and frames of one pass, as in ``FrameTables.counts``.

    Args:
        in_use: resident pages of the running rows, before the pass took and freed frames.
        absent: absent pages of the batch; a page of two requests counts twice.
        left: free frames.
        unserved: partial rows that wanted a frame in hand and found none.
        stranded: since the start, pages of whole rows that found no frame, and rows that found no slots.
        brought, given_up: since the start, absent pages that came back to frames, and pages that lost theirs to others.
    """

    in_use: int
    absent: int
    left: int
    unserved: int
    stranded: int
    brought: int
    given_up: int


class FrameTables(NamedTuple):
    """The state of N frames. A frame is memory for one page, at the same number in every retrieval layer. All ranks have equal tables.

    Host page 0 is padding and has no frame; row 0 is padding and is never in use. Tables change between passes only.

    Args:
        frame_of: ``[host pages]`` int32 frame of each host page, -1 for an absent page.
        page_of: ``[N]`` int32 host page in each frame; FREE, LENT to a row as a slot, or IN_HAND.
        last_use: ``[host pages]`` int64 twice the pass that used the page last, plus 1 if the page was *pinned* in it, times 2^20, plus
            2^20 - 1 - the logical page: of the pages of one pass, the deepest one is the smallest.
        free: ``[N]`` int32 stack of free frames.
        free_count: ``[1]`` int32 length of the stack.
        in_hand: ``[R]`` int32 frame that the next page of each row will take, -1 for none.
        row_lens: ``[R]`` int32 tokens of each running row, 0 where none runs.
        row_frames: ``[R, C]`` int32 frame of each slot of a partial row, -1 in a whole row. The device cache reads the same tensor.
        row_absent: ``[R]`` int32 absent pages of each row, in the last pass that had it in its batch.
        counts: ``[7]`` int64 numbers of ``FrameCounts``, in its order. Those before STRANDED begin at 0 in each pass.
    """

    frame_of: torch.Tensor
    page_of: torch.Tensor
    last_use: torch.Tensor
    free: torch.Tensor
    free_count: torch.Tensor
    in_hand: torch.Tensor
    row_lens: torch.Tensor
    row_frames: torch.Tensor
    row_absent: torch.Tensor
    counts: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.frame_of.is_cuda

    @classmethod
    def allocate(cls, num_frames: int, num_host_pages: int, row_frames: torch.Tensor) -> FrameTables:
        """No page is resident and no row runs. Only the frames that ``row_frames`` names are lent: the first ones, to the padding row."""

        def table(length: int, value: int = -1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((length,), value, dtype=dtype, device=row_frames.device)

        num_rows, num_lent = row_frames.shape
        page_of, free = table(num_frames, FREE), torch.arange(num_frames - 1, -1, -1, dtype=torch.int32, device=row_frames.device)
        page_of[:num_lent] = LENT
        return cls(
            frame_of=table(num_host_pages),
            page_of=page_of,
            last_use=table(num_host_pages, 0, torch.int64),
            free=free,
            free_count=table(1, num_frames - num_lent),
            in_hand=table(num_rows),
            row_lens=table(num_rows, 0),
            row_frames=row_frames,
            row_absent=table(num_rows, 0),
            counts=table(7, 0, torch.int64),
        )
