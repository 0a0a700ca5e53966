"""Triton kernels of tests: compiled where there is a GPU, and else for Triton's interpreter."""

from __future__ import annotations

import os
from types import FunctionType
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import interpreter


def interpreted() -> mock._patch_dict:
    """A context in which to declare them."""
    return mock.patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})


def patch_once_a_launch() -> None:
    """Triton's interpreter patches its language for a launch, and again for every call of a function in it, which takes a sixth of the time
    of such tests. From now on a call patches what its launch has not patched yet.
    """
    patch, patched = interpreter._patch_lang, set()

    def patch_others(function: FunctionType) -> interpreter._LangPatchScope:
        languages = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # the launch, which restores it; calls do not
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_others
