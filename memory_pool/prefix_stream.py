# SPDX-License-Identifier: Apache-2.0
"""PrefixStream: streams the prefixes of an extend batch from the host pool, one layer ahead of the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import Prefixes, StagedPages
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class PrefixStream(ABC):
    """Brings prefixes to token rows on the device, and has the canary examine them. A subclass says which token rows.

    Args:
        host: pool that the prefixes come from.
        stream: stream of the copies.
        canary: examines the units that arrive, unless None.
    """

    def __init__(self, host: HostPool, stream: TransferStream, canary: Canary | None = None) -> None:
        self.host, self.stream, self.canary = host, stream, canary
        self.staged: StagedPages | None = None
        self.looked_up: Handle | None = None  # keeps the tensors alive that the look-up reads
        self.arrived: list[Handle] = []  # of the layer that is computed and of the next one
        self.examined: list[Handle] = []  # by the canary; waited for at the end of the pass only

    @abstractmethod
    def token_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[T, H, D]`` in which the contexts of ``layer`` lie."""

    def stream_prefixes(self, prefixes: Prefixes, behind: Sequence[Handle] | None = None) -> None:
        """Begin a batch: start to stream the prefixes of the first two layers.

        Args:
            prefixes: looked up in their tables on the transfer stream.
            behind: handles that the prefixes wait for. None makes them wait for all work that the current stream was given.
        """

        def look_up() -> None:
            self.staged = prefixes.look_up()

        self.looked_up = self.stream.submit(look_up, behind)
        self.arrived = [self._stream(layer, behind) for layer in range(min(2, len(self.host.layers)))]

    def context(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The token rows of ``layer``, with the prefixes in place. Starts to stream the next layer's."""
        self.arrived[layer % 2].wait()
        if self.canary is not None and len(self.staged.host_pages):
            self.examined.append(self.stream.submit(lambda: self._verify(layer)))
        if 0 < layer < len(self.host.layers) - 1:
            self.arrived[(layer + 1) % 2] = self._stream(layer + 1)
        return self.token_rows(layer)

    def complete(self) -> None:
        """Wait for the canary's examinations."""
        for handle in self.examined:
            handle.wait()
        self.examined.clear()

    def _stream(self, layer: int, behind: Sequence[Handle] | None = None) -> Handle:
        def stage() -> None:
            host_pages, starts = self.staged
            kernels.stage_pages(self.host.layers[layer], host_pages, starts, *self.token_rows(layer))

        return self.stream.submit(stage, behind)

    def _verify(self, layer: int) -> None:
        host_pages, starts = self.staged
        self.canary.verify_staged(layer, host_pages, starts, *self.token_rows(layer))
