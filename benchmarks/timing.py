"""Time of work on a device: many repeats in one CUDA graph, and the ceilings that it is held against."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.report import summary
from sglang_freekv.config import GIB

WARM_UP = 2


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_graph(launches: Sequence[Callable[[], object]], device: str, repeats: int = 10, least: int = 32) -> dict:
    """Seconds of one launch, over repeats of a graph that holds at least ``least`` launches, in rotation.

    On a CPU the launches run one after the other.
    """
    count = -(-max(least, len(launches)) // len(launches)) * len(launches)

    def run_all() -> None:
        for index in range(count):
            launches[index % len(launches)]()

    if device != "cuda":
        return summary([_wall(run_all, device) / count for _ in range(2)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles, and loads every kernel
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run_all()
    return summary([seconds / count for seconds in time_events(graph.replay, repeats)])


def time_events(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of ``work`` by device events, each repeat on its own."""
    for _ in range(WARM_UP):
        work()
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return samples


def time_calls(work: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of ``work`` to the end of what it launched, for work that a graph cannot hold."""
    for _ in range(WARM_UP):
        work()
    return [_wall(work, device) for _ in range(repeats)]


def _wall(work: Callable[[], object], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second: device memory (read + written), and the copy engine in both directions."""

    device: float
    to_device: float
    to_host: float

    @classmethod
    def measure_apart(cls, device: str) -> Ceilings:
        """In a process of its own, which leaves nothing on the device."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            return apart.submit(cls.measure, device).result()

    @classmethod
    def measure(cls, device: str, num_bytes: int | None = None) -> Ceilings:
        on_gpu = device == "cuda"
        num_bytes = num_bytes or (GIB if on_gpu else GIB >> 6)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu).fill_(1)
        ours, other = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def rate(target: torch.Tensor, source: torch.Tensor, moved: int) -> float:
            def copy() -> None:
                target.copy_(source, non_blocking=True)

            samples = time_events(copy, 10) if on_gpu else time_calls(copy, device, 3)
            return moved / summary(samples)["median"]

        return cls(device=rate(ours, other, 2 * num_bytes), to_device=rate(ours, host, num_bytes), to_host=rate(host, ours, num_bytes))
