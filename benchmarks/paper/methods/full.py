"""Full attention on the device, by FlashInfer, as stock SGLang's server attends in these benchmarks; by PyTorch on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.paper.method import Traffic, Work

WORKSPACE_BYTES = 384 << 20  # SGLang's
LEAST_GROUP = 4  # query heads of a kv head, from which on SGLang has FlashInfer use tensor cores


class Full:
    """All tokens of the context, in each step as many: new ones overwrite the last."""

    captured = True

    def __init__(self, work: Work) -> None:
        self.work = work
        shape, pools, size = work.pools.shape, work.pools, work.pools.config.page_size
        self.pages, self.scale = -(-work.context // size), shape.head_dim**-0.5
        sizes = work.batch * self.pages, size, shape.kv_heads, shape.head_dim
        self.layers = [tuple(torch.randn(sizes, dtype=pools.dtype, device=pools.device) for _ in range(2)) for _ in range(shape.layers)]
        self.last = torch.arange(work.batch, device=pools.device) * (self.pages * size) + work.context - 1
        self.attention = self._planned() if pools.device == "cuda" else self._reference

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for cache, new in zip(self.layers[layer], (k, v)):
            cache.flatten(0, 1)[self.last] = new
        return self.attention(q, self.layers[layer])

    def _planned(self) -> Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        work, shape, device = self.work, self.work.pools.shape, self.work.pools.device
        batch, size, dtype = work.batch, work.pools.config.page_size, work.pools.dtype
        begins = torch.arange(batch + 1, dtype=torch.int32, device=device) * self.pages
        pages = torch.arange(batch * self.pages, dtype=torch.int32, device=device)
        in_last = torch.full((batch,), work.context - (self.pages - 1) * size, dtype=torch.int32, device=device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            backend="fa2",
            use_cuda_graph=True,
            use_tensor_cores=shape.group >= LEAST_GROUP,
            paged_kv_indptr_buffer=torch.empty_like(begins),
            paged_kv_indices_buffer=torch.empty_like(pages),
            paged_kv_last_page_len_buffer=torch.empty_like(in_last),
        )
        heads = shape.query_heads, shape.kv_heads, shape.head_dim
        wrapper.plan(begins, pages, in_last, *heads, size, sm_scale=self.scale, q_data_type=dtype, kv_data_type=dtype)
        return wrapper.run

    def _reference(self, q: torch.Tensor, layer: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = (each.view(len(q), -1, *each.shape[2:])[:, : self.work.context].transpose(1, 2) for each in layer)
        attended = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=self.scale, enable_gqa=True)
        return attended.squeeze(2)

    def complete(self) -> None:
        return

    def begin(self) -> None:
        return

    def traffic(self, steps: int) -> Traffic:
        return Traffic(0, self.work.elements(2 * self.work.pools.shape.head_dim * self.work.context))
