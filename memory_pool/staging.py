"""Staging: the prefixes of an extend batch, streamed from the host pool one layer ahead of the computation."""

from __future__ import annotations

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import ExtendBatch
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class Staging:
    """Two context buffers, ``[prefix | new]`` of every request in token rows (NHD): one is computed on, one is being filled.

    The transfer stream orders their reuse: the offload of layer l is queued before the staging of layer l + 2.

    Args:
        host: what is streamed.
        tokens: rows of a buffer, the longest context of a batch.
        kv_shape: ``(H, D)``.
        stream: where it is streamed.
        canary: examines what arrives.
    """

    def __init__(
        self,
        host: HostPool,
        tokens: int,
        kv_shape: tuple[int, int],
        dtype: torch.dtype,
        device: str,
        stream: TransferStream,
        canary: Canary | None = None,
    ) -> None:
        self.host, self.tokens, self.stream, self.canary = host, tokens, stream, canary
        self.buffers = [torch.empty((2, tokens, *kv_shape), dtype=dtype, device=device) for _ in range(2)]
        self.batch: ExtendBatch | None = None
        self.in_flight: Handle | None = None
        self.examined: list[Handle] = []  # by the canary; nobody waits for it before the pass is over

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def begin(self, batch: ExtendBatch) -> None:
        """Start on ``batch``: its first layer's prefixes are on their way when this returns.

        Raises:
            RuntimeError: contexts that do not fit a buffer together.
        """
        if (tokens := sum(batch.key_lens)) > self.tokens:
            raise RuntimeError(f"an extend batch has {tokens} tokens of context, expected at most the {self.tokens} of a context buffer")
        self.batch = batch
        self._stream(0)

    def context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[sum(key_lens), H, D]`` of ``layer`` with the prefixes in place; begins the next layer's."""
        self.in_flight.wait()
        if layer + 1 < len(self.host.layers):
            self._stream(layer + 1)
        keys, values = self.buffers[layer % 2]
        tokens = sum(self.batch.key_lens)
        return keys[:tokens], values[:tokens]

    def sweep(self, host_pages: torch.Tensor) -> None:
        """Have the canary examine all units of ``host_pages [N]``, as many as a buffer holds; while nothing is in flight."""
        (keys, values), size = self.buffers[0], self.canary.page_size
        starts = torch.arange(len(host_pages), device=host_pages.device) * size
        for layer, pages in enumerate(self.host.layers):
            kernels.stage_pages(pages, host_pages, starts, keys, values)
            self.canary.verify_staged(layer, host_pages, starts, keys, values, every=1)

    def _stream(self, layer: int) -> None:
        batch, pages, (keys, values) = self.batch, self.host.layers[layer], self.buffers[layer % 2]

        def verify() -> None:
            self.canary.verify_staged(layer, batch.prefix_pages, batch.prefix_starts, keys, values)

        self.in_flight = self.stream.submit(
            lambda: kernels.stage_pages(pages, batch.prefix_pages, batch.prefix_starts, keys, values)
        )
        if self.canary is not None and len(batch.prefix_pages):
            self.examined.append(self.stream.submit(verify))

    def complete(self) -> None:
        """Wait for what the canary examines."""
        for handle in self.examined:
            handle.wait()
        self.examined.clear()
