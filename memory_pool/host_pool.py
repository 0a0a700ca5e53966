# SPDX-License-Identifier: Apache-2.0
"""HostPool: the KV of every full page, in host memory."""

from __future__ import annotations

import logging
import os
import resource
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from math import prod
from mmap import mmap
from typing import Any

import torch

from sglang_freekv.config import GIB
from sglang_freekv.kernels.kv import KV, Scales
from sglang_freekv.memory_pool import host_memory, pinned

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
MAX_THREADS = 16

# the axes of [n_page, H, 2, S, D], outermost in memory first
MEMORY_ORDER = {"hnd": (0, 1, 2, 3, 4), "nhd": (0, 2, 3, 1, 4)}


class HostPool:
    """Pages of all retrieval layers: ``layers`` holds one ``[n_page, H, 2, S, D]`` tensor for each.

    Of coded KV ``scales`` holds one contiguous ``[n_page, H, 2, S]`` tensor for each layer; else it is empty.

    Only SGLang's allocator and radix tree know which pages are free and who owns the others. A page is written whole and once, when its
    last token is known. Page 0 is SGLang's padding page and is never written.

    Args:
        num_layers: number of retrieval layers.
        num_pages: number of pages, the padding page included.
        unit_shape: ``(H, 2, S, D)`` of one page.
        dtype: of keys and values.
        pin: take all memory now and page-lock it, so that the device can read it. Without it, memory is taken as pages are written.
        layout: order of a page in memory: ``"hnd"``, with contiguous units (paper section 4.2), or ``"nhd"``, ``[2, S, H, D]``.
        scales: of the scales of coded KV; None if it has none.

    Raises:
        ValueError: scales in the layout ``"nhd"``.
        RuntimeError: the system does not give the memory. Nothing stays pinned.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        unit_shape: tuple[int, ...],
        dtype: torch.dtype,
        pin: bool,
        layout: str = "hnd",
        *,
        scales: torch.dtype | None = None,
    ) -> None:
        if scales is not None and layout != "hnd":
            raise ValueError(f"host pool: expected the layout hnd for KV with scales, found {layout}")
        self.layers: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._unpin = weakref.finalize(self, pinned.unpin, self._addresses)
        shape = (num_pages, *unit_shape)
        code_bytes = prod(shape) * dtype.itemsize
        layer_bytes = code_bytes + (0 if scales is None else prod(shape[:-1]) * scales.itemsize)
        num_bytes = num_layers * layer_bytes
        memories: list[mmap] = []
        try:
            if pin:
                _require(num_bytes, host_memory.room())
            for _ in range(num_layers):
                memories.append(pinned.allocate(layer_bytes, huge=pin))
            if pin:
                self._pin(memories)
        except Exception as error:
            given = len(self._addresses if pin else memories)
            self.close()
            raise RuntimeError(
                f"--freekv-host-memory: the system gave {given * layer_bytes / GIB:.1f} of {num_bytes / GIB:.1f} GiB of "
                f"{'pinned ' * pin}host memory, for {given} of {num_layers} layers, and then no more ({_cause(error)}); "
                f"{_remedy(error, num_bytes)}"
            ) from error
        self.layers += [_view(memory, shape, MEMORY_ORDER[layout], dtype) for memory in memories]
        if scales is not None:  # behind the codes of their layer
            self.scales += [torch.frombuffer(memory, dtype=scales, offset=code_bytes).view(shape[:-1]) for memory in memories]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.layers, *self.scales))

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, its scales included."""
        return sum(layers[0][0, 0].nbytes for layers in (self.layers, self.scales) if layers)

    def scales_with(self, layer: int, scales: Scales | None) -> dict[str, Any]:
        """Keyword arguments by which a mover copies the scales of ``layer`` along with the codes.

        Args:
            scales: those on the device. Without them there are no arguments.
        """
        return {} if scales is None else {"scales": scales, "host_scales": self.scales[layer]}

    def token_rows(self, layer: int, host_pages: torch.Tensor, device: torch.device) -> KV:
        """A copy of full pages ``host_pages [N]`` on ``device``, as token rows: N * S of them."""

        def rows(pool: torch.Tensor) -> torch.Tensor:
            """``[2, N * S, H, ...]`` of a pool ``[n_page, H, 2, S, ...]``."""
            return pool[host_pages.cpu()].to(device).movedim((2, 3), (0, 2)).flatten(1, 2)

        keys, values = rows(self.layers[layer])
        return KV(keys, values, Scales(*rows(self.scales[layer])) if self.scales else None)

    def check_integrity(self) -> None:
        """Check that no stray store reached the padding page.

        Raises:
            RuntimeError: the padding page is not all zeros.
        """
        for index in range(len(self.layers)):
            written = (layers[index][0].contiguous().view(torch.uint8) for layers in (self.layers, self.scales) if layers)
            if any(each.count_nonzero() for each in written):  # of bytes, because PyTorch counts no floats of 8 bits
                raise RuntimeError(
                    f"host pool, retrieval layer {index}: padding page 0 was written, expected all zeros; restart the server"
                )

    def close(self) -> None:
        """Unpin and drop the layers. A pool is also unpinned when it is collected, and at exit."""
        self._unpin()
        self.layers.clear()
        self.scales.clear()

    def _pin(self, memories: list[mmap]) -> None:
        """Pin the layers in parallel, one in each thread. ``_addresses`` grows by one with each pinned layer."""
        started = time.monotonic()
        threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        workers, device = ThreadPoolExecutor(threads), torch.cuda.current_device()
        look = partial(_look_again, host_memory.resident_bytes() + sum(map(len, memories)))
        try:
            pending = {workers.submit(self._pin_layer, memory, device, look) for memory in memories}
            while pending:
                done, pending = wait(pending, PROGRESS_S, FIRST_EXCEPTION)
                for layer in done:
                    layer.result()
                if pending:
                    count = len(self._addresses)
                    logger.info(f"host pool: {count} of {len(memories)} layers, {count * len(memories[0]) / GIB:.1f} GiB pinned")
        finally:
            workers.shutdown(cancel_futures=True)
        gib, seconds = sum(map(len, memories)) / GIB, time.monotonic() - started
        logger.info(f"host pool: {gib:.1f} GiB pinned in {seconds:.1f} s by {threads} threads")

    def _pin_layer(self, memory: mmap, device: int, look: Callable[[], None]) -> None:
        torch.cuda.set_device(device)  # a new thread starts on device 0 and would make a CUDA context there
        self._addresses.append(pinned.pin(memory, look))


def _view(memory: mmap, shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The beginning of ``memory`` as a tensor of ``shape``. ``order`` lists its axes from the outermost in memory to the innermost."""
    laid_out = torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view([shape[axis] for axis in order])
    return laid_out.permute([order.index(axis) for axis in range(len(order))])


def _require(num_bytes: int, room: host_memory.Room) -> None:
    """Raise MemoryError if ``room`` has fewer than ``num_bytes``."""
    if num_bytes > room.num_bytes:
        raise MemoryError(f"{room.bound} has {room.num_bytes / GIB:.1f} GiB left, for {num_bytes / GIB:.1f}")


def _look_again(goal: int) -> None:
    """Raise MemoryError if this process can no longer grow to ``goal`` resident bytes, because another process took memory meanwhile."""
    room = host_memory.room_to_write()  # read first, or memory that other threads take between the two readings would count twice
    _require(goal - host_memory.resident_bytes(), room)


def _cause(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _remedy(error: Exception, num_bytes: int) -> str:
    """What the user can do about ``error`` so that a pool of ``num_bytes`` fits."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if isinstance(error, pinned.PinError) and limit != resource.RLIM_INFINITY and limit < num_bytes:
        return f"`ulimit -l` is {limit // 1024} KiB, so try `ulimit -l unlimited`, or `--ulimit memlock=-1` of docker"
    room = host_memory.room()
    return f"lower --freekv-host-memory, or {room.remedy} ({room.bound} has {room.num_bytes / GIB:.1f} GiB left)"
