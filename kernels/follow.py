# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel starts while the kernel before it in its stream still runs.

A kernel reads and writes nothing before ``await_previous``; behind it, everything is as in an ordinary launch.

Only a plan with its preselection, a correction's recall, the attention to the rest and the merge are launched this way, because the next
layer waits for them. A recall ahead is not: if it starts a microsecond sooner, it takes processors from the matrix product that is being
launched (benchmarks/results/bench_step-history.json).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def can_follow(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU. Older GPUs have no such launches; on newer ones they have not been tried."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def following(device: torch.device, closely: bool = True) -> dict[str, bool]:
    """Launch options of a kernel that begins with ``await_previous``; those of an ordinary launch unless ``closely``."""
    return {"FOLLOWS": True, "launch_pdl": True} if closely and can_follow(device) else {"FOLLOWS": False}


@triton.jit
def await_previous(FOLLOWS: tl.constexpr):
    """Waits until the kernel before this one has ended and its writes are visible."""
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_in(FOLLOWED: tl.constexpr):
    """Lets the next kernel start as soon as every program of this one has come here."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
