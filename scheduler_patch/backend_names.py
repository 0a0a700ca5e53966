# SPDX-License-Identifier: Apache-2.0
"""Names of attention backends, where SGLang asserts that they are on a model's list: FreeKV's passes there as a stock one."""

from __future__ import annotations

from sglang_freekv.config import BACKEND_NAME

STOCK = "triton"  # on every list. It is a name alone: backend.py chooses what computes layers that FreeKV does not


def of_settings(settings) -> tuple[str, str]:
    """REPLACE the question for the names of both backends, prefill's and decode's, in the one module that asserts on them."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return _as_stock(attention_backends_of(settings))


def of_server_args(original, server_args) -> tuple[str, str]:
    """AROUND the same question, on releases that ask ServerArgs."""
    return _as_stock(original(server_args))


def _as_stock(names: tuple[str, str]) -> tuple[str, str]:
    return (STOCK, STOCK) if set(names) == {BACKEND_NAME} else names
