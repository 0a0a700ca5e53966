# SPDX-License-Identifier: Apache-2.0
"""``meta_info`` in the answers of the OpenAI API to a request with ``"return_meta_info": true``.

SGLang 0.5.17 returns ``meta_info`` in whole chat completions only. These hooks add it to each choice of a whole completion. In a stream
they add it to the last chunk of each choice, which has a ``finish_reason``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, CompletionResponse
from sglang.srt.utils.json_response import dumps_json, orjson_response

FIELD = "return_meta_info"
EVENT = "data: {"  # other chunks are comments, or end the stream

MetaInfo = dict[int, dict[str, Any]]  # the last meta_info of each choice, by its index

_asked: ContextVar[MetaInfo | None] = ContextVar("freekv_meta_info", default=None)


async def handle_request(original, serving, request, raw_request):
    """AROUND a request of the OpenAI API: add ``meta_info`` to SGLang's answer, if the client asks for it."""
    try:
        asks = await _asks(request, raw_request)
    except ValidationError as error:
        return serving.create_error_response(f"{FIELD}: {error.errors()[0]['msg']}; send true or false")
    if not asks or isinstance(request, ChatCompletionRequest) and not request.stream:
        return await original(serving, request, raw_request)
    if isinstance(request, ChatCompletionRequest):
        request.return_meta_info = False  # SGLang refuses it in a stream
    meta_info: MetaInfo = {}
    token = _asked.set(meta_info)
    try:
        response = await original(serving, request, raw_request)
    finally:
        _asked.reset(token)
    if isinstance(response, CompletionResponse):
        whole = response.model_dump(mode="json")
        _add(whole["choices"], meta_info)
        return orjson_response(whole)
    if hasattr(response, "body_iterator"):
        response.body_iterator = _with_meta_info(response.body_iterator, meta_info)
    return response


def generate_request(original, manager, obj, request=None) -> AsyncIterator:
    """AROUND the tokenizer manager's answers to a request: keep their ``meta_info`` if its client asks for it."""
    answers, meta_info = original(manager, obj, request), _asked.get()
    return answers if meta_info is None else _noted(answers, meta_info)


async def _asks(request, raw_request) -> bool:
    """Whether the request has ``return_meta_info``. It is read from the body, because SGLang's ``CompletionRequest`` lacks the field.

    Raises:
        ValidationError: its value is not a bool.
    """
    if isinstance(request, ChatCompletionRequest):
        return request.return_meta_info
    if not isinstance(request, CompletionRequest) or FIELD.encode() not in await raw_request.body():
        return False
    return TypeAdapter(bool).validate_python((await raw_request.json()).get(FIELD, False))


async def _noted(answers: AsyncGenerator, meta_info: MetaInfo) -> AsyncIterator:
    async with aclosing(answers):
        async for answer in answers:
            several = enumerate(answer) if isinstance(answer, list) else [(answer.get("index", 0), answer)]
            meta_info |= {index: each["meta_info"] for index, each in several}
            yield answer


async def _with_meta_info(chunks: AsyncGenerator[str], meta_info: MetaInfo) -> AsyncIterator[str]:
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(EVENT):
                event = json.loads(chunk.removeprefix("data: "))
                if _add([choice for choice in event.get("choices", ()) if choice["finish_reason"]], meta_info):
                    chunk = f"data: {dumps_json(event).decode()}\n\n"
            yield chunk


def _add(choices: list[dict], meta_info: MetaInfo) -> bool:
    """Add its ``meta_info`` to each choice, in place; returns whether there is a choice."""
    for choice in choices:
        choice["meta_info"] = meta_info[choice["index"]]
    return bool(choices)
