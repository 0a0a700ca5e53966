# SPDX-License-Identifier: Apache-2.0
"""Seeding: the rows of an extend in place start anew in all layers at once, behind the last layer.

Layer by layer the host launches two kernels for each, and behind a short prompt the host is what an extend waits for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from sglang_freekv.batch import DecodeBatch

MOST_REQUESTS = 16  # of a batch that is seeded so; a larger one has work enough for the device, layer by layer
Work = Callable[[], None]


class Seeding:
    """Seeds batches of few requests, each size by a work that is recorded once and reads tables of its own.

    Args:
        start: starts the rows of a batch anew in one layer: ``(layer, queries [B, Hq, D], batch, scale)``.
        previous_queries: ``[R, Hq, D]`` of each layer, where an extend leaves the queries of each row's last token.
        scales: factor of the attention logits of each layer.
        requests: B of the largest batch; at most ``MOST_REQUESTS`` are taken.
        pages: P of every page table.
        record: runs a work, and returns what repeats it. ``captured`` on a GPU.
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
        device, most = previous_queries[0].device, min(requests, MOST_REQUESTS)
        padding = torch.zeros(most, dtype=torch.int64, device=device)  # SGLang's types of rows and lengths
        page_table = torch.zeros(most, pages, dtype=torch.int32, device=device)
        self.tables = DecodeBatch(padding, torch.ones_like(padding), page_table, torch.full_like(page_table, -1))

        def seed(batch: DecodeBatch) -> None:
            for layer, (previous, scale) in enumerate(zip(previous_queries, scales, strict=True)):
                start(layer, previous.index_select(0, batch.rows), batch, scale)

        self.works = {size: record(partial(seed, self._first(size))) for size in _sizes(most)}

    def takes(self, batch: DecodeBatch) -> bool:
        """Whether ``batch`` is small enough."""
        return len(batch.rows) <= len(self.tables.rows)

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
