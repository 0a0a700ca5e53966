# SPDX-License-Identifier: Apache-2.0
"""Compilation of all kernels of a piece of work, in parallel, before the work runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from unittest import mock

from triton import AsyncCompileMode, knobs
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

MAX_THREADS = 16
PROGRESS_S = 5.0


def compile_in_parallel(work: Callable[[], None]) -> int:
    """Compile every kernel that ``work`` launches, and run none of them. All else in ``work`` is done.

    Triton keeps compiled kernels on disk, so those of an earlier start are only loaded.

    Returns:
        How many kernels there are.
    """
    started, threads = time.monotonic(), min(len(os.sched_getaffinity(0)), MAX_THREADS)
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == thread, **options)

    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool) as mode:
        with mock.patch.object(JITFunction, "run", compile_only):
            work()
        count = len(mode.raw_futures)
        _tell_while_waiting(mode.raw_futures, threads)
    logger.info(f"KV retrieval: {count} kernels compiled or loaded in {time.monotonic() - started:.1f} s")
    return count


def _tell_while_waiting(kernels: list[Future], threads: int) -> None:
    pending = set(kernels)
    while pending := wait(pending, PROGRESS_S).not_done:
        logger.info(
            f"KV retrieval: compiling, {len(pending)} of {len(kernels)} kernels are left for {threads} threads; "
            f"{knobs.cache.dir} keeps them for the next start"
        )
