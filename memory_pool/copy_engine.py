# SPDX-License-Identifier: Apache-2.0
"""CopyEngineRecall: the paper's streamed recall, through the copy engine and two buffers on the device."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sglang_freekv.kernels import Misses
from sglang_freekv.kernels.kv import FLOAT_CODES


class CopyEngineRecall:
    """Recall as in the paper (section 4.3): while one buffer of units is converted from HND to NHD, the other one is being filled.

    The host issues one copy for each unit, so it waits for the list of misses, and no CUDA graph can hold this recall. It exists to be
    compared with the zero-copy recall (benchmarks/results/bench_recall.json).

    Args:
        unit_shape: ``(2, S, D)``.
        dtype, device: of the KV.
        buffer_units: number of units in each of the two buffers.
    """

    def __init__(self, unit_shape: tuple[int, ...], dtype: torch.dtype, device: str, buffer_units: int = 64) -> None:
        self.buffers = [torch.empty((buffer_units, *unit_shape), dtype=_bytes_for(dtype), device=device) for _ in range(2)]
        self.on_gpu = torch.device(device).type == "cuda"
        if self.on_gpu:
            self.copies = torch.cuda.Stream(device)
            self.converted = [torch.cuda.Event() for _ in self.buffers]

    def __call__(
        self, host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int = 0, closely: bool = False
    ) -> None:
        """As ``kernels.recall_pages``; ``programs`` and ``closely`` have no effect."""
        host_pool, keys, values = (tensor.view(_bytes_for(tensor.dtype)) for tensor in (host_pool, keys, values))
        host_pages, heads, frames = (column.long() for column in misses.columns())
        units = list(zip(host_pages.tolist(), heads.tolist()))
        size = len(self.buffers[0])
        for turn, start in enumerate(range(0, len(units), size)):
            part = slice(start, start + size)
            buffer = self._copy(host_pool, units[part], turn % 2)
            keys[frames[part], :, heads[part]] = buffer[:, 0]
            values[frames[part], :, heads[part]] = buffer[:, 1]
            if self.on_gpu:
                self.converted[turn % 2].record()
        misses.clear()

    def _copy(self, host_pool: torch.Tensor, units: list[tuple[int, int]], which: int) -> torch.Tensor:
        """``[N, 2, S, D]``: the units in buffer ``which``, ready for the current stream."""
        buffer = self.buffers[which]
        if self.on_gpu:  # the call before may still convert this buffer, on another stream
            self.copies.wait_event(self.converted[which])
        with torch.cuda.stream(self.copies) if self.on_gpu else nullcontext():
            for target, (page, head) in zip(buffer, units):
                source = host_pool[page, head]
                if source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:  # NHD: the rows of a unit lie apart, so each is a copy of its own
                    for row, piece in zip(target.flatten(0, 1), (token for half in source for token in half)):
                        row.copy_(piece, non_blocking=True)
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.copies)
        return buffer[: len(units)]


def _bytes_for(dtype: torch.dtype) -> torch.dtype:
    """int8 for floats of 8 bits, which PyTorch does not move among indices everywhere; other types as they are."""
    return torch.int8 if dtype in FLOAT_CODES else dtype
