"""DeviceCache: the fixed budget of pages that each request keeps on the device."""

from __future__ import annotations

import torch

from sglang_freekv import kernels


class DeviceCache:
    """Slots, slot tables and previous queries of every row, for all retrieval layers.

    A row belongs to one running request (SGLang's ``req_pool_idx``; row 0 is padding) and owns slots
    ``row * C .. row * C + C - 1``. The kv heads share a slot's memory but each has its own page in it.

    Args:
        num_layers: retrieval layers.
        num_rows: rows, the padding row included.
        num_slots: C, slots per row.
        kv_shape: ``(S, H, D)`` of one slot.
        num_query_heads: Hq.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_slots: int,
        kv_shape: tuple[int, int, int],
        num_query_heads: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        self.page_size, self.num_kv_heads, head_dim = kv_shape
        layers = range(num_layers)
        self.keys = [torch.zeros((num_rows * num_slots, *kv_shape), dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros_like(self.keys[0]) for _ in layers]
        table = (num_rows, self.num_kv_heads, num_slots)
        self.slot_pages = [torch.full(table, -1, dtype=torch.int32, device=device) for _ in layers]
        self.previous_queries = [torch.zeros(num_rows, num_query_heads, head_dim, dtype=dtype, device=device) for _ in layers]

    @property
    def num_bytes(self) -> int:
        tensors = (*self.keys, *self.values, *self.slot_pages, *self.previous_queries)
        return sum(tensor.nbytes for tensor in tensors)

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, C]`` slots of ``rows [B]``."""
        return rows[:, None] * self.num_slots + torch.arange(self.num_slots, device=rows.device)

    def locate(self, layer: int, rows: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """``[B, H]`` slot in which each kv head of ``rows [B]`` keeps logical page ``pages [B]``; it must be resident."""
        position = (self.slot_pages[layer][rows] == pages[:, None, None]).to(torch.int32).argmax(-1)
        return rows[:, None] * self.num_slots + position

    def append(self, layer: int, rows: torch.Tensor, seq_lens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new token of every row, ``[B, H, D]``, as position ``seq_lens - 1``."""
        position = seq_lens - 1
        slots = self.locate(layer, rows, position // self.page_size)
        kernels.append_tokens(keys, values, slots, position % self.page_size, self.keys[layer], self.values[layer])

    def attend(self, layer: int, queries: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of ``queries [B, Hq, D]`` over the resident pages of ``rows [B]``."""
        return kernels.attend_pages(
            queries, self.keys[layer], self.values[layer], self.slots(rows), self.slot_pages[layer][rows], seq_lens, scale
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError if a kv head holds a page twice, or the kv heads of a row differ in how many they hold."""
        for layer, table in enumerate(self.slot_pages):
            ordered = table.sort(-1).values
            twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1).any(-1)
            held = (table >= 0).sum(-1)
            uneven = (held != held[:, :1]).any(-1)
            for fault, rows in (("a page twice", twice), ("kv heads of different occupancy", uneven)):
                if rows[1:].any():
                    bad = (rows[1:].nonzero().squeeze(1) + 1).tolist()
                    raise RuntimeError(f"device cache, retrieval layer {layer}: {fault} in rows {bad[:8]}, expected none")
