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
        keys, values: ``[F, S, H, D]``, F frames.
        slot_pages: ``[R, H, C]`` int32 slot table: the logical page in each slot, -1 for an empty one. Kv heads share the frame of a slot,
            but each has a page of its own in it.
        attended: ``[R, H, A]`` int32 pages that the next step attends to, as in ``Tables``.
        row_frames: ``[R, C]`` int32 frame of each slot; one table for all layers.
        previous_queries: ``[R, Hq, D]`` post-RoPE queries of the last step.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_pages: torch.Tensor
    attended: torch.Tensor
    row_frames: torch.Tensor
    previous_queries: torch.Tensor

    @property
    def token_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as ``[F * S, H, D]``."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)

    @property
    def tables(self) -> Tables:
        return Tables(self.slot_pages, self.attended, self.row_frames)


class Slots(NamedTuple):
    """R rows, the padding row included; C slots of a row; A pages that one step attends to at most; frames for resident pages."""

    rows: int
    per_row: int
    attended: int
    resident: int = 0


class DeviceCache:
    """Frames, slot tables and previous queries of every row, for all retrieval layers.

    A row is the place of one running request, and its number is SGLang's ``req_pool_idx``. Row 0 is padding. The first R * C frames are
    slots of the rows, the others are for resident pages.

    Args:
        shape: KV of this rank.
        page_size: S.
        slots: how many rows, slots and frames.
        device: of all tensors.
    """

    def __init__(self, shape: KVShape, page_size: int, slots: Slots, device: str) -> None:
        self.num_rows, self.num_slots, self.num_attended, self.num_resident = num_rows, num_slots, num_attended, num_resident = slots
        self.page_size, self.num_kv_heads, dim = page_size, shape.kv_heads, shape.head_dim
        storage, compute, _ = shape.format

        self.row_frames = torch.arange(num_rows * num_slots, dtype=torch.int32, device=device).view(num_rows, num_slots)

        def pages() -> torch.Tensor:
            return torch.zeros((num_rows * num_slots + num_resident, page_size, shape.kv_heads, dim), dtype=storage, device=device)

        def table(width: int) -> torch.Tensor:
            return torch.full((num_rows, self.num_kv_heads, width), -1, dtype=torch.int32, device=device)

        self.layers = [
            LayerCache(
                keys=pages(),
                values=pages(),
                slot_pages=table(num_slots),
                attended=table(num_attended),
                row_frames=self.row_frames,
                previous_queries=torch.zeros(num_rows, shape.query_heads, dim, dtype=compute, device=device),
            )
            for _ in range(shape.retrieval_layers)
        ]

    @property
    def num_bytes(self) -> int:
        own = (tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not self.row_frames)
        return self.row_frames.nbytes + sum(tensor.nbytes for tensor in own)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the frames for resident pages."""
        return sum(
            keys_or_values[self.row_frames.numel() :].nbytes for layer in self.layers for keys_or_values in (layer.keys, layer.values)
        )

    def check_integrity(self) -> None:
        """Check the tables of all rows.

        Raises:
            RuntimeError: a kv head has a page in two slots, attends to a page twice or to an empty slot. Or the kv heads of a row attend
                to different numbers of pages.
        """
        for index, layer in enumerate(self.layers):
            listed = layer.attended[1:]
            pages = layer.tables.pages(torch.arange(1, self.num_rows, device=listed.device))
            count = (listed != -1).sum(-1)
            faults = {
                "a page twice": _repeats(layer.slot_pages[1:]),
                "an empty slot attended to": ((listed >= 0) & (pages < 0)).any(-1),
                "a page attended to twice": _repeats(pages),
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
