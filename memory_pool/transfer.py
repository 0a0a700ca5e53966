# SPDX-License-Identifier: Apache-2.0
"""Transfer streams: work beside the computation, whose results are used only behind its handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch


class Handle(Protocol):
    """Work in flight. Its results may be used only behind ``wait``."""

    def wait(self) -> None:
        """Order all later work of the current stream behind this work."""


class TransferStream(Protocol):
    """A queue of work beside the computation, first in, first out."""

    def submit(self, work: Callable[[], None], behind: Sequence[Handle] | None = None) -> Handle:
        """Queue ``work`` behind all work that the current stream was given so far, or only behind the handles in ``behind``."""

    def mark(self) -> Handle:
        """A handle of all work that the current stream was given so far."""


class _Done:
    def wait(self) -> None:
        return


class InlineStream:
    """Runs work at once, on the thread that submits it: the stream of a CPU."""

    def submit(self, work: Callable[[], None], behind: Sequence[Handle] | None = None) -> Handle:
        work()
        return _Done()

    def mark(self) -> Handle:
        return _Done()


class _CudaHandle:
    def __init__(self, event: torch.cuda.Event, device: int, work: Callable[[], None] | None = None) -> None:
        self.event, self.device = event, device
        self.work = work  # keeps the tensors of the work alive until the current stream is ordered after it

    def wait(self) -> None:
        self.event.wait(torch.cuda.current_stream(self.device))


class CudaStream:
    """A side stream of the device. CUDA events order it and the submitting stream."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)
        # PyTorch is always told the number of the device: to look it up takes longer than all else that a submission does. Its context
        # manager for streams looks it up as well.
        self.device = self.stream.device_index

    def submit(self, work: Callable[[], None], behind: Sequence[Handle] | None = None) -> Handle:
        current = torch.cuda.current_stream(self.device)
        if behind is None:
            self.stream.wait_stream(current)
        torch.cuda.set_stream(self.stream)
        try:
            for handle in behind or ():
                handle.wait()
            work()
        finally:
            torch.cuda.set_stream(current)
        return _CudaHandle(self.stream.record_event(), self.device, work)

    def mark(self) -> Handle:
        return _CudaHandle(torch.cuda.current_stream(self.device).record_event(), self.device)


class Streams(NamedTuple):
    """The side streams of a retrieval engine.

    Args:
        selection: scores, plans, the corrections' recalls and the attention to what they brought; digests and seeding of short extends.
        appends: new tokens, and the digest and the offload of a page that one of them fills.
        transfers: recalls ahead, and the offload and the staging of an extend.
    """

    selection: TransferStream
    appends: TransferStream
    transfers: TransferStream

    @classmethod
    def make(cls, device: str) -> Streams:
        """CUDA streams on a GPU. Elsewhere work is done at once."""
        return cls(*(CudaStream(device) if torch.device(device).type == "cuda" else InlineStream() for _ in cls._fields))
