# SPDX-License-Identifier: Apache-2.0
"""Pinned memory: anonymous memory that CUDA has page-locked in place, to the byte."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from sglang_freekv.config import GIB

MBIND = {"x86_64": 237, "aarch64": 235}  # its number among the system calls, which C's library has no name for
MPOL_LOCAL = 4
GULP_BYTES = 64 << 20  # a few hundredths of a second


class PinError(RuntimeError):
    """CUDA did not page-lock memory that the system had given."""


def allocate(num_bytes: int, huge: bool) -> mmap.mmap:
    """Zeros, which take memory as they are first written to.

    Args:
        num_bytes: above 0.
        huge: take it in huge pages: four times faster to fill here, and fewer pages to lock. It takes more where little is written.

    Raises:
        OSError: the system does not promise so much.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    _let_spill(memory)
    return memory


def _let_spill(memory: mmap.mmap) -> None:
    """Have ``memory`` taken from other NUMA nodes when that of the processor is full. SGLang binds its schedulers to one node, where a host
    pool sized for the machine would have the kernel end them. A kernel that cannot do this cannot have bound them either."""
    if (number := MBIND.get(platform.machine())) is not None:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), MPOL_LOCAL, None, 0, 0)


def pin(memory: mmap.mmap, look: Callable[[], None] = lambda: None) -> int:
    """Fill ``memory`` and page-lock it for the current device, without the interpreter lock; its address, for :func:`unpin`.

    Args:
        look: called before each gulp of memory is taken; what it raises ends that.

    Raises:
        PinError: with CUDA's reason.
    """
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy what is pinned, all of it
    content = np.frombuffer(memory, dtype=np.uint8)
    for start in range(0, len(content), GULP_BYTES):
        look()
        content[start : start + GULP_BYTES : mmap.PAGESIZE] = 0  # a write per page: CUDA would have them filled one after the other
    address, cudart = content.ctypes.data, _cudart()
    status = cudart.cudaHostRegister(address, content.nbytes, 0)
    if int(status) != 0:
        raise PinError(f"cudaHostRegister of {content.nbytes / GIB:.1f} GiB: {cudart.cudaGetErrorString(status)}")
    return address


def unpin(addresses: list[int]) -> None:
    """Unlock and forget what :func:`pin` returned, in silence: at exit CUDA may be gone, and the locks with it."""
    while addresses:
        address = addresses.pop()
        with suppress(RuntimeError):
            _cudart().cudaHostUnregister(address)


def _cudart():
    return torch.cuda.cudart()
