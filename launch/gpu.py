# SPDX-License-Identifier: Apache-2.0
"""Gpu: the GPU that a server would use, as CUDA reports it."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch

from sglang_freekv.memory_pool import pinned

WARM_UP, REPEATS = 2, 5


class Gpu:
    """Device 0 of CUDA, if there is one. ``complaint`` is the first warning of torch about CUDA, or None."""

    def __init__(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.present = torch.cuda.is_available()
        self.complaint = next((str(warning.message).splitlines()[0] for warning in said), None)

    @property
    def device(self) -> str:
        return "cuda" if self.present else "cpu"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0)

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(0)

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Free bytes, and all bytes."""
        return torch.cuda.mem_get_info(0)

    @property
    def pci_address(self) -> str:
        """The GPU's name in ``/sys/bus/pci/devices``."""
        found: Any = torch.cuda.get_device_properties(0)  # torch's stubs lack its place on the bus
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def pin(self, num_bytes: int) -> None:
        """Take host memory as the host pool does, page-lock it, and give it back.

        Raises:
            PinError: CUDA does not lock it.
            OSError: the system does not grant it.
        """
        torch.cuda.set_device(0)
        memory = pinned.allocate(num_bytes, huge=True)
        pinned.unpin([pinned.pin(memory)])

    def copy_rates(self, num_bytes: int) -> tuple[float, float]:
        """Bytes per second of copies to the device and to the host, each of ``num_bytes`` of page-locked memory.

        Raises:
            PinError, OSError: as :meth:`pin`.
            RuntimeError: an error of CUDA, for example that the device has no room.
        """
        torch.cuda.set_device(0)
        memory = pinned.allocate(num_bytes, huge=True)
        addresses = [pinned.pin(memory)]
        try:
            host, device = torch.frombuffer(memory, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
            return num_bytes / _seconds(device, host), num_bytes / _seconds(host, device)
        finally:
            pinned.unpin(addresses)


def _seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    """Median time of a copy, by the device's clock."""
    samples = []
    for _ in range(WARM_UP + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(samples[WARM_UP:])
