# SPDX-License-Identifier: Apache-2.0
"""Misses: the units that a plan wants from the host pool, as a list on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Misses:
    """A list of missing units: plans fill it, ``recall_pages`` empties it.

    Args:
        length: ``[4]`` int32: units in the list, finished programs of a running recall, units of the last recall, recalls so far.
        host_pages, heads, frames: ``[M]`` int32: each unit's host page, its kv head, and the frame that receives it.
    """

    length: torch.Tensor
    host_pages: torch.Tensor
    heads: torch.Tensor
    frames: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, device: torch.device | str) -> Misses:
        """An empty list for up to ``capacity`` units."""
        return cls(
            torch.zeros(4, dtype=torch.int32, device=device),
            *(torch.zeros(capacity, dtype=torch.int32, device=device) for _ in range(3)),
        )

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Host pages, kv heads and frames of the units in the list, ``[N]`` int32 each; waits for the device."""
        count = int(self.length[0])
        return self.host_pages[:count], self.heads[:count], self.frames[:count]

    def extend(self, host_pages: torch.Tensor, heads: torch.Tensor, frames: torch.Tensor) -> None:
        """Add units, ``[N]`` each, to the end of the list; waits for the device."""
        start = int(self.length[0])
        end = start + len(host_pages)
        self.host_pages[start:end], self.heads[start:end], self.frames[start:end] = host_pages, heads, frames
        self.length[0] = end

    def clear(self) -> None:
        """Empty the list and count one recall."""
        self.length[2] = self.length[0]
        self.length[3] += 1
        self.length[:2] = 0

    @property
    def recalled(self) -> torch.Tensor:
        """``[2]`` int32: the units of the last recall, and the number of recalls. The next plan overwrites the units' columns."""
        return self.length[2:]
