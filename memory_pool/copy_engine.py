# SPDX-License-Identifier: Apache-2.0
"""CopyEngineRecall: the paper's streamed recall, units through the copy engine into two buffers, converted from there."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sglang_freekv.kernels import Misses


class CopyEngineRecall:
    """Recall as in the paper (section 4.3): while one buffer of units is converted HND -> NHD, the next is being copied.

    A host thread issues one copy for each unit, so it waits for the list of misses: no CUDA graph can hold this. It is here to be
    measured against the zero-copy gather.

    Args:
        unit_shape: ``(2, S, D)``.
        buffer_units: units of one of the two buffers.
    """

    def __init__(self, unit_shape: tuple[int, ...], dtype: torch.dtype, device: str, buffer_units: int = 64) -> None:
        self.buffers = [torch.empty((buffer_units, *unit_shape), dtype=dtype, device=device) for _ in range(2)]
        self.on_gpu = torch.device(device).type == "cuda"
        if self.on_gpu:
            self.copies = torch.cuda.Stream(device)
            self.converted = [torch.cuda.Event() for _ in self.buffers]

    def __call__(
        self, host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int = 0, closely: bool = False
    ) -> None:
        """As ``kernels.recall_pages``; no program copies."""
        host_pages, heads, slots = (column.long() for column in misses.columns())
        units = list(zip(host_pages.tolist(), heads.tolist()))
        size = len(self.buffers[0])
        for turn, start in enumerate(range(0, len(units), size)):
            part = slice(start, start + size)
            buffer = self._copy(host_pool, units[part], turn % 2)
            keys[slots[part], :, heads[part]] = buffer[:, 0]
            values[slots[part], :, heads[part]] = buffer[:, 1]
            if self.on_gpu:
                self.converted[turn % 2].record()
        misses.clear()

    def _copy(self, host_pool: torch.Tensor, units: list[tuple[int, int]], which: int) -> torch.Tensor:
        """The units in a buffer, ready on the current stream."""
        buffer = self.buffers[which]
        if self.on_gpu:  # a buffer may still be converted for the call before, on another stream than this one's
            self.copies.wait_event(self.converted[which])
        with torch.cuda.stream(self.copies) if self.on_gpu else nullcontext():
            for target, (page, head) in zip(buffer, units):
                source = host_pool[page, head]
                if source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:  # NHD: the rows of a unit lie apart, and each is a copy of its own
                    for row, piece in zip(target.flatten(0, 1), (token for half in source for token in half)):
                        row.copy_(piece, non_blocking=True)
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.copies)
        return buffer[: len(units)]
