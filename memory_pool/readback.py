# SPDX-License-Identifier: Apache-2.0
"""Readback: a few numbers of the device that the host reads late, and never waits for."""

from __future__ import annotations

from collections import deque

import torch


class Readback:
    """The latest values of ``source`` that have arrived.

    Args:
        source: ``[N]`` of integers.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self._values = source, [0] * len(source)
        self.arrived = 0  # copies that are complete
        self._copies: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def begin(self) -> None:
        """Copy what ``source`` holds behind all that the current stream was given."""
        if not self.source.is_cuda:
            self._values = self.source.tolist()
            self.arrived += 1
            return
        copy = torch.empty_like(self.source, device="cpu", pin_memory=True)
        copy.copy_(self.source, non_blocking=True)
        self._copies.append((torch.cuda.current_stream(self.source.device.index).record_event(), copy))

    def poll(self) -> list[int]:
        """The values of the last copy that is complete; zeros before the first."""
        while self._copies and self._copies[0][0].query():
            self._values = self._copies.popleft()[1].tolist()
            self.arrived += 1
        return self._values
