# SPDX-License-Identifier: Apache-2.0
"""Dispatch: one callable for a Triton kernel and its reference; the device of its tensors decides which runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module

from sglang_freekv.kernels import reference

ON_DEVICE = {"recall_pages": 2, "stage_pages": 3}  # index of the argument whose device decides: their first one is always in host memory


def by_device(module: str, name: str) -> Callable:
    """``name`` as a callable: the kernel of ``module`` for tensors on a GPU, the reference for tensors in host memory."""
    on_cpu = getattr(reference, name)
    index = ON_DEVICE.get(name, 0)
    compiled: list[Callable] = []

    @wraps(on_cpu)
    def call(*args, **options):
        first = args[index]
        if not (first[0] if isinstance(first, tuple) else first).is_cuda:
            return on_cpu(*args, **options)
        if not compiled:  # imported on the first call: Triton needs a GPU to compile for
            compiled.append(getattr(import_module(f"sglang_freekv.kernels.{module}"), name))
        return compiled[0](*args, **options)

    return call
