# SPDX-License-Identifier: Apache-2.0
"""Control requests that ask for what this server cannot do: each is answered with status 400 before the scheduler hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_SECONDS = 60


def answer_client_mistakes(*args, **kwargs) -> None:
    """BEFORE the HTTP server starts: a ValueError that an endpoint lets through is the client's mistake, as it is in /generate."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    app.add_exception_handler(ValueError, lambda request, error: JSONResponse({"error": {"message": str(error)}}, status_code=400))


def refuse_long_sleep(manager, obj, request=None) -> None:
    """BEFORE every step is slowed down: the scheduler ends of a time that is no number, and answers nobody in an endless one."""
    seconds = obj.forward_sleep_time
    if seconds is not None and not -MOST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(f"forward_sleep_time is {seconds}, expected 0 to {MOST_SECONDS} seconds")


def refuse_release(manager, obj, request=None) -> None:
    """BEFORE device memory is released or taken again: a busy scheduler ends of the first, any scheduler of the second alone."""
    raise ValueError("release_memory_occupation and resume_memory_occupation: expected --enable-memory-saver, which FreeKV refuses")


def refuse_recording(manager) -> None:
    """BEFORE the distribution of experts is recorded: a scheduler without a recorder ends of it."""
    if manager.server_args.expert_distribution_recorder_mode is None:
        raise ValueError("expert distribution: expected --expert-distribution-recorder-mode, not given; start the server with it")


async def profile(original: Callable, manager, req) -> Any:
    """AROUND a profile is asked for: that one runs already, or none, is the client's mistake."""
    try:
        return await original(manager, req)
    except RuntimeError as error:
        raise ValueError(f"profile: {error}") from None
