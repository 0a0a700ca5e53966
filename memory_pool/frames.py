# SPDX-License-Identifier: Apache-2.0
"""Frames: what each frame of the device cache holds, and how frames change hands when a pass begins."""

from __future__ import annotations

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels.frame_tables import ABSENT, WHOLE, FrameCounts, FrameTables
from sglang_freekv.memory_pool.device_cache import DeviceCache
from sglang_freekv.memory_pool.frame_check import check_frames
from sglang_freekv.memory_pool.readback import Readback
from sglang_freekv.memory_pool.reclaim import reclaim


class Frames:
    """Gives pages their frames, and rows their slots. One object of a rank serves all retrieval layers.

    A running row is whole or partial. A whole row has no slots, because each of its pages has a frame. A partial row has slots, and its
    pages may lose their frames. Rows begin whole; whoever calls ``lend`` makes them partial, and sees to it that whole rows find frames.

    Call it on the main stream, behind all that the last pass left in flight, with the scheduler's tables of the pass that begins. It never
    waits for the device. Ranks that are called alike have equal tables.

    Args:
        cache: whose frames and slots.
        num_host_pages: pages of the host pool, the padding page included.
        resident: whether pages of partial rows may have frames. Without it every row must be partial.
    """

    def __init__(self, cache: DeviceCache, num_host_pages: int, *, resident: bool = True) -> None:
        self.cache, self.page_size, self.is_resident = cache, cache.page_size, resident
        self.tables = FrameTables.allocate(cache.num_frames, num_host_pages, cache.row_frames)
        self.now = 0  # number of the pass
        self._ended: dict[int, None] = {}
        self._lent: dict[int, None] = {}
        self._counts = Readback(self.tables.counts)
        self._none = torch.zeros(0, dtype=torch.int64, device=cache.row_frames.device)

    @property
    def num_frames(self) -> int:
        """N, those of the padding row included."""
        return self.cache.num_frames

    @property
    def num_slots(self) -> int:
        """C, frames that a partial row is lent."""
        return self.cache.num_slots

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables) - self.cache.row_frames.nbytes  # the cache counts these

    @property
    def counts(self) -> FrameCounts:
        """Counts of pass ``counted``, the last one whose counts have arrived on the host; zeros before the first.

        On a GPU that is one to three passes ago.

        Raises:
            RuntimeError: pages of whole rows, or slots, found no frame.
        """
        counts = FrameCounts(*self._counts.poll())
        if counts.stranded:
            raise RuntimeError(f"frames: {counts.stranded} pages of whole rows or lent rows found no frame, expected none")
        return counts

    @property
    def counted(self) -> int:
        """Number of the pass that ``counts`` are of, from 1; 0 before the first."""
        return self._counts.arrived

    def rows_ended(self, rows: list[int]) -> None:
        """The requests of ``rows`` ended, or were retracted. The next pass takes their frame in hand and their slots back."""
        self._ended |= dict.fromkeys(rows)
        for row in rows:
            self._lent.pop(row, None)

    def lend(self, rows: list[int]) -> None:
        """Make ``rows`` partial when the next pass begins, behind what ``rows_ended`` takes back. Rows that have slots keep them."""
        self._lent |= dict.fromkeys(rows)

    def lend_all(self) -> None:
        """Lend slots to all rows at once, for a program that begins no passes."""
        rows = torch.arange(1, self.cache.num_rows, device=self._none.device)
        kernels.note_rows(self._none, rows, self._none, self._none, self.tables)
        kernels.lend_slots(rows, self.tables)

    def begin_decode(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        must: int | None = 0,
        may: int = 0,
        given: torch.Tensor | None = None,
    ) -> None:
        """Begin a decode step.

        Args:
            req_to_token: ``[R, T]`` int32 KV index of each position of each row.
            rows: ``[B]`` row of each request.
            seq_lens: ``[B]`` tokens of context, the new one included.
            must: free frames that whole rows of the batch and ``lend`` need, as in ``reclaim``; 0 if so many are free, None to count them on
                the device.
            may: free frames that partial rows can use, 0 if so many are free.
            given: ``[B, P]`` int32 written: the frames that absent pages of whole rows are given, else -1. The pages have to be copied there
                from the host pool. None gives none.
        """
        self._begin(req_to_token, rows, seq_lens, must, may, given)
        if given is not None:
            full = (seq_lens - 1).div(self.page_size, rounding_mode="floor") * self.page_size
            where = req_to_token, rows, full, full, self.tables, self.page_size
            kernels.hold_pages(*where, given.fill_(-1), keep=self.num_frames)
        kernels.begin_pages(req_to_token, rows, seq_lens, self.tables, self.page_size, keep=self._keep(0))

    def begin_extend_in_place(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        given: torch.Tensor,
        *,
        must: int | None = 0,
    ) -> None:
        """Begin an extend whose contexts are read and written in frames.

        Args:
            req_to_token, rows, seq_lens: as for ``begin_decode``.
            prefix_lens: ``[B]`` tokens before the new ones, a multiple of S.
            given: ``[B, P]`` int32 written: the frame of each logical page that was absent, in its first place in the batch, else -1. A page
                of a prefix has to be copied there from the host pool.
            must: as for ``begin_decode``.
        """
        self._begin(req_to_token, rows, seq_lens, must, 0, given)
        self._hold(req_to_token, rows, seq_lens, prefix_lens, given, self._keep(0))

    def begin_extend_by_staging(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        given: torch.Tensor,
        *,
        must: int | None = 0,
        may: int = 0,
        keep: int = 0,
    ) -> None:
        """Begin an extend whose contexts are read and written in a staging buffer.

        Args:
            req_to_token, rows, seq_lens, must, may: as for ``begin_decode``.
            prefix_lens: ``[B]`` tokens before the new ones, a multiple of S.
            given: ``[B, P]`` int32 written: the frame of each logical page that has to be copied there from the staging buffer, else -1.
            keep: absent pages of partial rows get frames only while more than so many are free, and one for each request of the batch.
        """
        self._begin(req_to_token, rows, seq_lens, must, may, given)
        kernels.forget_pages(req_to_token, rows, seq_lens, prefix_lens, self.tables, self.page_size)
        self._hold(req_to_token, rows, seq_lens, prefix_lens, given, self._keep(keep + len(rows)))

    def _hold(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        prefix_lens: torch.Tensor,
        given: torch.Tensor,
        keep: int,
    ) -> None:
        kernels.hold_pages(req_to_token, rows, seq_lens, prefix_lens, self.tables, self.page_size, given.fill_(-1), keep=keep)
        kernels.take_in_hand(rows, seq_lens, self.tables, self.page_size, keep=self._keep(0))

    def _keep(self, frames: int) -> int:
        """How many free frames partial rows leave for slots."""
        return frames if self.is_resident else self.num_frames

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

    def _begin(
        self,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        must: int | None,
        may: int,
        given: torch.Tensor | None = None,
    ) -> None:
        """Rows end and begin, pages are marked, frames reclaimed and slots lent. ``given [B, P]`` is scratch of a count."""
        self.now += 1
        ended, lent = self._take(self._ended), self._take(self._lent)
        if len(ended):
            self.cache.empty_rows(ended)
        kernels.note_rows(ended, lent, rows, seq_lens, self.tables)
        kernels.mark_pages(req_to_token, self.tables, self.page_size, self.now)
        wanted: int | torch.Tensor | None = must
        if wanted is None:
            wanted = len(rows) + len(lent) * self.num_slots
            wanted += 0 if given is None else self._lacking(req_to_token, rows, seq_lens, given)
        if must is None or must or may:
            self.reclaim(wanted, may)
        if len(lent):
            kernels.lend_slots(lent, self.tables)

    def _lacking(self, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """``[1]`` absent pages of the whole rows of the batch. ``given`` is written."""
        kernels.snapshot_pages(req_to_token, rows, seq_lens, torch.empty_like(given), self.page_size, tables=self.tables, frames=given)
        self.tables.row_absent.zero_()
        self.tables.counts[ABSENT : ABSENT + 1].zero_()  # a scalar would be copied from the host, which waits
        begun = torch.arange(given.shape[1], device=given.device) * self.page_size < seq_lens[:, None]
        whole = (self.tables.row_frames[rows, :1] == WHOLE) & (rows > 0)[:, None]
        return ((given < 0) & begun & whole).sum().view(1)

    def _take(self, noted: dict[int, None]) -> torch.Tensor:
        """``[M]`` the rows that were noted since the last pass. The host does not wait for the device."""
        if not noted:
            return self._none
        rows = torch.tensor(list(noted), dtype=torch.int64)
        noted.clear()
        return rows.pin_memory().to(self._none.device, non_blocking=True) if self._none.is_cuda else rows

    def reclaim(self, must: int | torch.Tensor, may: int) -> None:
        """As the function, in this pass."""
        reclaim(self.tables, self.now, must, may)

    def check_integrity(self) -> None:
        """As ``check_frames``."""
        check_frames(self.tables)
