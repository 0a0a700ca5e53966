# SPDX-License-Identifier: Apache-2.0
"""Switches KV retrieval on in a process of SGLang."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from sglang_freekv import scheduler_patch
from sglang_freekv.config import BACKEND_NAME
from sglang_freekv.scheduler_patch import trees
from sglang_freekv.scheduler_patch.arguments import config_of, mark_launched, refuse_lost_config, resolved, was_launched
from sglang_freekv.scheduler_patch.proof import Announcement
from sglang_freekv.scheduler_patch.registry import apply, drift, verify

RUN_SCHEDULER = "run_scheduler_process_func"
_announces = False  # whether the announcement of the scheduler in this process is looked at


def in_launcher(original, cls, server_args, *args, **kwargs):
    """AROUND the start of the subprocesses: attach the launcher's hooks before, and have each scheduler prove that it has its own.

    Raises:
        Drift: SGLang has changed a function that is hooked, or does not call it any more.
    """
    if config_of(server_args) is None:
        refuse_lost_config(server_args.attention_backend)
        return original(cls, server_args, *args, **kwargs)
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.launcher(resolved(server_args).device))
    if resolved(server_args).tokenizer_worker_num > 1:
        from sglang_freekv.scheduler_patch import http_worker

        http_worker.take_place()
    mark_launched(server_args)
    call = inspect.signature(original).bind(cls, server_args, *args, **kwargs)
    call.arguments[RUN_SCHEDULER] = partial(run_scheduler, call.arguments[RUN_SCHEDULER])
    return original(*call.args, **call.kwargs)


def run_scheduler(original: Callable[..., None], *args, **kwargs) -> None:
    """Run a scheduler in this process as SGLang does, but for the pipe by which it says that it is ready.

    ``original`` may be a caller's own, which takes what SGLang's takes, by whatever names.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    call = inspect.signature(run_scheduler_process).bind(*args, **kwargs)
    call.arguments["pipe_writer"] = Announcement(call.arguments["pipe_writer"])
    global _announces
    _announces = True
    original(*call.args, **call.kwargs)


def in_scheduler(server_args, *args, **kwargs) -> None:
    """BEFORE a scheduler process is configured: attach its hooks, check that they are live, and register the attention backend.

    Raises:
        Drift: SGLang has changed a function that is hooked, or does not call it any more.
    """
    if config_of(server_args) is None:
        return
    if not was_launched(server_args):
        raise drift("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", "is hooked, but this engine started without calling it")
    if not _announces:
        raise drift("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", f"did not hand its {RUN_SCHEDULER} on")
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.scheduler(resolved(server_args).device))
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_freekv.backend import FreeKVAttnBackend

    register_attention_backend(BACKEND_NAME)(FreeKVAttnBackend)
    if trees.UNIFIED:
        from sglang_freekv.scheduler_patch import unified_tree

        unified_tree.register()
