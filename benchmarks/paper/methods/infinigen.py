"""InfiniGen (Lee et al., OSDI 2024): single tokens, selected a layer ahead by a part of the dimensions, and recalled in every step."""

from __future__ import annotations

import torch

from benchmarks.paper.method import Traffic, Work
from sglang_freekv.kernels import Misses
from sglang_freekv.memory_pool.transfer import Handle

from .window import Window

PARTIAL = 0.3  # of the dimensions, the paper's
PROGRAMS = 16


class InfiniGen(Window):
    """The layer's query stands for the guess of the next layer's; nothing that a step recalled is kept for the next one."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        pools, shape, batch = self.pools, self.pools.shape, work.batch
        self.selected = min(pools.config.budget_tokens, work.context)
        self.dims = -(-round(PARTIAL * shape.head_dim) // 8) * 8  # a multiple that matrix units take
        self.partial = [
            torch.randn(batch, shape.kv_heads, work.context, self.dims, dtype=pools.dtype, device=pools.device) for _ in range(shape.layers)
        ]
        self.stream, self.under_way = pools.streams[0], {}
        self.tokens = pools.host_units(0, 1).shape[0]
        slots = pools.store.cache.layers[0].slot_pages.shape[2] * pools.config.page_size
        where = torch.arange(batch * shape.kv_heads * self.selected, device=pools.device).view(batch, shape.kv_heads, -1)
        self.heads = (where // self.selected % shape.kv_heads).flatten()
        self.slots = (work.requests.rows[:, None, None] * slots + where % self.selected).flatten()
        self.prepare()

    def prepare(self) -> None:
        """What :meth:`bring` needs."""
        self.recall, self.missing = self.work.recall(), Misses.allocate(len(self.heads), self.pools.device)
        self.missing.heads[:], self.missing.frames[:] = self.heads, self.slots

    def bring(self, layer: int, chosen: torch.Tensor) -> None:
        """Tokens ``chosen [B * H * K]`` of the host's to ``slots``."""
        units = [rows.unsqueeze(1) for rows in self.pools.store.cache.layers[layer].token_rows.tensors]
        self.missing.host_pages[:] = chosen
        self.missing.length[:1] = len(chosen)
        self.recall(self.pools.host_units(layer, 1), self.missing, *units, PROGRAMS)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer + 1 < self.pools.shape.layers:
            self.under_way[layer + 1] = self._fetch(layer + 1, q)
        if layer in self.under_way:  # the first layer selects nothing
            self.under_way.pop(layer).wait()
        return super().attend(layer, q, k, v)

    def _fetch(self, layer: int, q: torch.Tensor) -> Handle:
        def fetch() -> None:
            scores = (q.unflatten(1, (self.pools.shape.kv_heads, -1))[..., : self.dims] @ self.partial[layer].mT).amax(2)
            self.bring(layer, (scores.topk(self.selected, sorted=False).indices % self.tokens).flatten())

        return self.stream.submit(fetch)

    def traffic(self, steps: int) -> Traffic:
        selecting = 1 - 1 / self.pools.shape.layers  # the first layer does not
        link = selecting * self.work.elements(2 * self.pools.shape.head_dim * self.selected)
        return super().traffic(steps) + Traffic(link, link + selecting * self.work.elements(self.dims * self.work.context))
