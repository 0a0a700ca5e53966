# SPDX-License-Identifier: Apache-2.0
"""Dispatch: one name for a kernel and its reference; where the tensors are decides which runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module

from sglang_freekv.kernels import reference

ON_DEVICE = {"recall_pages": 2, "stage_pages": 3}  # the argument that tells where: the first one of these is host memory


def by_device(module: str, name: str) -> Callable:
    """The kernel ``name`` of ``module`` for tensors on a GPU, the reference for tensors in host memory."""
    on_cpu = getattr(reference, name)
    index = ON_DEVICE.get(name, 0)
    compiled: list[Callable] = []

    @wraps(on_cpu)
    def call(*args, **options):
        if not args[index].is_cuda:
            return on_cpu(*args, **options)
        if not compiled:  # Triton is imported where there is a GPU to compile for
            compiled.append(getattr(import_module(f"sglang_freekv.kernels.{module}"), name))
        return compiled[0](*args, **options)

    return call
