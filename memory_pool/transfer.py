"""Transfer streams: work that overlaps the computation, consumed only through its handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Handle(Protocol):
    """Work in flight. Its results may be used after ``wait``, and only then."""

    def wait(self) -> None:
        """Order everything submitted to the current stream from now on after the work."""


class TransferStream(Protocol):
    """A queue of work beside the computation, executed in the order of submission."""

    def submit(self, work: Callable[[], None]) -> Handle:
        """Queue ``work``, ordered after everything the current stream was given so far."""


class _Done:
    def wait(self) -> None:
        return


class InlineStream:
    """Runs the work at once: a CPU has no copy engine to overlap with."""

    def submit(self, work: Callable[[], None]) -> Handle:
        work()
        return _Done()


class _CudaHandle:
    def __init__(self, event: torch.cuda.Event, work: Callable[[], None]) -> None:
        self.event = event
        self.work = work  # keeps the tensors of the work alive until the current stream is ordered after it

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class CudaStream:
    """A side stream of the device; edges in both directions are CUDA events."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> Handle:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            event = torch.cuda.Event()
            event.record(self.stream)
        return _CudaHandle(event, work)


def make_stream(device: str) -> TransferStream:
    return CudaStream(device) if torch.device(device).type == "cuda" else InlineStream()
