# SPDX-License-Identifier: Apache-2.0
"""Residency, the host's side: how a pass begins, and how many frames it needs.

The tables of frames are on the device, because SGLang's page numbers are. The host knows the lengths of running requests, and the counts of
a pass or two ago. So it never waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from sglang_freekv.kernels.frame_tables import FrameCounts
from sglang_freekv.lending import Lending
from sglang_freekv.memory_pool.frames import Frames
from sglang_freekv.memory_pool.reclaim import SPARE

NOBODY: Mapping[int, int] = MappingProxyType({})
REFILLED = 3  # decode steps behind an extend in which its rows may have got other pages, of the radix tree: two, and one to spare


class Residency:
    """Begins passes. One object serves all layers; call it on the main stream, behind all that the last pass left in flight.

    Args:
        frames: the tables.
        req_to_token: ``[R, T]`` SGLang's table: the KV index of each token of each row.
        whole_pages: K, pages up to which a row never needs slots.
    """

    def __init__(self, frames: Frames, req_to_token: torch.Tensor, whole_pages: int) -> None:
        self.frames, self.req_to_token, self.page_size = frames, req_to_token, frames.page_size
        self.lending = Lending(self.num_lendable, frames.num_slots, whole_pages, resident=frames.is_resident)
        self.taken = deque([0])  # frames that each pass takes at most, from the one on whose counts have arrived
        self.counted = 0  # number of that pass
        self.lacked = self.ended = 0  # the last pass in which a page found no frame; the last pass before which a request ended
        self.extended = -REFILLED  # the last pass that was an extend
        self.batch: list[tuple[int, int]] | None = None  # the batch about to begin; None if SGLang did not schedule it
        self.lent = 0  # frames that it lends

    @property
    def num_lendable(self) -> int:
        """Frames for pages and for the slots of requests: all but those of the padding row."""
        return self.frames.num_frames - self.frames.num_slots

    @property
    def in_place(self) -> bool:
        """Whether the extend about to begin is in place: all its rows are whole. False for a batch that SGLang did not schedule."""
        return self.batch is not None and all(row in self.lending.pages for row, _ in self.batch)

    def state(self) -> dict[str, int]:
        """What ``metrics.METRICS`` tells of rows, frames and resident pages, as of the last pass whose counts have arrived."""
        counts, total = self._counts(), self.num_lendable
        return {
            "partial_rows": len(self.lending.partial),
            "frames_used": total - counts.left if self.counted else 0,
            "frames_total": total,
            "resident_pages": counts.in_use,
            "absent_pages": counts.absent,
            "brought_pages_total": counts.brought,
            "given_up_pages_total": counts.given_up,
        }

    def note_requests(self, used: Collection[int], held: int, batch: Sequence[tuple[int, int]], new: Mapping[int, int] = NOBODY) -> None:
        """A batch is about to be launched.

        Args:
            used: rows that have a request.
            held: distinct host pages that requests have, at most.
            batch: (row, tokens of its context) of each request.
            new: row and longest context, in tokens, of each request of the batch whose first pass this is.
        """
        lending = self.lending
        self._forget([row for row in lending.promised if row in new or row not in used])
        for row, longest in new.items():
            lending.begin(row, self._pages(longest))
        lent = lending.grow([(row, self._pages(tokens)) for row, tokens in batch], held)
        if lent:
            self.frames.lend(lent)
        self.lent, self.batch = len(lent) * lending.slots, list(batch)

    def note_rest(self) -> None:
        """No request runs."""
        self._forget(list(self.lending.promised))

    def _forget(self, ended: list[int]) -> None:
        """The requests of the rows ``ended`` have gone."""
        if ended:
            self.lending.end(ended)
            self.frames.rows_ended(ended)
            self.ended = self.frames.now + 1

    def begin_decode(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, frames: torch.Tensor, begins: int
    ) -> torch.Tensor | None:
        """Begin a decode step.

        Args:
            rows, seq_lens: ``[B]`` of the batch.
            page_table, frames: ``[B, P]`` int32 written, as in ``DecodeBatch``.
            begins: requests whose next token begins a page, at most.

        Returns:
            ``[B, P]`` int32: the frames that absent pages of whole rows were given, which have to be filled from the host pool; else -1.
            None if no page can be absent.
        """
        batch, pages = self.batch or (), self.lending.pages
        must: int | None = self.lent + sum(row in pages for row, tokens in batch if tokens % self.page_size == 0)
        most, given = self.lent + begins, None
        if self.frames.now < self.extended + REFILLED and pages:
            most, must, given = most + self._whole_pages(), None, torch.empty_like(frames)
        may = self._worth_reclaiming(begins)
        must = must if self._may_lack(most) else 0
        self.frames.begin_decode(self.req_to_token, rows, seq_lens, must=must, may=may, given=given)
        self._end(most, rows, seq_lens, page_table, frames)
        return given

    def begin_extend(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: torch.Tensor,
        key_lens: list[int],
        *,
        in_place: bool,
    ) -> torch.Tensor | None:
        """Begin an extend.

        Args:
            rows, seq_lens, page_table, frames: as for ``begin_decode``.
            prefix_lens: ``[B]`` tokens before the new ones.
            key_lens: tokens of its contexts.
            in_place: whether its contexts are in frames, as ``in_place`` says that they can be. If not, they are staged.

        Returns:
            ``[B, P]`` int32: the frames that absent pages were given, where they are first in the batch, else -1. None if none can be.
        """
        given = torch.empty_like(frames)
        most = self.lent + sum(self._pages(tokens) + 1 for tokens in key_lens)
        where = self.req_to_token, rows, seq_lens, prefix_lens, given
        self.extended = self.frames.now + 1
        if in_place:
            self.frames.begin_extend_in_place(*where, must=None if self._may_lack(most) else 0)
        else:
            needed = self.lent + self._whole_pages() + len(key_lens)
            must, may = None if self._may_lack(needed) else 0, self._worth_reclaiming(len(key_lens))
            spare = self.num_lendable // SPARE + len(self.lending.promised)
            self.frames.begin_extend_by_staging(*where, must=must, may=may, keep=spare)
        self._end(most, rows, seq_lens, page_table, frames)  # a resident prefix comes into use, too
        return given if self.lending.resident else None

    def _end(self, taken: int, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, frames: torch.Tensor) -> None:
        """Take the snapshot of a pass that takes at most ``taken`` frames."""
        self.frames.snapshot(self.req_to_token, rows, seq_lens, page_table, frames)
        self.taken.append(taken)
        self.batch, self.lent = None, 0

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _whole_pages(self) -> int:
        """Pages of the batch's whole rows."""
        return sum(self.lending.pages.get(row, 0) for row, _ in self.batch or ())

    def _worth_reclaiming(self, need: int) -> int:
        """``need``, or 0 if frames may not lack. Or if running rows had them all, in a pass since the last request ended.

        Then nothing would give way to partial rows, for which a frame is no duty.
        """
        return need if self.lending.resident and self.lacked < self.ended and self._may_lack(need) else 0

    def _may_lack(self, need: int) -> bool:
        """Whether fewer than ``need`` frames may be free."""
        counts = self._counts()
        left = counts.left if self.counted else self.num_lendable
        return left - (sum(self.taken) - self.taken[0]) < need

    def _counts(self) -> FrameCounts:
        """The last counts that have arrived.

        Raises:
            RuntimeError: as ``Frames.counts``.
        """
        counts = self.frames.counts
        while self.counted < self.frames.counted:
            self.taken.popleft()
            self.counted += 1
        if counts.unserved:
            self.lacked = self.counted
        return counts
