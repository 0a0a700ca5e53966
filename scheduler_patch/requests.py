# SPDX-License-Identifier: Apache-2.0
"""Changes to SGLang's queue that FreeKV's host pages need."""

from __future__ import annotations

MAX_REQ_INPUT_LEN = 5  # index in the tuple of get_worker_info


def longest_prompt(info: tuple, worker) -> tuple:
    """AFTER a worker reports its limits: lower the longest prompt, so that it leaves two pages.

    One page is for the first generated token, and admission reserves another. SGLang's limit leaves only five tokens. A prompt between
    both limits would wait for ever at the head of the queue.
    """
    limits = list(info)
    page_size = worker.model_runner.token_to_kv_pool.page_size
    limits[MAX_REQ_INPUT_LEN] = min(limits[MAX_REQ_INPUT_LEN], worker.model_runner.max_total_num_tokens - 2 * page_size + 1)
    return tuple(limits)


def let_in_who_stands_behind(original, scheduler, *args) -> None:
    """AROUND functions that may remove waiting requests: let SGLang look at the queue again if one is gone.

    If the first request does not fit, SGLang looks again only after a running request has ended. When the first request is removed, the
    requests behind it may fit at once.
    """
    waiting = len(scheduler.waiting_queue)
    original(scheduler, *args)
    if len(scheduler.waiting_queue) < waiting:
        scheduler.running_batch.batch_is_full = False
