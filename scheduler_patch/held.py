# SPDX-License-Identifier: Apache-2.0
"""Held: the pages of the requests of a pass at its launch. When its results are read, some may be another request's already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Held:
    """The pages that the requests of a pass hold when it is launched.

    SGLang may change their rows before the results are read: behind a prefill it frees pages of which the radix tree has others already.

    Args:
        requests: of the batch.
        table: ``[B, P]`` int32 KV indices on the device: the first of each page.
        counts: pages of each request.
        out_cache_loc: ``[T]`` KV indices that the pass writes.
        page_size: tokens of a page.
    """

    requests: list
    table: torch.Tensor
    counts: list[int]
    out_cache_loc: torch.Tensor | None
    page_size: int

    @classmethod
    def at_launch(cls, batch, rows: torch.Tensor, page_size: int) -> Held:
        """Copy them out of ``rows``, SGLang's table ``[R, N]`` of KV indices, on its schedule stream, which is the one that writes the table."""
        counts = [-(-length // page_size) for length in batch.seq_lens_cpu.tolist()]
        table = rows[:, ::page_size][:, : max(counts, default=0)][batch.req_pool_indices]
        return cls(batch.reqs[:], table, counts, batch.out_cache_loc, page_size)

    def readers(self, changed: set[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Who holds ``changed`` pages: the request, these pages, and the pages behind the first of them that the pass writes to."""
        written = set() if self.out_cache_loc is None else set((self.out_cache_loc // self.page_size).tolist())
        for request, pages in self.pages():
            if read := [page for page in pages if page in changed]:
                yield request, read, [page for page in pages[pages.index(read[0]) :] if page in written]

    def pages(self) -> Iterator[tuple[Any, list[int]]]:
        """Each request, and its pages in order."""
        for request, pages, count in zip(self.requests, (self.table // self.page_size).tolist(), self.counts, strict=True):
            yield request, pages[:count]


def begun_in(page_size: int, *passes) -> set[int]:
    """Pages of which ``passes`` write the first token."""
    begun: set[int] = set()
    for launched in passes:
        if launched.out_cache_loc is not None:
            first = launched.out_cache_loc[launched.out_cache_loc % page_size == 0]
            begun |= set((first // page_size).tolist())
    return begun
