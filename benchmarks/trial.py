"""A kernel's trial: what was checked, and the launches to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.kernel_inputs import Inputs


class Trial(NamedTuple):
    """A kernel that has passed its check.

    Args:
        launches: to be timed in rotation.
        num_bytes: that one launch moves; 0 where time is launch and latency.
        ceiling: field of ``Ceilings`` that bounds it.
        error: relative, or the share of choices that are the reference's.
        idle: launches that are not the kernel's.
        before: work before each launch, whose time is taken off.
    """

    launches: list[Callable[[], object]]
    num_bytes: int = 0
    ceiling: str = "device"
    error: float | None = None
    idle: int = 0
    before: Callable[[], object] | None = None


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def per_layer(inputs: Inputs, launch: Callable) -> list[Callable[[], object]]:
    return [lambda layer=layer: launch(layer) for layer in inputs.layers]
