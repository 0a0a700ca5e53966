"""Streams of a GPU that delay at random what they are given."""

from __future__ import annotations

import random
from functools import wraps

import torch

from sglang_freekv.memory_pool.transfer import CudaStream

DELAYS = {0: 60, 20_000: 20, 400_000: 18, 20_000_000: 2}  # cycles (2 in a nanosecond): how often in a hundred


class DelayedStream(CudaStream):
    """Delays at random the computation, and what is submitted before and after its work: by more than the host needs for a step."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__("cuda")
        self.random = generator

    def delay(self) -> None:
        (cycles,) = self.random.choices(list(DELAYS), DELAYS.values())
        if cycles:  # no kernel between two of which one follows the other closely
            torch.cuda._sleep(cycles)

    def submit(self, work, behind=None):
        @wraps(work)
        def delayed() -> None:
            self.delay()
            work()
            self.delay()

        handle = super().submit(delayed, behind)
        self.delay()
        return handle


def delayed_streams(seed: int):
    generator = random.Random(seed)
    return lambda: DelayedStream(generator)
