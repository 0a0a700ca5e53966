# SPDX-License-Identifier: Apache-2.0
"""Code of strangers: quiet, for a bounded time, and with its errors told in one line."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_freekv.config import Refusal

DEADLINE_S = 20  # of building what a config describes; the largest published models take one


class _TookTooLong(Exception):
    pass


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and logs of others."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


@contextmanager
def strange(file: Path) -> Iterator[None]:
    """For code of others over a stranger's config: any error of theirs is a Refusal, and so is to take long."""

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
            f"{file}: expected a config that SGLang 0.5.17 and its transformers take without code of the model's own, and they say "
            f"{type(error).__name__}: {' '.join(lines[:2])[:240]}; give that of a model that SGLang serves"
        ) from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
