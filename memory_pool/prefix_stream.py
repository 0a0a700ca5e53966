# SPDX-License-Identifier: Apache-2.0
"""PrefixStream: streams the prefixes of an extend batch from the host pool, ahead of the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from sglang_freekv import kernels
from sglang_freekv.batch import Prefixes, StagedPages
from sglang_freekv.kernels.kv import KV
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

    layers_share_rows = False  # a layer then waits for the stream though no prefix is streamed: an earlier layer may still be read there

    def __init__(self, host: HostPool, stream: TransferStream, canary: Canary | None = None) -> None:
        self.host, self.stream, self.canary = host, stream, canary
        self.staged: StagedPages | None = None
        self.looked_up: Handle | None = None  # keeps the tensors alive that the look-up reads
        self.streams_any = False  # whether layers of this batch wait for the stream
        self.arrived: dict[int, Handle] = {}  # what is under way, by the first layer that waits for it
        self.examined: list[Handle] = []  # by the canary; waited for at the end of the pass only

    @abstractmethod
    def token_rows(self, layer: int) -> KV:
        """Keys and values ``[T, H, D]``, and their scales, in which the contexts of ``layer`` lie."""

    @abstractmethod
    def first_layers(self) -> Iterable[range]:
        """Layers that are streamed when a batch begins: each range is submitted at once, and arrives at once."""

    @abstractmethod
    def next_layers(self, layer: int) -> Iterable[range]:
        """Layers whose streaming starts when ``layer`` begins."""

    def stream_prefixes(self, prefixes: Prefixes, behind: Sequence[Handle] | None = None) -> None:
        """Begin a batch: start to stream the prefixes of the first layers.

        Args:
            prefixes: looked up in their tables on the transfer stream.
            behind: handles that the prefixes wait for. None makes them wait for all work that the current stream was given.
        """

        def look_up() -> None:
            self.staged = prefixes.look_up()

        self.arrived = {}
        self.streams_any = self.layers_share_rows or len(prefixes) > 0
        if self.streams_any:
            self.looked_up = self.stream.submit(look_up, behind)
            self.arrived = {layers[0]: self._stream(layers, behind) for layers in self.first_layers()}

    def context(self, layer: int) -> KV:
        """The token rows of ``layer``, with the prefixes in place. Starts to stream the layers for which there is room then."""
        if self.streams_any:
            if layer in self.arrived:
                self.arrived.pop(layer).wait()
            if self.canary is not None and len(self.staged.host_pages):
                self.examined.append(self.stream.submit(lambda: self._verify(layer)))
            self.arrived |= {layers[0]: self._stream(layers) for layers in self.next_layers(layer)}
        return self.token_rows(layer)

    def complete(self) -> None:
        """Wait for the canary's examinations."""
        for handle in self.examined:
            handle.wait()
        self.examined.clear()

    def _stream(self, layers: range, behind: Sequence[Handle] | None = None) -> Handle:
        """Stream the prefixes of ``layers``. The first of them waits for all."""

        return self.stream.submit(lambda: self.copy(layers), behind)

    def copy(self, layers: range) -> None:
        """Copy the pages that were looked up, in each of ``layers``, on the current stream."""
        for layer in layers:
            (host_pages, starts), kv = self.staged, self.token_rows(layer)
            with_scales = self.host.scales_with(layer, kv.scales)
            kernels.stage_pages(self.host.layers[layer], host_pages, starts, kv.keys, kv.values, **with_scales)

    def _verify(self, layer: int) -> None:
        host_pages, starts = self.staged
        self.canary.verify_staged(layer, host_pages, starts, self.token_rows(layer))
