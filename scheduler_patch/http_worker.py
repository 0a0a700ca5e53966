# SPDX-License-Identifier: Apache-2.0
"""The HTTP app of a tokenizer worker: SGLang's, with the hooks of requests.

With ``--tokenizer-worker-num`` above 1 uvicorn imports the app in a process for each worker, where SGLang loads no plugins. An environment
variable of SGLang's names the app, so this module takes its place. A worker proves its hooks with the first request that it answers.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.multi_tokenizer_mixin import get_main_process_id, read_from_shared_memory
from sglang.srt.plugins import load_plugins

from sglang_freekv import scheduler_patch
from sglang_freekv.scheduler_patch.arguments import resolved
from sglang_freekv.scheduler_patch.mistakes import answer_client_mistakes
from sglang_freekv.scheduler_patch.registry import apply, verify

HOOKED_APP = f"{__name__}:app"
WRAPPED_APP = "FREEKV_WRAPPED_HTTP_SERVER_APP"  # the environment variable with the path of the app that ours takes the place of


def take_place() -> None:
    """Have uvicorn import the hooked app, from now on and in all processes that this one starts."""
    path = envs.SGLANG_HTTP_SERVER_APP_PATH
    if path.get() != HOOKED_APP:
        os.environ[WRAPPED_APP] = path.get()
        path.set(HOOKED_APP)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _hooked_app()


def _hooked_app() -> Any:
    """In a worker: the FastAPI app of SGLang, or the one that a user has named, once the hooks are attached.

    Raises:
        Drift: SGLang has changed a function that is hooked.
    """
    load_plugins()
    _, server_args, _ = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    verify(scheduler_patch.FRONT)
    apply(scheduler_patch.worker(resolved(server_args).device))
    answer_client_mistakes()
    return pkgutil.resolve_name(os.environ[WRAPPED_APP])
