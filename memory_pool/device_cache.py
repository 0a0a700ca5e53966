# SPDX-License-Identifier: Apache-2.0
"""DeviceCache: the frames of a rank, and what each running request attends to there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_freekv.kernels import Tables
from sglang_freekv.kernels.kv import KV, Scales
from sglang_freekv.memory_pool.sizing import KVShape


@dataclass(frozen=True)
class LayerCache:
    """The device cache of one layer.

    Args:
        kv: keys and values ``[F, S, H, D]``, F frames; of coded KV also scales.
        slot_pages: ``[R, H, C]`` int32 slot table: the logical page in each slot, -1 for an empty one. Kv heads share the frame of a slot,
            but each has a page of its own in it.
        attended: ``[R, H, A]`` int32 pages that the next step attends to, as in ``Tables``.
        row_frames: ``[R, C]`` int32 frame of each slot, -1 in a row without slots; one table for all layers.
        previous_queries: ``[R, Hq, D]`` post-RoPE queries of the last step.
    """

    kv: KV
    slot_pages: torch.Tensor
    attended: torch.Tensor
    row_frames: torch.Tensor
    previous_queries: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return self.kv.keys

    @property
    def values(self) -> torch.Tensor:
        return self.kv.values

    @property
    def token_rows(self) -> KV:
        """Keys and values as ``[F * S, H, D]``."""
        return self.kv.token_rows

    @property
    def tables(self) -> Tables:
        return Tables(self.slot_pages, self.attended, self.row_frames)


class Slots(NamedTuple):
    """R rows, the padding row included; C slots of a partial row; A pages that one step attends to at most; N frames."""

    rows: int
    per_row: int
    attended: int
    frames: int


class DeviceCache:
    """Frames, slot tables and previous queries of every row, for all retrieval layers.

    A row is the place of one running request, and its number is SGLang's ``req_pool_idx``. Row 0 is padding, and keeps the first C frames
    as slots. ``Frames`` lends the others.

    Args:
        shape: KV of this rank.
        page_size: S.
        slots: how many rows, slots and frames.
        device: of all tensors.
    """

    def __init__(self, shape: KVShape, page_size: int, slots: Slots, device: str) -> None:
        self.num_rows, self.num_slots, self.num_attended, self.num_frames = num_rows, num_slots, num_attended, num_frames = slots
        self.page_size, self.num_kv_heads, dim = page_size, shape.kv_heads, shape.head_dim
        frames, format = (num_frames, page_size, shape.kv_heads), shape.format

        def pages() -> KV:
            keys, values = (torch.zeros((*frames, dim), dtype=format.storage, device=device) for _ in range(2))
            if format.scales is None:
                return KV(keys, values)
            return KV(keys, values, Scales(*(torch.zeros(frames, dtype=format.scales, device=device) for _ in range(2))))

        def table(*sizes: int) -> torch.Tensor:
            return torch.full(sizes, -1, dtype=torch.int32, device=device)

        self.row_frames = table(num_rows, num_slots)
        self.row_frames[0] = torch.arange(num_slots)
        heads = shape.retrieval_layers, num_rows, self.num_kv_heads
        self.slot_pages, self.attended = table(*heads, num_slots), table(*heads, num_attended)
        self.layers = [
            LayerCache(
                kv=pages(),
                slot_pages=slot_pages,
                attended=attended,
                row_frames=self.row_frames,
                previous_queries=torch.zeros(num_rows, shape.query_heads, dim, dtype=format.compute, device=device),
            )
            for slot_pages, attended in zip(self.slot_pages, self.attended)
        ]

    @property
    def num_bytes(self) -> int:
        of_rows = (tensor for layer in self.layers for tensor in (layer.slot_pages, layer.attended, layer.previous_queries))
        frames = (tensor for layer in self.layers for tensor in layer.kv.tensors)
        return sum(tensor.nbytes for tensor in (self.row_frames, *of_rows, *frames))

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame, in all layers."""
        return sum(held[0].nbytes for layer in self.layers for held in layer.kv.tensors)

    def empty_rows(self, rows: torch.Tensor) -> None:
        """Leave nothing in the slots of ``rows [N]``, which lose them, and nothing to attend to."""
        for table in (self.slot_pages, self.attended):
            table.index_fill_(1, rows, -1)

    def check_layer(self, index: int) -> None:
        """Check the tables of all rows in a layer.

        Raises:
            RuntimeError: a kv head has a page in two slots, attends to a page twice or to an empty slot. Or the kv heads of a row attend
                to different numbers of pages. Or a row without slots has something in them.
        """
        layer, without_slots = self.layers[index], (self.row_frames[1:] < 0).any(-1)[:, None]
        listed = layer.attended[1:]
        pages = layer.tables.pages(torch.arange(1, self.num_rows, device=listed.device))
        count = (listed != -1).sum(-1)
        faults = {
            "a page twice": _repeats(layer.slot_pages[1:]),
            "an empty slot attended to": ((listed >= 0) & (pages < 0)).any(-1),
            "a page attended to twice": _repeats(pages),
            "pages in slots that are not lent": without_slots & ((layer.slot_pages[1:] >= 0).any(-1) | (listed >= 0).any(-1)),
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
