# SPDX-License-Identifier: Apache-2.0
"""RecallClock: how long recall takes on the device, and how long the computation waits for it, in some decode steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels.reference_stamps import ATTENTION, KINDS, PLACES, SAMPLED


class RecallTimes(NamedTuple):
    """Sums over the sampled steps and all layers of one rank."""

    recall_ns: int = 0
    wait_ns: int = 0
    sampled_steps: int = 0

    def as_dict(self) -> dict[str, float]:
        return {
            "recall_seconds": self.recall_ns / 1e9,
            "recall_wait_seconds": self.wait_ns / 1e9,
            "sampled_steps": self.sampled_steps,
        }


class RecallClock:
    """Stamps of one decode step, which its kernels write, and the sums that they come to. All of it is on the device.

    Args:
        num_layers: retrieval layers.
        every: one decode step of so many is sampled, beginning with the first.
    """

    def __init__(self, num_layers: int, every: int, device: torch.device) -> None:
        self.every = every
        self.stamps = torch.zeros(num_layers + 1, len(KINDS), PLACES, dtype=torch.int64, device=device)
        self.stamps[..., SAMPLED] = 1
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)

    def stamp(self, layer: int, kind: int) -> torch.Tensor:
        """``[4]`` int64, for the kernel of that kind."""
        return self.stamps[layer, kind]

    def computed(self) -> None:
        """Behind the computation of a step, before it waits for recalls: write down the time."""
        kernels.write_stamp(self.stamps[-1, ATTENTION])

    def settle(self, rows: torch.Tensor) -> None:
        """Behind all recalls of a step of requests ``rows [B]``: add up, and decide on the next step."""
        kernels.settle_stamps(self.stamps, rows, self.totals, self.every)

    def snapshot(self) -> torch.Tensor:
        """``[3]`` int64, the sums so far in the order of ``RecallTimes``."""
        return self.totals[:3].clone()
