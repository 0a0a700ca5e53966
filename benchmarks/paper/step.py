"""A decode step that is timed: in a CUDA graph if the method allows it, and on a CPU as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.paper.decoder import Decoder
from benchmarks.paper.method import Method, Traffic, Work
from benchmarks.report import summary

WARM_UP, LEAST = 10, 5  # steps of a graph: before those that are timed, and that are timed at least
LIMIT_S = 0.5  # of timing; the authors' recalls take seconds a step


class Step:
    """One decode step of a batch by a method.

    Args:
        method: built for ``work``.
    """

    def __init__(self, decoder: Decoder, work: Work, method: Method) -> None:
        self.decoder, self.work, self.method = decoder, work, method
        shape, pools = decoder.shape, work.pools
        self.hidden = torch.randn(work.batch, shape.hidden, dtype=pools.dtype, device=pools.device)
        self.graph = self._capture() if pools.device == "cuda" and method.captured else None

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def time(self, repeats: int) -> list[float]:
        """Seconds of single steps, one at least; what runs beside the computation is within the step that began it."""
        warm_up, started = 1 if self.graph is None else WARM_UP, time.monotonic()
        for _ in range(warm_up):
            self.run()
        self.method.begin()
        if self.work.pools.device != "cuda":
            return [_seconds(self.run) for _ in range(repeats)]
        torch.cuda.synchronize()
        if self.graph is not None:  # launched long before they end, so that they are counted
            of_one = (time.monotonic() - started) / warm_up
            repeats = min(repeats, max(LEAST, int(LIMIT_S / of_one)))
        events, started = [_now()], time.monotonic()
        while len(events) <= repeats and (self.graph is not None or len(events) == 1 or time.monotonic() - started < LIMIT_S):
            self.run()
            events.append(_now())
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]

    def _step(self) -> None:
        self.work.requests.seq_lens += 1
        self.logits = self.decoder.step(self.hidden, self.method.attend)
        self.method.complete()

    def _capture(self) -> torch.cuda.CUDAGraph:
        side, graph = self.work.pools.side, torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=side):
                self._step()
        except Exception as error:  # a capture that is broken off leaves the allocator unfit for any other
            cause = error.__context__ or error  # of what was launched, before the capture's own end failed for it
            raise SystemExit(f"no step of {type(self.method).__name__} was captured; run the others with --skip: {cause!r}") from error
        return graph


def measured(decoder: Decoder, work: Work, build: Callable[[Work], Method], repeats: int) -> dict:
    """Times, load and traffic of a method's step, as they are recorded; what it took of the device is free again.

    A method that brings something from the host is measured a second time without its copies.
    """
    seconds, traffic = _timed(decoder, work, build, repeats)
    result = {"batch": work.batch, "context": work.context, "corrected": work.corrected, "missed": work.missed}
    result |= {"seconds": seconds, "bytes": traffic._asdict() | {"weights": decoder.shape.weight_bytes(work.pools.dtype.itemsize)}}
    if traffic.link:
        result["without_copies"], _ = _timed(decoder, replace(work, copies=False), build, repeats)
    return result


def _timed(decoder: Decoder, work: Work, build: Callable[[Work], Method], repeats: int) -> tuple[dict[str, float], Traffic]:
    if work.pools.device == "cuda":
        torch.cuda.empty_cache()  # what the last step had
    work.requests.seq_lens.fill_(work.context)
    step = Step(decoder, work, build(work))
    samples = step.time(repeats)
    if not step.logits.isfinite().all():
        raise RuntimeError("the step's logits are not all finite: what was timed is not an attention")
    return summary(samples), step.method.traffic(len(samples))


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
