# SPDX-License-Identifier: Apache-2.0
"""RecallClock: times recall on the device, and the computation's waits for it, in a sample of the decode steps."""

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
    """The stamps that the kernels of a decode step write, and the sums of these over all sampled steps. All are on the device.

    Args:
        num_layers: retrieval layers.
        every: one decode step in ``every`` is sampled, beginning with the first.
        device: of the stamps and sums.
    """

    def __init__(self, num_layers: int, every: int, device: torch.device) -> None:
        self.every = every
        self.stamps = torch.zeros(num_layers + 1, len(KINDS), PLACES, dtype=torch.int64, device=device)
        self.stamps[..., SAMPLED] = 1
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)

    def stamp(self, layer: int, kind: int) -> torch.Tensor:
        """The stamp ``[4]`` int64 that the kernel of ``kind`` in ``layer`` writes; ``kind`` is one of ``KINDS``."""
        return self.stamps[layer, kind]

    def computed(self) -> None:
        """Write down the end of a step's computation. Call it behind the last layer, before the step waits for its recalls."""
        kernels.write_stamp(self.stamps[-1, ATTENTION])

    def settle(self, rows: torch.Tensor) -> None:
        """Add up the stamps of a step of ``rows [B]``, and decide whether the next step is sampled. Call it behind all recalls."""
        kernels.settle_stamps(self.stamps, rows, self.totals, self.every)

    def snapshot(self) -> torch.Tensor:
        """``[3]`` int64 sums so far, in the order of ``RecallTimes``; a copy."""
        return self.totals[:3].clone()
