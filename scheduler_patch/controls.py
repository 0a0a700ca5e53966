# SPDX-License-Identifier: Apache-2.0
"""Control requests that this server cannot serve. Each is answered with status 400 before it reaches the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_SECONDS = 60
LOG_LEVELS = range(4)


def refuse_long_sleep(manager, obj, request=None) -> None:
    """BEFORE every step is slowed down: refuse a time that is too long or is not a number.

    A time that is not a number ends the scheduler. During a very long one the scheduler answers no request.
    """
    seconds = obj.forward_sleep_time
    if seconds is not None and not -MOST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(f"forward_sleep_time is {seconds}, expected 0 to {MOST_SECONDS} seconds")


def refuse_log_level(manager, obj) -> None:
    """BEFORE the request log is configured: refuse a level that SGLang does not know. It keeps one, which then fails every request."""
    level = obj.log_requests_level
    if level is not None and level not in LOG_LEVELS:
        raise ValueError(f"log_requests_level is {level}, expected {LOG_LEVELS[0]} to {LOG_LEVELS[-1]}")


def refuse_micro_batch(manager, obj) -> None:
    """BEFORE the scheduler's state is set: refuse a batch size that is no whole number. One that is not a number passes SGLang's check."""
    size = obj.server_args.get("pp_max_micro_batch_size", 1)
    if type(size) is not int:
        raise ValueError(f"pp_max_micro_batch_size is {size!r}, expected a whole number of requests, at least 1")


def refuse_release(manager, obj, request=None) -> None:
    """BEFORE device memory is released or resumed: refuse both.

    Releasing ends a busy scheduler, and resuming ends a scheduler that has not released.
    """
    raise ValueError("release_memory_occupation and resume_memory_occupation: expected --enable-memory-saver, which FreeKV refuses")


def refuse_meeting(manager, obj, request=None) -> None:
    """BEFORE weights are exchanged with other processes: refuse a client unless the operator gave an admin key, which SGLang then asks for.

    The scheduler stands still until its peers come, and SGLang's watchdog ends one that stands still for minutes. An Engine's caller is no
    client: SGLang gives no ``request`` then.
    """
    if request is not None and not manager.server_args.admin_api_key:
        raise ValueError("weights of other processes: expected a server with --admin-api-key, not given; start it with one, and send that")


def refuse_recording(manager) -> None:
    """BEFORE the distribution of experts is recorded: refuse it without a recorder, because it would end the scheduler."""
    if manager.server_args.expert_distribution_recorder_mode is None:
        raise ValueError("expert distribution: expected --expert-distribution-recorder-mode, not given; start the server with it")


async def profile(original: Callable, manager, req) -> Any:
    """AROUND a request to start or stop a profile: answer status 400 if one runs already, or if none runs."""
    try:
        return await original(manager, req)
    except RuntimeError as error:
        raise ValueError(f"profile: {error}") from None
