"""ShadowKV (Sun et al., ICML 2025): values are recalled, and keys rebuilt on the device from their low rank."""

from __future__ import annotations

import torch

from benchmarks.paper.method import Traffic, Work
from sglang_freekv.decode_step import programs_ahead
from sglang_freekv.kernels import Misses

from .rebuild import rebuild_keys, reference_rebuild
from .window import Window

CHUNK, RANK = 8, 160  # tokens of a chunk, and of what rank keys are before RoPE; both the paper's


class ShadowKV(Window):
    """Chunks are selected by their mean keys, each step anew. Of those that were not there a step ago the values come by a copy each, and
    beside that the keys are a product; the others stay where they are. Half a unit of the host pool stands for the values of a chunk: as
    many bytes.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        pools, shape, batch = self.pools, self.pools.shape, work.batch
        device, dtype = pools.device, pools.dtype
        tokens, chunks = work.context, work.context // CHUNK
        self.selected = min(pools.config.budget_tokens, tokens) // CHUNK
        self.fetched = round(work.missed * self.selected)
        self.stream, self.recall = pools.streams[0], work.recall()

        def random(*sizes: int) -> list[torch.Tensor]:
            return [torch.randn(*sizes, dtype=dtype, device=device) for _ in range(shape.layers)]

        self.landmarks = random(batch, shape.kv_heads, chunks, shape.head_dim)
        self.low_rank = random(batch, tokens, RANK)
        self.basis = random(batch, shape.kv_heads, RANK, shape.head_dim)
        self.angles = torch.randn(2, tokens, shape.head_dim, dtype=dtype, device=device)
        count = batch * shape.kv_heads * self.fetched
        self.missing = Misses.allocate(max(1, count), device)
        where = torch.arange(count, device=device).view(batch, shape.kv_heads, -1)
        self.missing.heads[:count] = (where // max(1, self.fetched) % shape.kv_heads).flatten()
        slots = work.requests.rows[:, None, None] * (self._slots(0) * pools.config.page_size // (CHUNK // 2)) + where % max(1, self.fetched)
        self.missing.frames[:count] = slots.expand_as(where).flatten()
        self.count = count

    def _slots(self, layer: int) -> int:
        return self.pools.store.cache.layers[layer].slot_pages.shape[2]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pools, shape, cache = self.pools, self.pools.shape, self.pools.store.cache.layers[layer]
        grouped = q.unflatten(1, (shape.kv_heads, -1))
        scores = (grouped @ self.landmarks[layer].mT).softmax(-1, dtype=torch.float32).amax(2)
        fresh = scores.topk(self.selected, sorted=False).indices[..., : self.fetched].contiguous()  # [B, H, K]
        if not self.fetched:
            return super().attend(layer, q, k, v)
        units = [rows.view(-1, CHUNK // 2, shape.kv_heads, shape.head_dim) for rows in cache.token_rows.tensors]

        def fetch() -> None:
            self.missing.host_pages[: self.count] = fresh.flatten()
            self.missing.length[:1] = self.count
            self.recall(pools.host_units(layer, CHUNK // 2), self.missing, *units, programs_ahead(len(q)))

        on_the_way = self.stream.submit(fetch)
        resident = cache.keys.view(-1, self._slots(layer) * pools.config.page_size, shape.kv_heads, shape.head_dim)
        rebuild = rebuild_keys if q.is_cuda else reference_rebuild
        rebuild(self.low_rank[layer], self.basis[layer], self.angles, fresh, self.work.requests.rows, resident, CHUNK)
        on_the_way.wait()
        return super().attend(layer, q, k, v)

    def traffic(self, steps: int) -> Traffic:
        dim, fetched = self.pools.shape.head_dim, self.fetched * CHUNK
        landmarks = dim * self.work.context / CHUNK
        keys = (RANK * (fetched + dim) + dim * fetched) * (fetched > 0)
        link = self.work.elements(dim * fetched)
        return super().traffic(steps) + Traffic(link, link + self.work.elements(landmarks + keys))
