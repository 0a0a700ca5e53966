"""RaaS: "Reasoning-Aware Attention Sparsity" (Hu et al., ACL 2025): a budget of pages, of which the one unused for longest is dropped."""

from __future__ import annotations

import torch

from benchmarks.paper.method import Traffic, Work
from sglang_freekv import kernels
from sglang_freekv.config import PageBudget

from .window import Window

ALPHA = 1e-4  # share of the attention above which a page is in use
EVERY = PageBudget(sink=0, selected=0, window=1)  # with no sink, and one page beyond those that there are, each is a candidate


class RaaS(Window):
    """Window only, and of the resident pages a score and a time stamp. Dropping costs nothing: a slot is written anew."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        pools, caches = self.pools, self.pools.store.cache.layers
        self.slots = caches[0].slot_pages.shape[2]
        shape = (len(caches[0].keys), pools.shape.kv_heads, 2, pools.shape.head_dim)
        self.digests = [torch.randn(shape, dtype=pools.dtype, device=pools.device) for _ in caches]
        self.stamps = [torch.zeros(work.batch, pools.shape.kv_heads, self.slots, dtype=torch.int64, device=pools.device) for _ in caches]
        rows = work.requests.rows
        self.table = (rows[:, None] * self.slots + torch.arange(self.slots, device=pools.device)).to(torch.int32)
        self.resident = torch.full_like(rows, self.slots * pools.config.page_size)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size, heads, requests = self.pools.config.page_size, self.pools.shape.kv_heads, self.work.requests
        logits = kernels.score_pages(
            q, self.digests[layer], requests.rows, self.resident, self.table, EVERY, size, scale=q.shape[-1] ** -0.5
        )
        used = logits.unflatten(1, (heads, -1)).softmax(-1).mean(2) > ALPHA
        stamps = self.stamps[layer]
        torch.where(used, requests.seq_lens[:, None, None], stamps, out=stamps)
        stamps.argmin(-1)  # whom the next page replaces
        return super().attend(layer, q, k, v)

    def traffic(self, steps: int) -> Traffic:
        return super().traffic(steps) + Traffic(0, self.work.elements(2 * self.pools.shape.head_dim * self.slots))
