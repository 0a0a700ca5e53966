# SPDX-License-Identifier: Apache-2.0
"""DeviceCache: the pages that each running request keeps on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_freekv.kernels import Tables
from sglang_freekv.memory_pool.sizing import KVShape


@dataclass(frozen=True)
class LayerCache:
    """The device cache of one layer.

    Args:
        keys, values: ``[R * C, S, H, D]``; row r owns slots ``r * C .. r * C + C - 1``.
        slot_pages: ``[R, H, C]`` int32 slot table: the logical page in each slot, -1 for an empty one. Kv heads share the memory of a slot,
            but each has a page of its own in it.
        attended: ``[R, H, A]`` int32 slots, numbered within the row, of the pages that the next step attends to, then -1.
        previous_queries: ``[R, Hq, D]`` post-RoPE queries of the last step.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_pages: torch.Tensor
    attended: torch.Tensor
    previous_queries: torch.Tensor

    @property
    def token_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as ``[R * C * S, H, D]``."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)

    @property
    def tables(self) -> Tables:
        return Tables(self.slot_pages, self.attended)


class Slots(NamedTuple):
    """R rows, the padding row included; C slots of a row; A pages that one step attends to."""

    rows: int
    per_row: int
    attended: int


class DeviceCache:
    """Slots, slot tables and previous queries of every row, for all retrieval layers.

    A row is the place of one running request, and its number is SGLang's ``req_pool_idx``. Row 0 is padding.

    Args:
        shape: KV of this rank.
        page_size: S.
        slots: how many rows and slots.
        device: of all tensors.
    """

    def __init__(self, shape: KVShape, page_size: int, slots: Slots, device: str) -> None:
        self.num_rows, self.num_slots, self.num_attended = num_rows, num_slots, num_attended = slots
        self.page_size, self.num_kv_heads, dim = page_size, shape.kv_heads, shape.head_dim
        storage, compute, _ = shape.format

        def pages() -> torch.Tensor:
            return torch.zeros((num_rows * num_slots, page_size, shape.kv_heads, dim), dtype=storage, device=device)

        def table(width: int) -> torch.Tensor:
            return torch.full((num_rows, self.num_kv_heads, width), -1, dtype=torch.int32, device=device)

        self.layers = [
            LayerCache(
                keys=pages(),
                values=pages(),
                slot_pages=table(num_slots),
                attended=table(num_attended),
                previous_queries=torch.zeros(num_rows, shape.query_heads, dim, dtype=compute, device=device),
            )
            for _ in range(shape.retrieval_layers)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in vars(layer).values())

    def check_integrity(self) -> None:
        """Check the tables of all rows.

        Raises:
            RuntimeError: a kv head has a page in two slots, lists a slot twice or lists an empty slot. Or the kv heads of a row list
                different numbers of slots.
        """
        for index, layer in enumerate(self.layers):
            listed = layer.attended[1:].long()
            found = layer.slot_pages[1:].gather(2, listed.clamp(min=0))
            count = (listed >= 0).sum(-1)
            faults = {
                "a page twice": _repeats(layer.slot_pages[1:]),
                "a slot attended to twice": _repeats(listed),
                "an empty slot attended to": ((listed >= 0) & (found < 0)).any(-1),
                "kv heads that attend to different numbers of pages": count != count[:, :1],
            }
            for fault, where in faults.items():
                if where.any():
                    bad = (where.any(-1).nonzero().squeeze(1) + 1).tolist()
                    raise RuntimeError(f"device cache, retrieval layer {index}: {fault} in rows {bad[:8]}, expected none")


def _repeats(table: torch.Tensor) -> torch.Tensor:
    """``[R, H]`` bool: whether ``table [R, H, N]`` has a value other than -1 twice."""
    ordered = table.sort(-1).values
    return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
