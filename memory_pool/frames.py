# SPDX-License-Identifier: Apache-2.0
"""Frames: the resident pages of the device cache, and how frames change hands when a pass begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels.frame_tables import ABSENT, DEPTH_BITS, FREE, IN_HAND, LENT, FrameTables
from sglang_freekv.memory_pool.readback import Readback

SPARE = 64  # a reclaim leaves one frame of so many free beyond what was asked for, so that the next pass need not reclaim again
NEVER = torch.iinfo(torch.int64).max


class FrameCounts(NamedTuple):
    """Pages and frames of one pass, in the order of ``FrameTables.counts``.

    Args:
        in_use: resident pages of the running rows, before the pass took and freed frames.
        absent: absent pages of the batch; a page of two requests counts twice.
        left: free frames.
        unserved: pages that wanted a frame and found none.
    """

    in_use: int
    absent: int
    left: int
    unserved: int


def least_recent(tables: FrameTables, pages: torch.Tensor) -> torch.Tensor:
    """``[N]`` int64 worth of ``pages [N]``. The page of least worth is given up first: the least recently used one, and the deepest of a pass.

    A shared prefix is used by the pages behind it, so it outlives them.
    """
    return tables.last_use[pages]


class Frames:
    """Gives pages their frames. One object of a rank serves all retrieval layers.

    Call it on the main stream, behind all that the last pass left in flight, with the scheduler's tables of the pass that begins. It never
    waits for the device. Ranks that are called alike have equal tables.

    Args:
        num_frames: N.
        num_host_pages: pages of the host pool, the padding page included.
        num_rows: R, the padding row included.
        num_lent: how many frames, from frame 0 on, are lent to rows as slots.
        page_size: S.
        device: of all tensors.
        worth: ``(tables, pages)`` -> ``[N]`` int64; a reclaim gives up the pages of least worth.
    """

    def __init__(
        self,
        num_frames: int,
        num_host_pages: int,
        num_rows: int,
        num_lent: int,
        page_size: int,
        device: str,
        *,
        worth: Callable[[FrameTables, torch.Tensor], torch.Tensor] = least_recent,
    ) -> None:
        self.tables = FrameTables.allocate(num_frames, num_host_pages, num_rows, num_lent, device)
        self.num_lent, self.page_size, self.worth = num_lent, page_size, worth
        self.now = 0  # number of the pass
        self._ended: dict[int, None] = {}
        self._counts = Readback(self.tables.counts)
        self._none = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def num_resident(self) -> int:
        """Frames that are not lent."""
        return len(self.tables.page_of) - self.num_lent

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def counts(self) -> FrameCounts:
        """Counts of pass ``counted``, the last one whose counts have arrived on the host; zeros before the first.

        On a GPU that is one to three passes ago.
        """
        return FrameCounts(*self._counts.poll())

    @property
    def counted(self) -> int:
        """Number of the pass that ``counts`` are of, from 1; 0 before the first."""
        return self._counts.arrived

    def rows_ended(self, rows: list[int]) -> None:
        """The requests of ``rows`` ended, or were retracted. The next pass takes their frame in hand."""
        self._ended |= dict.fromkeys(rows)

    def begin_decode(self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, *, need: int = 0) -> None:
        """Begin a decode step.

        Args:
            req_to_token: ``[R, T]`` int32 token slot of each position of each row.
            rows: ``[B]`` row of each request.
            seq_lens: ``[B]`` tokens of context, the new one included.
            need: free frames that the pass should find, reclaimed if there are fewer; 0 reclaims none.
        """
        self._begin(req_to_token, rows, seq_lens, need)
        kernels.begin_pages(req_to_token, rows, seq_lens, self.tables, self.page_size)

    def begin_extend_in_place(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, given: torch.Tensor, *, need: int | None = 0
    ) -> None:
        """Begin an extend whose contexts are read and written in frames.

        Args:
            req_to_token, rows, seq_lens: as for ``begin_decode``.
            given: ``[B, P]`` int32 written: the frame of each logical page that was absent, in its first place in the batch, else -1. A page
                of a prefix has to be copied there from the host pool.
            need: as for ``begin_decode``; None is what the batch can take, counted on the device.
        """
        self._begin(req_to_token, rows, seq_lens, need or 0)
        if need is None:
            kernels.snapshot_pages(req_to_token, rows, seq_lens, torch.empty_like(given), self.page_size, tables=self.tables, frames=given)
            self.reclaim(self.tables.counts[ABSENT : ABSENT + 1] + len(rows))
            self.tables.counts[ABSENT] = 0
        kernels.hold_pages(req_to_token, rows, seq_lens, self.tables, self.page_size, given.fill_(-1))

    def begin_extend_by_staging(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, prefix_lens: torch.Tensor, *, need: int = 0
    ) -> None:
        """Begin an extend whose new pages are written to a staging buffer, and not to frames.

        Args:
            req_to_token, rows, seq_lens, need: as for ``begin_decode``.
            prefix_lens: ``[B]`` tokens before the new ones, a multiple of S.
        """
        self._begin(req_to_token, rows, seq_lens, need)
        kernels.forget_pages(req_to_token, rows, seq_lens, prefix_lens, self.tables, self.page_size)

    def snapshot(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """After a ``begin``: write the host page and the frame of each logical page, and send the counts to the host.

        Args:
            req_to_token, rows, seq_lens: as for ``begin_decode``.
            page_table, frames: ``[B, P]`` int32 written, as by ``kernels.snapshot_pages``.
        """
        kernels.snapshot_pages(req_to_token, rows, seq_lens, page_table, self.page_size, tables=self.tables, frames=frames)
        self._counts.begin()

    def _begin(self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, need: int) -> None:
        self.now += 1
        kernels.note_rows(self._take_ended(), rows, seq_lens, self.tables)
        kernels.mark_pages(req_to_token, self.tables, self.page_size, self.now)
        if need:
            self.reclaim(need)

    def _take_ended(self) -> torch.Tensor:
        """``[M]`` rows that ended since the last pass. The host does not wait for the device."""
        if not self._ended:
            return self._none
        ended = torch.tensor(list(self._ended), dtype=torch.int64)
        self._ended.clear()
        return ended.pin_memory().to(self._none.device, non_blocking=True) if self._none.is_cuda else ended

    def reclaim(self, need: int | torch.Tensor) -> None:
        """If fewer than ``need`` frames are free, give up pages that no running row uses, until that many and some to spare are free.

        The host copies of the pages are complete, so giving up copies nothing. It stops when no such page is left.
        """
        tables, places = self.tables, torch.arange(len(self.tables.page_of), device=self.tables.page_of.device)
        pages = tables.page_of.clamp(min=0).long()
        idle = (pages > 0) & (tables.last_use[pages] >> DEPTH_BITS < self.now)
        frames = self.worth(tables, pages).masked_fill(~idle, NEVER).argsort(stable=True)
        short = (need + len(places) // SPARE - tables.free_count) * (tables.free_count < need)
        number = torch.minimum(short, idle.sum())
        given_up = places < number
        tables.frame_of.index_fill_(0, pages[frames].where(given_up, 0), -1)  # page 0 has no frame anyway
        tables.page_of[frames] = tables.page_of[frames].masked_fill(given_up, FREE)
        rank = places - tables.free_count
        tables.free.copy_(frames[rank.clamp(min=0)].where((rank >= 0) & (rank < number), tables.free))
        tables.free_count.add_(number)

    def check_integrity(self) -> None:
        """Check that each frame is in exactly one state. Waits for the device.

        Raises:
            RuntimeError: the tables of frames and of pages disagree. Or a frame is free and not on the stack, in hand of no row or of two,
                or lent and not a slot. Or padding is in use.
        """
        tables, device = self.tables, self.tables.page_of.device
        num_frames, num_pages = len(tables.page_of), len(tables.frame_of)
        held, owner = tables.frame_of.long(), tables.page_of.long()
        every_page, every_frame = torch.arange(num_pages, device=device), torch.arange(num_frames, device=device)
        hands, stack = tables.in_hand[tables.in_hand >= 0], tables.free[: max(0, int(tables.free_count))]
        faults = {
            "frames in no known state": (owner < IN_HAND) | (owner >= num_pages) | (owner == 0),
            "frames whose page has another one": (owner > 0) & (held[owner.clamp(0, num_pages - 1)] != every_frame),
            "pages whose frame has another one": (held >= 0) & (owner[held.clamp(0, num_frames - 1)] != every_page),
            "free frames that are not on the stack once, or others that are": _times(stack, num_frames) != (owner == FREE),
            "frames that are not in hand of the rows they should be": _times(hands, num_frames) != (owner == IN_HAND),
            "slots that are not lent, or lent frames that are no slots": (owner == LENT) != (every_frame < self.num_lent),
            "padding rows in use": (tables.row_lens[:1] != 0) | (tables.in_hand[:1] >= 0),
        }
        for fault, where in faults.items():
            if where.any():
                raise RuntimeError(f"frames: {fault}, namely {where.nonzero().squeeze(1)[:8].tolist()}, expected none")


def _times(listed: torch.Tensor, length: int) -> torch.Tensor:
    """``[length]``: how often each number is in ``listed``; numbers out of range count as the nearest one."""
    return torch.bincount(listed.clamp(0, length - 1), minlength=length)
