# SPDX-License-Identifier: Apache-2.0
"""The attention backends that SGLang asserts a model needs: FreeKV's stands for the stock one that it hands other layers to."""

from __future__ import annotations

from sglang_freekv.config import BACKEND_NAME

STOCK = "triton"  # on every list; which one serves is decided where the backend is made


def of_settings(settings) -> tuple[str, str]:
    """REPLACE the names of both backends, prefill's and decode's, where SGLang asserts that they are on a model's list."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return _as_stock(attention_backends_of(settings))


def of_server_args(original, server_args) -> tuple[str, str]:
    """AROUND the same question, on releases that ask ServerArgs."""
    return _as_stock(original(server_args))


def _as_stock(names: tuple[str, str]) -> tuple[str, str]:
    return (STOCK, STOCK) if set(names) == {BACKEND_NAME} else names
