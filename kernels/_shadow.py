# SPDX-License-Identifier: Apache-2.0
"""Gives the name ``kernels`` back to Hugging Face's distribution, which SGLang and transformers import.

``python -m`` in the checkout puts its root on ``sys.path``, and ``import kernels`` then finds this directory first.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def hand_over() -> None:
    """Replaces ``sys.modules["kernels"]`` by the first ``kernels`` on ``sys.path`` that is not this directory.

    Raises:
        ModuleNotFoundError: no other ``kernels`` is installed.
    """
    elsewhere = [entry for entry in sys.path if not Path(entry, "kernels", Path(__file__).name).exists()]
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            "No module named 'kernels': expected Hugging Face's `kernels`, which SGLang installs, but found only the directory of "
            "that name in the current checkout, which is sglang_freekv.kernels; run `pip install sglang==0.5.23`",
            name="kernels",
        )
    sys.modules["kernels"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
