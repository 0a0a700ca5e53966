"""ArkVale as the FreeKV paper ran it, InfiniGen as its authors' program runs: the host waits for what was selected, and moves it itself.

The methods of the same names have this project's kernels, which read host memory themselves. Here the host is Python, as it is there.
"""

from __future__ import annotations

import torch

from benchmarks.paper.method import Work
from sglang_freekv.kernels import Misses

from .engine import Engine
from .infinigen import InfiniGen


def recall_slices(host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, *others) -> None:
    """A loop over what is missing, with a copy for each unit, whose tokens lie apart (NHD).

    Args:
        host_pool: taken for NHD; it is random in any order.
    """
    pages, heads, _, size, dim = host_pool.shape
    apart = host_pool.view(pages, 2, size, heads, dim)
    host_pages, kv_heads, slots = (column.long() for column in misses.columns())
    brought = torch.empty(len(slots), 2, size, dim, dtype=keys.dtype, device=keys.device)
    for target, page, head in zip(brought, host_pages.tolist(), kv_heads.tolist()):
        target.copy_(apart[page, :, :, head], non_blocking=True)
    keys[slots, :, kv_heads], values[slots, :, kv_heads] = brought.unbind(1)
    misses.clear()


def wait_for(host_pool: torch.Tensor, misses: Misses, *others) -> None:
    """What is left of such a recall without its copies."""
    misses.columns()
    misses.clear()


class ArkValeCopies(Engine):
    """Selects, and recalls by the host's copies, before it attends."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, corrected=1.0, captured=False)
        self.retrieval.recall = self.recall

    def recall(self, host_pool: torch.Tensor, misses: Misses, *others) -> None:
        if misses is self.retrieval.misses_now:  # ahead there is nothing, and the host does not look
            (recall_slices if self.work.copies else wait_for)(host_pool, misses, *others)


class InfiniGenCopies(InfiniGen):
    """The host's processor gathers tokens into pinned memory, from where they are copied in one piece."""

    captured = False

    def prepare(self) -> None:
        shape, on_gpu = self.pools.shape, self.pools.device == "cuda"
        self.gathered = torch.empty(len(self.heads), 2, shape.head_dim, dtype=self.pools.dtype, pin_memory=on_gpu)
        self.copied = torch.cuda.Event() if on_gpu else None

    def bring(self, layer: int, chosen: torch.Tensor) -> None:
        which = (chosen * self.pools.shape.kv_heads + self.heads).cpu()
        if not self.work.copies:
            return
        units = self.pools.host_units(layer, 1).view(-1, *self.gathered.shape[1:])
        if self.copied is not None:
            self.copied.synchronize()  # the last layer's copy has read the buffer
        torch.index_select(units, 0, which, out=self.gathered)
        brought = self.gathered.to(self.heads.device, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        for rows, new in zip(self.pools.store.cache.layers[layer].token_rows.tensors, brought.unbind(1)):
            rows[self.slots, self.heads] = new
