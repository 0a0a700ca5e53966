# SPDX-License-Identifier: Apache-2.0
"""Canary: a checksum of every unit in the host pool, and the units that no longer match theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels import Misses, Units
from sglang_freekv.kernels.kv import KV

UNSEALED = -1  # the mark of a page that was never written: its zeros have the checksum 0, so reading one is a fault
MOST_FAULTS = 256  # places of the ring


@dataclass(frozen=True)
class Fault:
    """A unit that changed in host memory after it was written: where it belongs, its two checksums, and whether it waits since an idle
    server of several ranks found it."""

    layer: int
    host_page: int
    head: int
    found: int
    expected: int
    swept: bool = False

    @property
    def unit(self) -> tuple[int, int, int]:
        return self.layer, self.host_page, self.head


class Canary:
    """Checksums of the pages of all retrieval layers, on the device, and a ring of faults.

    Args:
        num_layers: number of retrieval layers.
        num_pages, num_heads, page_size: shape of the host pool: pages, kv heads and tokens of a page.
        every: one in ``every`` recalled or staged units is compared with its checksum.
        device: device from which KV is offloaded and to which it is recalled.
    """

    def __init__(self, num_layers: int, num_pages: int, num_heads: int, page_size: int, every: int, device: str) -> None:
        self.page_size, self.every = page_size, every
        shape = (num_pages, num_heads)
        self.checksums = [torch.full(shape, UNSEALED, dtype=torch.int32, device=device) for _ in range(num_layers)]
        self.faults = torch.zeros(1 + MOST_FAULTS, 5, dtype=torch.int32, device=device)
        self.heads = torch.arange(num_heads, dtype=torch.int32, device=device)
        self.staged = 0

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.checksums)

    def seal(self, layer: int, kv: KV, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Write the checksums of the units that ``kernels.offload_pages`` with these arguments writes to the host pool."""
        sums = self.checksums[layer]
        kernels.checksum_pages(kv.keys, kv.values, starts, host_pages, sums, self.page_size, scales=kv.scales)

    def verify_recalled(self, layer: int, misses: Misses, frames: KV) -> None:
        """Examine the units that the last recall of ``misses`` brought to ``frames``, ``[F, S, H, D]``."""
        units = Units(misses.frames, self.page_size, misses.heads, misses.host_pages, misses.recalled)
        self._verify(layer, frames.token_rows, units, self.every)

    def verify_staged(self, layer: int, host_pages: torch.Tensor, starts: torch.Tensor, kv: KV, every: int | None = None) -> None:
        """Examine the units that ``kernels.stage_pages`` with these arguments brought: one in ``every``, by default the canary's own."""
        pages, rows = (x.repeat_interleave(len(self.heads)) for x in (host_pages, starts))
        self.staged = (self.staged + 1) & 0x7FFFFFFF  # the units to examine are told by it, in int32
        count = torch.full((2,), self.staged, dtype=torch.int32, device=pages.device)
        count[:1] = (pages >= 0).sum()
        units = Units(rows, 1, self.heads.repeat(len(host_pages)), pages, count)
        self._verify(layer, kv, units, every or self.every)

    def _verify(self, layer: int, kv: KV, units: Units, every: int) -> None:
        where = kv.keys, kv.values, units, self.checksums[layer], self.faults
        kernels.verify_units(*where, every=every, layer=layer, page_size=self.page_size, scales=kv.scales)


class FaultReader:
    """Finds the new faults in each snapshot of a canary's ``faults``."""

    def __init__(self) -> None:
        self.seen = 0

    def read(self, snapshot: torch.Tensor) -> list[Fault]:
        """The faults since the last snapshot that was read.

        Args:
            snapshot: ``[1 + F, 5]`` int32 in host memory, laid out as in ``kernels.reference.verify_units``.

        Raises:
            RuntimeError: there are more new faults than the ring has places.
        """
        total, places = int(snapshot[0, 0]), len(snapshot) - 1
        first, self.seen = self.seen, max(self.seen, total)
        if total - first > places:
            raise RuntimeError(
                f"canary: {total - first} units changed in host memory since the last step, expected at most {places}: this machine's "
                "memory is not to be trusted, or something writes over it; restart the server on another one"
            )
        return [Fault(*snapshot[1 + index % places].tolist()) for index in range(first, total)]
