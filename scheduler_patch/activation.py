# SPDX-License-Identifier: Apache-2.0
"""Switches KV retrieval on in a process of SGLang."""

from __future__ import annotations

from sglang_freekv import scheduler_patch
from sglang_freekv.config import BACKEND_NAME
from sglang_freekv.scheduler_patch.registry import apply, verify


def in_launcher(cls, server_args, *args, **kwargs) -> None:
    """BEFORE the subprocesses start: attach the launcher's hooks, and check that they are live.

    Raises:
        RuntimeError: SGLang has changed a function that is hooked.
    """
    if getattr(server_args, "_freekv", None) is not None:
        verify(scheduler_patch.FRONT)
        apply(scheduler_patch.LAUNCHER)
        if server_args.device == "cpu":
            apply(scheduler_patch.LAUNCHER_ON_CPU)


def in_scheduler(server_args, *args, **kwargs) -> None:
    """BEFORE a scheduler process is configured: attach its hooks, check that they are live, and register the attention backend.

    Raises:
        RuntimeError: SGLang has changed a function that is hooked.
    """
    if getattr(server_args, "_freekv", None) is None:
        return
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.SCHEDULER)
    if server_args.device == "cpu":
        apply(scheduler_patch.SCHEDULER_ON_CPU)
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_freekv.backend import FreeKVAttnBackend

    register_attention_backend(BACKEND_NAME)(FreeKVAttnBackend)
