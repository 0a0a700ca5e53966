# SPDX-License-Identifier: Apache-2.0
"""Runs other projects' code on untrusted configs: without its output, for a bounded time, and with its errors in one line."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_freekv import releases
from sglang_freekv.config import Refusal

DEADLINE_S = 20  # for reading a config or building its model without weights; large published models take about 1 s


class _TookTooLong(Exception):
    pass


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and logs."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


@contextmanager
def strange(file: Path) -> Iterator[None]:
    """Turn errors into Refusals that name ``file``, and suppress warnings and logs.

    Raises:
        Refusal: the code raised an exception, or took longer than ``DEADLINE_S``. Only the main thread is timed.
    """

    def stop(*_) -> None:
        raise _TookTooLong(f"it took longer than {DEADLINE_S} s")

    timed = threading.current_thread() is threading.main_thread()
    try:
        if timed:
            before = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        with quiet():
            yield
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Refusal(
            f"{file}: expected a config that SGLang {releases.INSTALLED} and its transformers take without code of the model's own, and they say "
            f"{type(error).__name__}: {' '.join(lines[:2])[:240]}; give that of a model that SGLang serves"
        ) from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
