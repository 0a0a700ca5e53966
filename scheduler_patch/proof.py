# SPDX-License-Identifier: Apache-2.0
"""Proof that SGLang calls the hooks of the launcher and of its schedulers, before the server says that it is ready.

| who proves | when | what |
|---|---|---|
| `Announcement` | a scheduler says that it is ready | the scheduler has its hooks |
| `wait_for_answer` | the first answer, or the first chunk of it | the launcher's hooks that a request passes |
| `wait_for_answer` | the first whole answer | the scheduler's hook that counts it |
| `serve` | SGLang's warm-up has ended | the launcher's hooks, if the answer did not pass `wait_for_answer` |

A tokenizer worker proves its hooks with the first answers of its own. SGLang ends a server whose warm-up fails; options that skip it are
refused. In ``Engine`` the first request fails, and so do all others.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException, Request
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils import kill_process_tree

from sglang_freekv.scheduler_patch import registry
from sglang_freekv.scheduler_patch.arguments import config_of, resolved
from sglang_freekv.scheduler_patch.counts import KEY

INIT_INFO = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
COUNTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_customized_info"

logger = logging.getLogger(__name__)


class Announcement:
    """The pipe by which a scheduler says that it is ready: what it says must come of a scheduler that has been hooked."""

    def __init__(self, pipe) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, info: dict[str, Any]) -> None:
        """Raises Drift, which SGLang answers by ending the server."""
        if KEY not in info:
            raise registry.drift(INIT_INFO, "is hooked, but a scheduler started without calling it")
        self._pipe.send(info)


def wait_for_answer(original: Callable, manager, obj, request=None) -> AsyncIterator[dict]:
    """AROUND the answers to one prompt: until all is proven, an answer that does not prove it is an error instead.

    The error is as SGLang's own that are not the client's: a whole answer by HTTP has status 500, the last chunk of a stream has it in its
    ``finish_reason``.

    Raises:
        Drift: a hook that this request of an ``Engine`` should have passed was not called.
        HTTPException: the same for a whole answer by HTTP.
    """
    answers = original(manager, obj, request)  # SGLang expects that it looks for the request at once
    if config_of(manager.server_args) is None or not isinstance(obj, GenerateReqInput):
        return answers
    by_http = isinstance(request, Request)
    due = {registry.REQUEST, registry.COUNTED} | ({registry.HTTP_REQUEST} if by_http else set())
    if obj.text is not None and not resolved(manager.server_args).enable_tokenizer_batch_encode:
        due.add(registry.TEXT_REQUEST)
    if registry.is_proven(due):
        return answers
    return _proving(answers, due - {registry.COUNTED}, by_http=by_http, streamed=obj.stream)


async def _proving(answers: AsyncGenerator[dict], passed: set[str], *, by_http: bool, streamed: bool) -> AsyncIterator[dict]:
    async with aclosing(answers):
        async for answer in answers:
            try:
                _prove(answer["meta_info"], passed)
            except registry.Drift as drift:
                if not by_http:
                    raise
                if not streamed:
                    raise HTTPException(drift.status_code, str(drift)) from drift
                yield _failed(answer, drift)
                return
            yield answer


def _prove(meta_info: dict[str, Any], passed: set[str]) -> None:
    finish = meta_info["finish_reason"]
    if finish is not None and finish["type"] == "abort":
        return
    for each in sorted(passed):  # REQUEST first
        registry.prove(each)
    if finish is not None:
        if meta_info.get("completion_tokens") and KEY not in meta_info:
            raise registry.drift(COUNTS, "is hooked, but an answer came without its counts")
        registry.prove(registry.COUNTED)


def _failed(answer: dict[str, Any], drift: registry.Drift) -> dict[str, Any]:
    """The last chunk of a stream that has failed, without what the answer says."""
    logger.error(drift)
    finish = {"type": "abort", "message": str(drift), "status_code": drift.status_code, "err_type": "InternalServerError"}
    said = {name: type(answer[name])() for name in ("text", "output_ids") if name in answer}
    return answer | said | {"meta_info": answer["meta_info"] | {"finish_reason": finish}}


def serve(original: Callable, server_args, *args, **kwargs) -> None:
    """AROUND SGLang's HTTP server: end it after its warm-up unless the launcher's hooks were called."""
    call = inspect.signature(original).bind(server_args, *args, **kwargs)
    call.apply_defaults()
    if config_of(server_args) is not None:
        call.arguments["execute_warmup_func"] = _proven_after(call.arguments["execute_warmup_func"])
    original(*call.args, **call.kwargs)


def _proven_after(warm_up: Callable[..., bool]) -> Callable[..., bool]:
    def proven(*args, **kwargs) -> bool:
        if not warm_up(*args, **kwargs):
            return False
        try:
            registry.prove(registry.REQUEST)
            registry.prove(registry.HTTP_REQUEST)
        except registry.Drift as drift:
            logger.error(drift)
            kill_process_tree(os.getpid())
            return False
        return True

    return proven
