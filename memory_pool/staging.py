# SPDX-License-Identifier: Apache-2.0
"""Staging: streams the prefixes of an extend batch from the host pool, one layer ahead of the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import Prefixes, StagedPages
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class Staging:
    """Two staging buffers, one for the layer that is computed and one for the layer whose prefixes arrive.

    A staging buffer holds ``[prefix | new]`` of every request of a batch in token rows (NHD). The transfer stream orders its reuse: the
    offload of layer l is queued before the staging of layer l + 2.

    Args:
        host: pool that the prefixes come from.
        tokens: token rows of a staging buffer, for all contexts of a batch together.
        kv_shape: ``(H, D)``.
        dtype, device: of the staging buffers.
        stream: stream of the copies.
        canary: examines the units that arrive, unless None.
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
        self.context_tokens = 0
        self.staged: StagedPages | None = None
        self.looked_up: Handle | None = None  # keeps the tensors alive that the look-up reads
        self.arrived: list[Handle] = []  # of each staging buffer
        self.examined: list[Handle] = []  # by the canary; waited for at the end of the pass only

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def begin(self, context_tokens: int, prefixes: Prefixes, behind: Sequence[Handle] | None = None) -> None:
        """Begin a batch: start to stream the prefixes of the first two layers.

        Args:
            context_tokens: tokens of all contexts of the batch together.
            prefixes: looked up in the scheduler's table on the transfer stream.
            behind: handles that the prefixes wait for. None makes them wait for all work that the current stream was given.

        Raises:
            RuntimeError: the contexts do not fit a staging buffer.
        """
        if context_tokens > self.tokens:
            raise RuntimeError(
                f"an extend batch has {context_tokens} tokens of context, expected at most the {self.tokens} of a staging buffer"
            )

        def look_up() -> None:
            self.staged = prefixes.look_up()

        self.context_tokens = context_tokens
        self.looked_up = self.stream.submit(look_up, behind)
        self.arrived = [self._stream(layer, behind) for layer in range(min(2, len(self.host.layers)))]

    def context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``layer``, ``[context_tokens, H, D]``, with the prefixes in place. Starts to stream the next layer's."""
        self.arrived[layer % 2].wait()
        keys, values = self.buffers[layer % 2]
        if self.canary is not None and len(self.staged.host_pages):
            self.examined.append(self.stream.submit(lambda: self._verify(layer)))
        if 0 < layer < len(self.host.layers) - 1:
            self.arrived[(layer + 1) % 2] = self._stream(layer + 1)
        return keys[: self.context_tokens], values[: self.context_tokens]

    def sweep(self, host_pages: torch.Tensor) -> None:
        """Have the canary examine all units of ``host_pages [N]``, at most a staging buffer full. Nothing may be in flight."""
        (keys, values), size = self.buffers[0], self.canary.page_size
        starts = torch.arange(len(host_pages), device=host_pages.device) * size
        for layer, pages in enumerate(self.host.layers):
            kernels.stage_pages(pages, host_pages, starts, keys, values)
            self.canary.verify_staged(layer, host_pages, starts, keys, values, every=1)

    def _stream(self, layer: int, behind: Sequence[Handle] | None = None) -> Handle:
        def stage() -> None:
            kernels.stage_pages(self.host.layers[layer], *self.staged, *self.buffers[layer % 2])

        return self.stream.submit(stage, behind)

    def _verify(self, layer: int) -> None:
        self.canary.verify_staged(layer, *self.staged, *self.buffers[layer % 2])

    def complete(self) -> None:
        """Wait for the canary's examinations."""
        for handle in self.examined:
            handle.wait()
        self.examined.clear()
