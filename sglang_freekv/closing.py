# SPDX-License-Identifier: Apache-2.0
"""Closing: what ends a short extend in place, in all layers at once behind the last layer.

Digests and host copies are made of the pages that it filled, and its rows start anew. Behind a short prompt the host is what an extend
waits for, and it would launch four kernels for these in each layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from sglang_freekv.batch import DecodeBatch, ExtendBatch

MOST_REQUESTS = 16  # of a batch that is closed so; a larger one has work enough for the device, layer by layer
MOST_TOKENS = 512  # of the pages that it fills; of more the host copies are better made beside the layers
Work = Callable[[], None]
OfPages = Callable[[int, torch.Tensor, torch.Tensor], None]


class FilledPages:
    """A work on the pages that an extend filled, in all layers. It is recorded for each size, and reads tables of its own.

    Args:
        work: of one layer: ``(layer, starts [M], host_pages [M])``, the first token row and the host page of each, -1 for padding.
        layers: how many there are.
        most: M of the most pages.
        device: of the tables.
        record: as of ``Closing``.
    """

    def __init__(self, work: OfPages, layers: int, most: int, device: torch.device, record: Callable[[Work], Work]) -> None:
        self.host_pages = torch.full((most,), -1, dtype=torch.int32, device=device)  # of the types of ExtendBatch
        self.starts = torch.zeros(most, dtype=torch.int64, device=device)

        def all_layers(size: int) -> None:
            for layer in range(layers):
                work(layer, self.starts[:size], self.host_pages[:size])

        self.works = {size: record(partial(all_layers, size)) for size in sorted({-(-most // 8), most})}

    def run(self, batch: ExtendBatch) -> None:
        """The work on the pages of ``batch``, on the current stream. Padding fills the rest of the next larger size."""
        pages = len(batch.full_pages)
        size = next(size for size in self.works if size >= pages)
        self.host_pages[:pages].copy_(batch.full_pages)
        self.host_pages[pages:size].fill_(-1)
        self.starts[:pages].copy_(batch.full_starts)
        self.works[size]()


class Seeding:
    """Starts the rows of a batch anew in all layers. This is recorded for each size of a batch, and reads tables of its own.

    Args:
        start: starts the rows of a batch anew in one layer: ``(layer, queries [B, Hq, D], batch, scale)``.
        previous_queries, scales, pages, record: as of ``Closing``.
        requests: B of the largest batch.
    """

    def __init__(
        self,
        start: Callable[[int, torch.Tensor, DecodeBatch, float], None],
        previous_queries: Sequence[torch.Tensor],
        scales: Sequence[float],
        requests: int,
        pages: int,
        record: Callable[[Work], Work],
    ) -> None:
        device = previous_queries[0].device
        padding = torch.zeros(requests, dtype=torch.int64, device=device)  # SGLang's types of rows and lengths
        page_table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self.tables = DecodeBatch(padding, torch.ones_like(padding), page_table, torch.full_like(page_table, -1))

        def seed(batch: DecodeBatch) -> None:
            for layer, (previous, scale) in enumerate(zip(previous_queries, scales, strict=True)):
                start(layer, previous.index_select(0, batch.rows), batch, scale)

        self.works = {size: record(partial(seed, self._first(size))) for size in _sizes(requests)}

    def run(self, batch: DecodeBatch) -> None:
        """Start the rows of ``batch`` anew in all layers, on the current stream. Padding fills the rest of the next larger size."""
        size = next(size for size in self.works if size >= len(batch.rows))
        tables, requests, pages = self._first(size), len(batch.rows), batch.page_table.shape[1]
        tables.rows[:requests].copy_(batch.rows)
        tables.rows[requests:].zero_()
        tables.seq_lens[:requests].copy_(batch.seq_lens)
        tables.page_table[:requests, :pages].copy_(batch.page_table)
        tables.frames[:requests, :pages].copy_(batch.frames)
        self.works[size]()

    def _first(self, size: int) -> DecodeBatch:
        """The tables of a batch of ``size`` requests."""
        tables = self.tables
        return DecodeBatch(tables.rows[:size], tables.seq_lens[:size], tables.page_table[:size], tables.frames[:size])


class Closing:
    """Closes extends in place that have few requests and fill few pages.

    Args:
        start: as of ``Seeding``.
        digest, offload: of one layer: ``(layer, starts [M], host_pages [M])``, as of ``FilledPages``.
        previous_queries: ``[R, Hq, D]`` of each layer, where an extend leaves the queries of each row's last token.
        scales: factor of the attention logits of each layer.
        requests: B of the largest batch; at most ``MOST_REQUESTS`` are taken.
        pages: P of every page table.
        page_size: S.
        record: runs a work, and returns what repeats it. ``captured`` on a GPU.
    """

    def __init__(
        self,
        start: Callable[[int, torch.Tensor, DecodeBatch, float], None],
        digest: OfPages,
        offload: OfPages,
        *,
        previous_queries: Sequence[torch.Tensor],
        scales: Sequence[float],
        requests: int,
        pages: int,
        page_size: int,
        record: Callable[[Work], Work],
    ) -> None:
        self.most_requests, self.most_pages = min(requests, MOST_REQUESTS), -(-MOST_TOKENS // page_size)
        of_pages = len(previous_queries), self.most_pages, previous_queries[0].device, record
        self.digests, self.copies = FilledPages(digest, *of_pages), FilledPages(offload, *of_pages)
        self.seeding = Seeding(start, previous_queries, scales, self.most_requests, pages, record)

    def takes(self, batch: ExtendBatch) -> bool:
        """Whether ``batch`` is in place, and small enough."""
        return batch.in_place and len(batch.rows) <= self.most_requests and len(batch.full_pages) <= self.most_pages

    def offload(self, batch: ExtendBatch) -> None:
        """Copy the pages that ``batch`` filled to the host pool, in all layers, on the current stream."""
        self.copies.run(batch)

    def run(self, batch: ExtendBatch) -> None:
        """Make the digests of the pages that ``batch`` filled, then start its rows anew, in all layers, on the current stream."""
        if len(batch.full_pages):
            self.digests.run(batch)
        self.seeding.run(batch)


def captured(work: Work) -> Work:
    """A CUDA graph of ``work``, behind a run in which all is compiled; returns its replay."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        work()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with without_garbage(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


@contextmanager
def without_garbage() -> Iterator[None]:
    """Collect garbage, and leave the collector off inside.

    An engine that is collected frees its memory, host memory that is page-locked included, and a capture on the same thread fails by that.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        yield
    finally:
        if was_on:
            gc.enable()


def _sizes(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
