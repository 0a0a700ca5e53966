# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel takes its place on the device while the one before it in its stream still runs.

Behind ``await_previous`` all is as in a usual launch; in front of it a kernel may read and write nothing. That is for what attention has to
wait for: a recall ahead that begins a microsecond sooner takes processors from the matrix product that is being launched then.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=None)
def can_follow(device: torch.device) -> bool:
    """Whether the device is a Hopper: older ones do not know such launches, on newer ones they have not been run."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def following(device: torch.device, closely: bool = True) -> dict[str, bool]:
    """Options of the launch of a kernel that begins with ``await_previous``; an ordinary launch if it need not follow ``closely``."""
    return {"FOLLOWS": True, "launch_pdl": True} if closely and can_follow(device) else {"FOLLOWS": False}


@triton.jit
def await_previous(FOLLOWS: tl.constexpr):
    """Until the kernel before this one is over and what it wrote is there."""
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_in(FOLLOWED: tl.constexpr):
    """The next kernel may take its place as soon as all programs of this one have come here."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
