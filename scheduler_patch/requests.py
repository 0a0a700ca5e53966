# SPDX-License-Identifier: Apache-2.0
"""What FreeKV's host pages ask of SGLang's queue."""

from __future__ import annotations

MAX_REQ_INPUT_LEN = 5  # its place in what get_worker_info returns


def longest_prompt(info: tuple, worker) -> tuple:
    """AFTER a worker tells its limits: a prompt must leave a page for its first token and the one that admission reserves.

    SGLang's own limit leaves five tokens, and a prompt between the two waits for ever at the head of the queue.
    """
    info = list(info)
    page_size = worker.model_runner.token_to_kv_pool.page_size
    info[MAX_REQ_INPUT_LEN] = min(info[MAX_REQ_INPUT_LEN], worker.model_runner.max_total_num_tokens - 2 * page_size + 1)
    return tuple(info)


def let_in_who_stands_behind(original, scheduler, *args) -> None:
    """AROUND what may take requests out of the queue. When its first request does not fit, SGLang looks at the queue again only after a
    running request has ended; who stands behind may fit as soon as that one is gone."""
    waiting = len(scheduler.waiting_queue)
    original(scheduler, *args)
    if len(scheduler.waiting_queue) < waiting:
        scheduler.running_batch.batch_is_full = False
