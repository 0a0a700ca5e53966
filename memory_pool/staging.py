"""Staging: the prefixes of an extend batch, streamed from the host pool one layer ahead of the computation."""

from __future__ import annotations

import torch

from sglang_freekv import kernels
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class Staging:
    """Two context buffers, ``[prefix | new]`` of every request in token rows (NHD): one is computed on, one is being filled.

    The transfer stream orders their reuse: the offload of layer l is queued before the staging of layer l + 2.
    """

    def __init__(self, host: HostPool, kv_shape: tuple[int, int], dtype: torch.dtype, device: str, stream: TransferStream) -> None:
        self.host, self.kv_shape, self.dtype, self.device, self.stream = host, kv_shape, dtype, device, stream
        self.buffers: list[torch.Tensor] = []
        self.in_flight: Handle | None = None
        self.batch = None

    def context(self, layer: int, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[sum(key_lens), H, D]`` of ``batch`` with the prefixes in place; begins the next layer's."""
        if batch is not self.batch:
            self.batch, self.in_flight = batch, None  # the handle of the last batch keeps its buffers alive
            shape = (2, sum(batch.key_lens), *self.kv_shape)
            self.buffers = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
            self._begin(layer)
        self.in_flight.wait()
        buffer = self.buffers[layer % 2]
        if layer + 1 < len(self.host.layers):
            self._begin(layer + 1)
        else:
            self.batch, self.buffers = None, []
        return buffer.unbind(0)

    def _begin(self, layer: int) -> None:
        batch, (keys, values) = self.batch, self.buffers[layer % 2]
        pages = self.host.layers[layer]
        self.in_flight = self.stream.submit(
            lambda: kernels.stage_pages(pages, batch.prefix_pages, batch.prefix_starts, keys, values)
        )
