# SPDX-License-Identifier: Apache-2.0
"""Switching KV retrieval on in a process of SGLang."""

from __future__ import annotations

from sglang_freekv import scheduler_patch
from sglang_freekv.config import BACKEND_NAME
from sglang_freekv.scheduler_patch.registry import apply, verify


def in_launcher(cls, server_args, *args, **kwargs) -> None:
    """BEFORE the subprocesses start."""
    if getattr(server_args, "_freekv", None) is not None:
        verify(scheduler_patch.FRONT)
        apply(scheduler_patch.LAUNCHER)
        if server_args.device == "cpu":
            apply(scheduler_patch.LAUNCHER_ON_CPU)


def in_scheduler(server_args, *args, **kwargs) -> None:
    """BEFORE a scheduler process is configured: attach every hook, prove it live, and register the attention backend."""
    if getattr(server_args, "_freekv", None) is None:
        return
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.SCHEDULER)
    if server_args.device == "cpu":
        apply(scheduler_patch.SCHEDULER_ON_CPU)
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_freekv.backend import FreeKVAttnBackend

    register_attention_backend(BACKEND_NAME)(FreeKVAttnBackend)
