# SPDX-License-Identifier: Apache-2.0
"""Pinned memory: anonymous memory of an exact size, which CUDA page-locks in place."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from sglang_freekv.config import GIB

MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call, for which the C library has no function
MPOL_LOCAL = 4
GULP_BYTES = 64 << 20  # written in a few hundredths of a second


class PinError(RuntimeError):
    """CUDA refused to page-lock memory that the system had given."""


def allocate(num_bytes: int, huge: bool) -> mmap.mmap:
    """``num_bytes`` zeros. They take memory only when they are first written.

    Args:
        num_bytes: above 0.
        huge: use huge pages, which are faster to fill and fewer to lock. They take more memory where little is written.

    Raises:
        OSError: the system does not grant so much.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    _let_spill(memory)
    return memory


def _let_spill(memory: mmap.mmap) -> None:
    """Let ``memory`` come from other NUMA nodes once the processor's own node is full.

    SGLang binds a scheduler to one node. If the host pool is larger than that node, the kernel would then end the scheduler. A kernel
    without this system call cannot have bound it either.
    """
    if (number := MBIND.get(platform.machine())) is not None:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), MPOL_LOCAL, None, 0, 0)


def pin(memory: mmap.mmap, look: Callable[[], None] = lambda: None) -> int:
    """Fill ``memory`` and page-lock it for the current device. Other threads run meanwhile.

    Args:
        look: called before each GULP_BYTES are written. An exception from it ends the filling.

    Returns:
        The address, for :func:`unpin`.

    Raises:
        PinError: CUDA refused, with its reason.
    """
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all pinned memory
    content = np.frombuffer(memory, dtype=np.uint8)
    for start in range(0, len(content), GULP_BYTES):
        look()
        content[start : start + GULP_BYTES : mmap.PAGESIZE] = 0  # one write a page: CUDA would fill them one by one
    address, cudart = content.ctypes.data, _cudart()
    status = cudart.cudaHostRegister(address, content.nbytes, 0)
    if int(status) != 0:
        raise PinError(f"cudaHostRegister of {content.nbytes / GIB:.1f} GiB: {cudart.cudaGetErrorString(status)}")
    return address


def unpin(addresses: list[int]) -> None:
    """Unlock and remove the addresses that :func:`pin` returned. At exit CUDA and its locks may be gone, which is no error."""
    while addresses:
        address = addresses.pop()
        with suppress(RuntimeError):
            _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
