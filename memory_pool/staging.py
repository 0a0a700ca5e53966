# SPDX-License-Identifier: Apache-2.0
"""Where the contexts of an extend lie on the device: in staging buffers, or in frames of the device cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import Prefixes, StagedPages
from sglang_freekv.kernels import StagedLayers
from sglang_freekv.kernels.kv import KV, Scales
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.device_cache import DeviceCache
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.prefix_stream import PrefixStream
from sglang_freekv.memory_pool.transfer import Handle, TransferStream


class Staging(PrefixStream):
    """Two staging buffers, one for the layer that is computed and one for the layer whose prefixes arrive.

    A staging buffer holds ``[prefix | new]`` of every request of a batch in token rows (NHD). The transfer stream orders its reuse: the
    offload of layer l is queued before the staging of layer l + 2.

    Args:
        host: pool that the prefixes come from.
        tokens: token rows of a staging buffer, for all contexts of a batch together.
        kv_shape: ``(H, D)``.
        format, device: of the staging buffers, which hold KV as it is stored.
        stream: stream of the copies.
        canary: examines the units that arrive, unless None.
    """

    layers_share_rows = True

    def __init__(
        self,
        host: HostPool,
        tokens: int,
        kv_shape: tuple[int, int],
        format: KVFormat,
        device: str,
        stream: TransferStream,
        canary: Canary | None = None,
    ) -> None:
        super().__init__(host, stream, canary)
        self.tokens, self.context_tokens = tokens, 0
        self.buffers = [torch.empty((2, tokens, *kv_shape), dtype=format.storage, device=device) for _ in range(2)]
        self.scales: list[Scales] = []  # of both buffers, [tokens, H] each; none if KV has no scales
        if format.scales is not None:  # in tensors of their own, aligned as those of frames are: kernels are compiled for that once
            kinds = [[torch.empty((tokens, kv_shape[0]), dtype=format.scales, device=device) for _ in range(2)] for _ in range(2)]
            self.scales = [Scales(*each) for each in kinds]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.buffers, *chain(*self.scales)))

    def token_rows(self, layer: int) -> KV:
        return self._first_rows(self.context_tokens, layer % 2)

    def _first_rows(self, tokens: int, buffer: int) -> KV:
        """The first ``tokens`` token rows of a staging buffer."""
        keys, values = self.buffers[buffer][:, :tokens]
        return KV(keys, values, Scales(*(each[:tokens] for each in self.scales[buffer])) if self.scales else None)

    def first_layers(self) -> Iterable[range]:
        return (range(layer, layer + 1) for layer in range(min(2, len(self.host.layers))))

    def next_layers(self, layer: int) -> Iterable[range]:
        return (range(layer + 1, layer + 2),) if 0 < layer < len(self.host.layers) - 1 else ()

    def begin(self, context_tokens: int, prefixes: Prefixes, behind: Sequence[Handle] | None = None) -> None:
        """Begin a batch whose contexts have ``context_tokens`` together. The other arguments are as of ``stream_prefixes``.

        Raises:
            RuntimeError: the contexts do not fit a staging buffer.
        """
        if context_tokens > self.tokens:
            raise RuntimeError(
                f"an extend batch has {context_tokens} tokens of context, expected at most the {self.tokens} of a staging buffer"
            )
        self.context_tokens = context_tokens
        self.stream_prefixes(prefixes, behind)

    def sweep(self, host_pages: torch.Tensor) -> None:
        """Have the canary examine all units of ``host_pages [N]``, at most a staging buffer full. Nothing may be in flight."""
        kv, size = self._first_rows(self.tokens, 0), self.canary.page_size
        starts = torch.arange(len(host_pages), device=host_pages.device) * size
        for layer, pages in enumerate(self.host.layers):
            kernels.stage_pages(pages, host_pages, starts, kv.keys, kv.values, **self.host.scales_with(layer, kv.scales))
            self.canary.verify_staged(layer, host_pages, starts, kv, every=1)


class InPlace(PrefixStream):
    """The frames of the device cache: absent pages of a prefix are streamed there, resident ones stay where they are.

    Args:
        cache: whose frames.
        host, stream, canary: as of ``Staging``.
    """

    def __init__(self, cache: DeviceCache, host: HostPool, stream: TransferStream, canary: Canary | None = None) -> None:
        super().__init__(host, stream, canary)
        self.cache = cache
        keys, values, scales = zip(*(layer.token_rows for layer in cache.layers))
        with_scales = {"host_scales": host.scales, "scales": scales} if host.scales else {}
        self.layers = StagedLayers.of(host.layers, keys, values, **with_scales)

    def token_rows(self, layer: int) -> KV:
        return self.cache.layers[layer].token_rows

    def first_layers(self) -> Iterable[range]:
        """All layers, because each has its own frames. Every range has twice the layers of the last, so that few submissions suffice."""
        first, number = 0, len(self.host.layers)
        while first < number:
            yield range(first, min(2 * first + 1, number))
            first = 2 * first + 1

    def next_layers(self, layer: int) -> Iterable[range]:
        return ()

    def copy(self, layers: range) -> None:
        host_pages, starts = self.staged
        kernels.stage_layers(self.layers, host_pages, starts, first=layers.start, last=layers.stop)

    def refill(self, page_table: torch.Tensor, given: torch.Tensor) -> None:
        """Copy pages to the frames that they were given, in all layers, on the current stream. Nothing may be in flight.

        Args:
            page_table: ``[B, P]`` logical page -> host page.
            given: ``[B, P]`` frame of each logical page, -1 for a page to leave out.
        """
        host_pages, order = page_table.where(given >= 0, -1).flatten().sort(descending=True)
        self.staged = StagedPages(host_pages, given.flatten()[order].long() * self.cache.page_size)
        layers = range(len(self.host.layers))
        self.copy(layers)
        if self.canary is not None:
            for layer in layers:
                self._verify(layer)
