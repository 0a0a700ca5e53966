# SPDX-License-Identifier: Apache-2.0
"""Dispatch: one function for a reference and its Triton kernel. The device of one argument decides which of them runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def by_device(reference: Callable[P, R], of: str) -> Callable[P, R]:
    """``reference`` for tensors in host memory, and for tensors on a GPU the kernel of that name in ``on_gpu``.

    Args:
        reference: the specification, whose signature and docstring the result has.
        of: the argument whose ``is_cuda`` decides: a tensor, or what holds tensors, such as ``Candidates``.
    """
    place = list(signature(reference).parameters).index(of)
    compiled: list[Callable[P, R]] = []

    @wraps(reference)
    def call(*args: P.args, **options: P.kwargs) -> R:
        decisive: Any = args[place] if place < len(args) else options[of]
        if not decisive.is_cuda:
            return reference(*args, **options)
        if not compiled:  # imported on the first call: Triton needs a GPU to compile for
            compiled.append(getattr(import_module("sglang_freekv.kernels.on_gpu"), reference.__name__))
        return compiled[0](*args, **options)

    return call
