# SPDX-License-Identifier: Apache-2.0
"""Staging: the prefixes of an extend batch, streamed from the host pool one layer ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import Prefixes
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
        self.context_tokens = 0
        self.prefixes: Prefixes | None = None
        self.laid_out: Handle | None = None  # keeps what that reads alive
        self.arrived: list[Handle] = []  # of each buffer
        self.examined: list[Handle] = []  # by the canary; nobody waits for it before the pass is over

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def begin(self, context_tokens: int, lay_out: Callable[[], Prefixes], behind: Sequence[Handle] | None = None) -> None:
        """Start on a batch: the prefixes of the first two layers are on their way when this returns.

        Args:
            context_tokens: of the batch, in rows of a buffer.
            lay_out: reads the scheduler's tables, on the transfer stream.
            behind: what the prefixes have to wait for, if not for everything that the current stream was given.

        Raises:
            RuntimeError: contexts that do not fit a buffer together.
        """
        if context_tokens > self.tokens:
            raise RuntimeError(
                f"an extend batch has {context_tokens} tokens of context, expected at most the {self.tokens} of a context buffer"
            )

        def take() -> None:
            self.prefixes = lay_out()

        self.context_tokens = context_tokens
        self.laid_out = self.stream.submit(take, behind)
        self.arrived = [self._stream(layer, behind) for layer in range(min(2, len(self.host.layers)))]

    def context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[context_tokens, H, D]`` of ``layer`` with the prefixes in place; begins the next layer's."""
        self.arrived[layer % 2].wait()
        keys, values = self.buffers[layer % 2]
        if self.canary is not None and len(self.prefixes.pages):
            self.examined.append(self.stream.submit(lambda: self._verify(layer)))
        if 0 < layer < len(self.host.layers) - 1:
            self.arrived[(layer + 1) % 2] = self._stream(layer + 1)
        return keys[: self.context_tokens], values[: self.context_tokens]

    def sweep(self, host_pages: torch.Tensor) -> None:
        """Have the canary examine all units of ``host_pages [N]``, as many as a buffer holds; while nothing is in flight."""
        (keys, values), size = self.buffers[0], self.canary.page_size
        starts = torch.arange(len(host_pages), device=host_pages.device) * size
        for layer, pages in enumerate(self.host.layers):
            kernels.stage_pages(pages, host_pages, starts, keys, values)
            self.canary.verify_staged(layer, host_pages, starts, keys, values, every=1)

    def _stream(self, layer: int, behind: Sequence[Handle] | None = None) -> Handle:
        def stage() -> None:
            kernels.stage_pages(self.host.layers[layer], self.prefixes.pages, self.prefixes.starts, *self.buffers[layer % 2])

        return self.stream.submit(stage, behind)

    def _verify(self, layer: int) -> None:
        self.canary.verify_staged(layer, self.prefixes.pages, self.prefixes.starts, *self.buffers[layer % 2])

    def complete(self) -> None:
        """Wait for what the canary examines."""
        for handle in self.examined:
            handle.wait()
        self.examined.clear()
