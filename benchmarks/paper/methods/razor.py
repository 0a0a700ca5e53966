"""RazorAttention (Tang et al., ICLR 2025): some kv heads attend to everything, on the device, the others to sink and window."""

from __future__ import annotations

import torch

from benchmarks.paper.method import Traffic, Work
from sglang_freekv import kernels
from sglang_freekv.kernels import Reads

SHARE = 0.15  # of kv heads, in the paper


class Razor:
    """Layers take turns, so that their kv heads that attend to everything are the share in the mean."""

    captured = True

    def __init__(self, work: Work) -> None:
        self.work, self.pools = work, work.pools
        shape, config, device = work.pools.shape, work.pools.config, work.pools.device
        self.size, self.scale = config.page_size, shape.head_dim**-0.5
        heads = [round((layer + 1) * SHARE * shape.kv_heads) - round(layer * SHARE * shape.kv_heads) for layer in range(shape.layers)]
        whole, edges = work.longest // self.size + 1, config.pages.sink + config.pages.window
        self.layers = [(self._heads(full, whole, device), self._heads(shape.kv_heads - full, min(edges, whole), device)) for full in heads]

    def _heads(self, heads: int, slots: int, device: str) -> tuple[torch.Tensor, torch.Tensor, Reads] | None:
        """Keys and values of so many kv heads with so many slots a row, and what is read: all of them."""
        if not heads:
            return None
        rows, size, dim = self.work.batch + 1, self.size, self.pools.shape.head_dim
        kv = [torch.randn(rows * slots, size, heads, dim, dtype=self.pools.dtype, device=device) for _ in range(2)]
        frames = torch.arange(rows * slots, dtype=torch.int32, device=device).view(rows, slots)
        pages = frames[0].expand(self.work.batch, heads, slots).contiguous()
        return *kv, Reads(frames[self.work.requests.rows, None].expand_as(pages).contiguous(), pages, None)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        requests, group, first, parts = self.work.requests, self.pools.shape.group, 0, []
        for kind in self.layers[layer]:
            if kind is None:
                continue
            keys, values, reads = kind
            heads, slots = reads.frames.shape[1:]
            here = slice(first, first + heads)
            where = requests.rows * (slots * self.size) + requests.seq_lens % (slots * self.size)
            for cache, new in ((keys, k), (values, v)):
                cache.flatten(0, 1)[where] = new[:, here]
            mine = q[:, first * group : (first + heads) * group]
            parts.append(kernels.attend_pages(mine, keys, values, requests.seq_lens, reads, self.scale))
            first += heads
        return torch.cat(parts, 1)

    def complete(self) -> None:
        return

    def begin(self) -> None:
        return

    def traffic(self, steps: int) -> Traffic:
        shape, edges = self.pools.shape, self.pools.config.sink_tokens + self.pools.config.window_tokens
        tokens = SHARE * self.work.context + (1 - SHARE) * min(edges, self.work.context)
        return Traffic(0, self.work.elements(2 * shape.head_dim * tokens))
