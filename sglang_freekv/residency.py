# SPDX-License-Identifier: Apache-2.0
"""Residency, the host's side: how a pass begins, and whether the contexts of an extend have room in frames.

The tables of frames are on the device, because SGLang's page numbers are. The host knows how many pages running requests hold, and the
counts of a pass or two ago. So it never waits for the device.
"""

from __future__ import annotations

from collections import deque

import torch

from sglang_freekv.memory_pool.frames import FrameCounts, Frames


class Residency:
    """Begins passes. One object serves all layers; call it on the main stream, behind all that the last pass left in flight.

    Args:
        frames: the tables.
        req_to_token: ``[R, T]`` SGLang's table: the KV index of each token of each row.
    """

    def __init__(self, frames: Frames, req_to_token: torch.Tensor) -> None:
        self.frames, self.req_to_token, self.page_size = frames, req_to_token, frames.page_size
        self.lent = 0  # frames of the rows that are lent slots when the next pass begins
        self.taken = deque([0])  # frames that each pass takes at most, from the one on whose counts have arrived
        self.counted = 0  # number of that pass
        self.used: set[int] = set()  # rows that had a request when the last batch was launched
        self.lacked = self.ended = 0  # the last pass in which a page found no frame; the last pass before which a request ended
        self.held: int | None = None  # host pages that requests have, those of the batch about to begin included

    @property
    def has_room(self) -> bool:
        """Whether all pages of all running rows find frames, and each row one in hand. False for a batch that SGLang did not schedule.

        Other pages give way. All ranks agree, because they schedule alike.
        """
        return self.held is not None and self.fits(self.held, len(self.used))

    def fits(self, pages: int, rows: int) -> bool:
        """Whether so many distinct pages of requests find frames, and each of their rows one in hand."""
        return pages + rows <= self.num_resident

    @property
    def num_resident(self) -> int:
        """Frames that are left if all rows have slots."""
        return self.frames.num_frames - self.frames.tables.row_frames.numel()

    def state(self) -> dict[str, int]:
        """Frames in use and in all. And pages of the last pass whose counts have arrived: resident ones of running requests, and those
        that its batch lacked."""
        counts, total = self._counts(), self.num_resident
        used = max(0, self.frames.num_frames - (len(self.used) + 1) * self.frames.num_slots - counts.left) if self.counted else 0
        return {"frames_used": used, "frames_total": total, "resident_pages": counts.in_use, "absent_pages": counts.absent}

    def note_requests(self, used: set[int], held: int) -> None:
        """A batch is about to be launched. Requests have the rows ``used`` and, together, at most ``held`` distinct host pages."""
        if ended := sorted(self.used - used):
            self.frames.rows_ended(ended)
            self.ended = self.frames.now + 1
        begun = sorted(used - self.used)
        self.frames.lend(begun)
        self.lent += len(begun) * self.frames.num_slots
        self.used, self.held = used, held

    def begin_decode(self, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, frames: torch.Tensor, begins: int) -> None:
        """Begin a decode step.

        Args:
            rows, seq_lens: ``[B]`` of the batch.
            page_table, frames: ``[B, P]`` int32 written, as in ``DecodeBatch``.
            begins: requests whose next token begins a page, at most.
        """
        self.frames.begin_decode(self.req_to_token, rows, seq_lens, must=self._slots(), may=self._worth_reclaiming(begins))
        self._end(begins, rows, seq_lens, page_table, frames)

    def begin_staged(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: torch.Tensor,
        key_lens: list[int],
    ) -> None:
        """Begin an extend whose contexts are staged. Its tokens are ``key_lens``, and ``prefix_lens [B]`` before the new ones."""
        given, kept = torch.empty_like(frames), self.frames.num_frames  # so nothing is given
        where = self.req_to_token, rows, seq_lens, prefix_lens, given
        self.frames.begin_extend_by_staging(*where, must=self._slots(), may=self._worth_reclaiming(len(rows)), keep=kept)
        self._end(self._pages(key_lens), rows, seq_lens, page_table, frames)  # a resident prefix comes into use

    def begin_in_place(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: torch.Tensor,
        key_lens: list[int],
    ) -> torch.Tensor:
        """Begin an extend whose contexts are in frames, which ``has_room`` has promised. Arguments are as above.

        Returns:
            ``[B, P]`` int32: the frames of pages that were absent, where they are first in the batch, else -1.
        """
        given, most = torch.empty_like(frames), self._pages(key_lens)
        where = self.req_to_token, rows, seq_lens, prefix_lens
        self.frames.begin_extend_in_place(*where, given, must=most + self.lent if self._may_lack(most + self.lent) else 0)
        self._end(most, rows, seq_lens, page_table, frames)
        return given

    def _end(self, taken: int, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, frames: torch.Tensor) -> None:
        """Take the snapshot of a pass that takes at most ``taken`` frames."""
        self.frames.snapshot(self.req_to_token, rows, seq_lens, page_table, frames)
        self.taken.append(taken + self.lent)
        self.held, self.lent = None, 0

    def _pages(self, key_lens: list[int]) -> int:
        """Frames that contexts of so many tokens take at most: their pages, and a page that each next token begins."""
        return sum(-(-length // self.page_size) + 1 for length in key_lens)

    def _worth_reclaiming(self, need: int) -> int:
        """``need``, or 0 if frames may not lack. Or if running rows had them all, in a pass since the last request ended.

        Then nothing would give way, and a page in hand is no duty.
        """
        return need if self._may_lack(need) and self.lacked < self.ended else 0

    def _slots(self) -> int:
        """Frames that rows are lent in this pass, or 0 if they do not lack."""
        return self.lent if self._may_lack(self.lent) else 0

    def _may_lack(self, need: int) -> bool:
        """Whether fewer than ``need`` frames may be free."""
        counts = self._counts()
        left = counts.left if self.counted else self.frames.num_frames - self.frames.num_slots
        return left - (sum(self.taken) - self.taken[0]) < need

    def _counts(self) -> FrameCounts:
        """The last counts that have arrived."""
        counts = self.frames.counts
        while self.counted < self.frames.counted:
            self.taken.popleft()
            self.counted += 1
        if counts.unserved:
            self.lacked = self.counted
        return counts
