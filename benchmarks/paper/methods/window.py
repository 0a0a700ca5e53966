"""Window only: the budget is attended to, and nothing is selected or recalled. No method that selects can be faster."""

from __future__ import annotations

import torch

from benchmarks.paper.method import Traffic, Work
from sglang_freekv import kernels
from sglang_freekv.kernels import Reads


class Window:
    """Pages that never change. New tokens overwrite those of the row's first slot, one after the other."""

    captured = True

    def __init__(self, work: Work) -> None:
        self.work, self.pools = work, work.pools
        self.scale = work.pools.shape.head_dim**-0.5
        for cache in self.pools.store.cache.layers:
            work.requests.seed(cache, self.pools.config)
        self.reads = [Reads.of(work.requests.rows, cache.tables, work.requests.frames) for cache in self.pools.store.cache.layers]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, requests = self.pools.store.cache.layers[layer], self.work.requests
        size, slots = self.pools.config.page_size, cache.slot_pages.shape[2]
        where = requests.rows * (slots * size) + requests.seq_lens % size
        for rows, new in zip(cache.token_rows.tensors, (k, v)):
            rows[where] = new
        return kernels.attend_pages(q, cache.keys, cache.values, requests.seq_lens, self.reads[layer], self.scale)

    def complete(self) -> None:
        return

    def begin(self) -> None:
        return

    def traffic(self, steps: int) -> Traffic:
        return Traffic(0, self.work.elements(2 * self.pools.shape.head_dim * self.work.budget))
