# SPDX-License-Identifier: Apache-2.0
"""Store: all pools of the retrieval layers, built together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_freekv.config import CANARIES, FreeKVConfig
from sglang_freekv.memory_pool.canary import Canary
from sglang_freekv.memory_pool.device_cache import DeviceCache, Slots
from sglang_freekv.memory_pool.digest_pool import DigestPool
from sglang_freekv.memory_pool.frames import Frames
from sglang_freekv.memory_pool.host_pool import HostPool
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.staging import InPlace, Staging
from sglang_freekv.memory_pool.transfer import TransferStream


@dataclass(frozen=True)
class Store:
    """The pools of one rank's retrieval layers. ``canary`` is None with ``--freekv-canary off``."""

    host: HostPool
    digests: DigestPool
    cache: DeviceCache
    frames: Frames
    staging: Staging
    in_place: InPlace
    canary: Canary | None

    @classmethod
    def build(
        cls,
        config: FreeKVConfig,
        shape: KVShape,
        num_tokens: int,
        num_rows: int,
        staging_tokens: int,
        device: str,
        stream: TransferStream,
        *,
        num_frames: int | None = None,
        resident: bool = True,
    ) -> Store:
        """Allocate all pools, with SGLang's padding page and padding row in addition. No row has slots until ``frames`` lends them.

        Args:
            config: sizes, host layout and canary.
            shape: KV of this rank.
            num_tokens: tokens of the host pool.
            num_rows: running requests.
            staging_tokens: tokens of context that one extend batch may have.
            device: of the pools on the GPU.
            stream: stream of the staging copies.
            num_frames: N, frames of the device cache; None for the slots of all rows.
            resident: whether pages may have frames, besides slots.

        Raises:
            RuntimeError: the system does not give the host memory.
        """
        layers, heads, dim, size = shape.retrieval_layers, shape.kv_heads, shape.head_dim, config.page_size
        num_pages = num_tokens // size + 1
        pin = torch.device(device).type != "cpu"
        unit, format = (heads, 2, size, dim), shape.format
        host = HostPool(layers, num_pages, unit, format.storage, pin, config.host_layout, scales=format.scales)
        every = CANARIES[config.canary]
        canary = Canary(layers, num_pages, heads, size, every, device) if every else None
        all_slots = (num_rows + 1) * config.cache_pages
        slots = Slots(num_rows + 1, config.cache_pages, config.attended_pages, all_slots if num_frames is None else num_frames)
        cache = DeviceCache(shape, size, slots, device)
        return cls(
            host=host,
            digests=DigestPool(layers, (num_pages, heads, *shape.digest_shape), format.compute, device),
            cache=cache,
            frames=Frames(cache, num_pages, resident=resident),
            staging=Staging(host, staging_tokens, (heads, dim), format, device, stream, canary),
            in_place=InPlace(cache, host, stream, canary),
            canary=canary,
        )

    @property
    def canary_bytes(self) -> int:
        return 0 if self.canary is None else self.canary.num_bytes

    def checks(self, host_pages: torch.Tensor, policy: Any) -> Iterator[Callable[[], None]]:
        """The checks of the invariants of all pools, in parts. Nothing may be in flight when one is called.

        Args:
            host_pages: ``[N]`` full pages whose digests are compared with their keys. Pages that have changed hands by then are compared,
                too: a page and its digests are replaced together.
            policy: policy that wrote the digests.

        Yields:
            functions that raise RuntimeError for the first invariant that is broken.
        """
        layers = range(len(self.cache.layers))
        yield self.host.check_integrity
        yield from (partial(self.cache.check_layer, layer) for layer in layers)
        yield self.frames.check_integrity
        yield from (partial(self.digests.check_layer, layer, self.host, host_pages, policy) for layer in layers)

    def check_integrity(self, host_pages: torch.Tensor, policy: Any) -> None:
        """All of ``checks``."""
        for check in self.checks(host_pages, policy):
            check()
