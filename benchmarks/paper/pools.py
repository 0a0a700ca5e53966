"""Where the KV of all methods lies: pinned host memory that they share, device memory, and requests whose pages are drawn from it."""

from __future__ import annotations

import torch

from benchmarks.paper.decoder import Shape
from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import digests_of
from sglang_freekv.kernels import Candidates
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.device_cache import LayerCache
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Streams


class Pools:
    """The store of the engine, for up to ``rows`` requests; it is taken once, because pinning takes time.

    Args:
        host_tokens: of each layer's host pool.
    """

    def __init__(self, shape: Shape, config: FreeKVConfig, rows: int, host_tokens: int, dtype: torch.dtype, device: str) -> None:
        self.shape, self.config, self.device, self.dtype = shape, config, device, dtype
        self.host_pages = host_tokens // config.page_size
        digest = digests_of(config).shape(shape.head_dim, dtype.itemsize)
        kv = KVShape(LayerTable.uniform(shape.layers), shape.kv_heads, shape.query_heads, shape.head_dim, digest, KVFormat.plain(dtype))
        self.side = torch.cuda.Stream(device) if device == "cuda" else None  # of what is captured
        # for all methods: a library keeps memory for each stream, and of PyTorch's every 32nd is the same one again
        self.streams = Streams.make(device)
        self.store = Store.build(config, kv, host_tokens - config.page_size, rows, config.page_size, device, self.streams[-1])
        self.store.frames.lend_all()
        for tensor in (*self.store.digests.layers, *(each for layer in self.store.cache.layers for each in (layer.keys, layer.values))):
            tensor.normal_()

    def close(self) -> None:
        """Unpin the host pool, and leave nothing on the device."""
        self.store.host.close()
        del self.store
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def host_units(self, layer: int, tokens: int) -> torch.Tensor:
        """A layer's host memory ``[n, H, 2, tokens, D]`` in units of so many tokens, of the same bytes in another order."""
        return self.store.host.layers[layer].view(-1, self.shape.kv_heads, 2, tokens, self.shape.head_dim)


class Requests:
    """A batch: rows, lengths, and page tables at random."""

    def __init__(self, pools: Pools, batch: int, context: int, longest: int) -> None:
        device, pages = pools.device, longest // pools.config.page_size + 1
        self.rows = torch.arange(1, batch + 1, device=device)
        self.seq_lens = torch.full((batch,), context, device=device)
        self.table = torch.randint(1, pools.host_pages, (batch, pages), dtype=torch.int32, device=device)
        self.frames = torch.full_like(self.table, -1)  # nothing is resident

    @property
    def batch(self) -> DecodeBatch:
        return DecodeBatch(self.rows, self.seq_lens, self.table, self.frames)

    def seed(self, cache: LayerCache, config: FreeKVConfig, logits: torch.Tensor | None = None) -> None:
        """Pages for the first step, by ``logits [B, Hq, P]`` or at random."""
        if logits is None:
            heads = cache.previous_queries.shape[1]
            logits = torch.randn(*self.table.shape[:1], heads, self.table.shape[1], device=self.table.device)
        candidates = Candidates(logits, self.rows, self.seq_lens, self.table, self.frames, config.pages, config.page_size)
        kernels.seed_slots(candidates, cache.tables)
