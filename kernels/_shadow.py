# SPDX-License-Identifier: Apache-2.0
"""Gives the name ``kernels`` back to Hugging Face's distribution, which SGLang and transformers import.

With the checkout root on ``sys.path``, as under ``python -m`` in it, ``import kernels`` finds this directory first.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def hand_over() -> None:
    """Replaces ``sys.modules["kernels"]`` by the ``kernels`` that the rest of ``sys.path`` holds.

    Raises:
        ModuleNotFoundError: there is none, as if this directory were not there either.
    """
    elsewhere = [entry for entry in sys.path if not Path(entry, "kernels", Path(__file__).name).exists()]
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            "No module named 'kernels': Hugging Face's `kernels` is not installed, and the directory of that name "
            "in the current checkout is sglang_freekv.kernels; it comes with SGLang: run `pip install sglang==0.5.17`",
            name="kernels",
        )
    sys.modules["kernels"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
