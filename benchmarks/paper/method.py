"""What a method is to these benchmarks: how a decode step attends, with the memory traffic and the dependences of its paper.

Weights, keys and queries are random, so what a method selects is too: costs are measured here, never accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from benchmarks.paper.pools import Pools, Requests
from sglang_freekv import kernels
from sglang_freekv.engine import Recall
from sglang_freekv.kernels import Misses

GROWTH = 256  # tokens that a context may grow by while its steps are timed


@dataclass(frozen=True)
class Work:
    """One batch, and what it does to a method.

    Args:
        context, longest: tokens of each request, now and at most.
        corrected: share of corrected kv heads in a step, c.
        missed: share of the selected pages that the step before did not select, x.
        copies: False copies nothing from the host: what is left is the step without the link.
    """

    pools: Pools
    requests: Requests
    context: int
    longest: int
    corrected: float
    missed: float
    copies: bool = True

    @classmethod
    def of(cls, pools: Pools, batch: int, context: int, corrected: float, missed: float, copies: bool = True) -> Work:
        longest = context + GROWTH
        return cls(pools, Requests(pools, batch, context, longest), context, longest, corrected, missed, copies)

    @property
    def batch(self) -> int:
        return len(self.requests.rows)

    @property
    def candidates(self) -> int:
        """Pages of a request that are chosen from."""
        config = self.pools.config
        return max(0, self.context // config.page_size - config.pages.sink - config.pages.window)

    @property
    def budget(self) -> int:
        """Tokens that a kv head attends to."""
        return min(self.pools.config.budget_tokens, self.context)

    def recall(self, by: Recall = kernels.recall_pages) -> Recall:
        """``by``, or what only empties the list of misses."""
        return by if self.copies else drain

    def elements(self, of_a_head: float) -> float:
        """Bytes of so many elements for each kv head of each layer and request."""
        shape = self.pools.shape
        return self.batch * shape.layers * shape.kv_heads * of_a_head * self.pools.dtype.itemsize


def drain(host_pool: torch.Tensor, misses: Misses, *others) -> None:
    """Empties the list by one kernel, as a recall of nothing would."""
    misses.length[:2] = 0


class Traffic(NamedTuple):
    """Bytes of one step, over all layers and requests.

    Args:
        link: from the host.
        device: read from device memory, and written to it where they come from the host.
    """

    link: float
    device: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.link + other.link, self.device + other.device)


class Method(Protocol):
    """Launches work and waits for none, unless ``captured`` is False: then no CUDA graph can hold its step."""

    captured: bool

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, D]`` of queries of that shape; keys and values ``[B, H, D]`` of the new tokens are stored."""

    def complete(self) -> None:
        """Behind the last layer: what runs beside the computation is ordered before the end of the step."""

    def begin(self) -> None:
        """From here on what is moved is counted, by a method that has counters."""

    def traffic(self, steps: int) -> Traffic:
        """What a step moves at least, weights left out, in the mean of the ``steps`` since ``begin``."""
