# SPDX-License-Identifier: Apache-2.0
"""Switches KV retrieval on in a process of SGLang."""

from __future__ import annotations

from sglang_freekv import scheduler_patch
from sglang_freekv.config import BACKEND_NAME
from sglang_freekv.scheduler_patch import trees
from sglang_freekv.scheduler_patch.arguments import config_of, mark_launched, refuse_lost_config, resolved, was_launched
from sglang_freekv.scheduler_patch.registry import apply, drift, verify


def in_launcher(original, cls, server_args, *args, **kwargs):
    """AROUND the start of the subprocesses: attach the launcher's hooks before, and see afterwards that the scheduler has its own.

    Raises:
        Drift: SGLang has changed a function that is hooked, or does not call it any more.
    """
    if config_of(server_args) is None:
        refuse_lost_config(server_args.attention_backend)
        return original(cls, server_args, *args, **kwargs)
    verify(scheduler_patch.FRONT)
    settings = resolved(server_args)
    apply(scheduler_patch.launcher(settings.device))
    mark_launched(server_args)
    started = original(cls, server_args, *args, **kwargs)
    scheduler_infos = started[3].scheduler_infos
    if settings.dp_size == 1 and not all("freekv" in info for info in scheduler_infos):  # a data-parallel controller sends its own
        raise drift("sglang.srt.managers.scheduler.Scheduler.get_init_info", "is hooked, but the scheduler started without calling it")
    return started


def in_scheduler(server_args, *args, **kwargs) -> None:
    """BEFORE a scheduler process is configured: attach its hooks, check that they are live, and register the attention backend.

    Raises:
        Drift: SGLang has changed a function that is hooked, or does not call it any more.
    """
    if config_of(server_args) is None:
        return
    if not was_launched(server_args):
        raise drift("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", "is hooked, but this engine started without calling it")
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.scheduler(resolved(server_args).device))
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_freekv.backend import FreeKVAttnBackend

    register_attention_backend(BACKEND_NAME)(FreeKVAttnBackend)
    if trees.UNIFIED:
        from sglang_freekv.scheduler_patch import unified_tree

        unified_tree.register()
