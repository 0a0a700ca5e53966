# SPDX-License-Identifier: Apache-2.0
"""ExtendPlan: the layout of an extend, its prefixes, and what their staging waits for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_freekv.batch import AbsentPrefixes, ExtendBatch, Prefixes, StagedPrefixes
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class ExtendPlan(NamedTuple):
    """An extend before it begins.

    Args:
        batch: rows, layout and page table.
        prefixes: the pages of the prefix hits, and of the chunks before.
        behind: handles that staging waits for. With None, it waits for all work that the current stream was given.
    """

    batch: ExtendBatch
    prefixes: Prefixes
    behind: tuple[Handle, ...] | None


class ExtendPlanner:
    """Makes the plan of each extend. It is told what comes before: passes, and the tables that SGLang's scheduler writes.

    Prefixes are staged beside the last pass if that is a decode graph that fills no page. Any other pass uses the same staging buffers,
    or writes a page that the radix tree may have already.

    Args:
        stream: stream whose marks order the staging.
        page_size: S.
    """

    def __init__(self, stream: TransferStream, page_size: int) -> None:
        self.stream, self.page_size = stream, page_size
        self.settled: Handle | None = None  # behind all passes but the last; None unless the last is a graph that fills no page
        self.tables: tuple[Handle, torch.Tensor] | None = None  # of the next extend: behind the scheduler's writes, and its rows

    def note_tables(self, rows: torch.Tensor) -> None:
        """The scheduler has written its tables for the next extend, of ``rows [B]``. Call it on the stream that wrote them."""
        self.tables = self.stream.mark(), rows

    def note_step(self) -> None:
        """A decode step without a graph follows."""
        self.settled = None

    def note_graph(self, fills_page: bool) -> None:
        """A decode graph is about to be replayed. ``fills_page`` says whether it fills a page of a request."""
        self.settled = None if fills_page else self.stream.mark()

    def plan(
        self,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: list[int],
        query_lens: list[int],
        req_to_token: torch.Tensor,
        *,
        given: torch.Tensor | None = None,
        in_place: bool = False,
    ) -> ExtendPlan:
        """Plan the extend that follows.

        Prefixes are looked up in the scheduler's own rows: SGLang fills the buffer of ``rows`` behind the pass before.

        Args:
            rows, page_table, frames, prefix_lens, query_lens: as in ``ExtendBatch.build``.
            req_to_token: ``[R, context]`` KV index of each token, the scheduler's table.
            given: ``[B, P]`` the frames that absent pages were given, as in ``AbsentPrefixes``. None if there are none.
            in_place: whether the contexts are in frames. Else they are staged, and copied to ``given``.

        Raises:
            RuntimeError: a prefix is not a whole number of pages.
        """
        settled, tables = self.settled, self.tables
        self.settled = self.tables = None
        batch = ExtendBatch.build(rows, page_table, frames, prefix_lens, query_lens, self.page_size, in_place=in_place, given=given)
        if in_place:
            assert given is not None
            return ExtendPlan(batch, AbsentPrefixes.build(page_table, given, prefix_lens, self.page_size), None)
        prefixes = StagedPrefixes.build(req_to_token, rows if tables is None else tables[1], prefix_lens, query_lens, self.page_size)
        behind = None if settled is None or tables is None else (settled, tables[0])
        return ExtendPlan(batch, prefixes, behind)
