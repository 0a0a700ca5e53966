# SPDX-License-Identifier: Apache-2.0
"""The registry of retrieval methods. A method is one file in this folder, which defines ``METHOD``."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from sglang_freekv.methods.method import Method


def _found() -> Iterator[Method]:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "method":
            yield import_module(f"{__name__}.{module.name}").METHOD


METHODS: dict[str, Method] = {method.name: method for method in sorted(_found(), key=lambda method: (method.name != "freekv", method.name))}
