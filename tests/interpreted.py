"""Triton kernels of tests: compiled where there is a GPU, and else for Triton's interpreter."""

from __future__ import annotations

import os
from unittest import mock

import torch


def interpreted() -> mock._patch_dict:
    """A context in which to declare them."""
    return mock.patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
