# SPDX-License-Identifier: Apache-2.0
"""A client's mistake is answered with status 400 and one line that says what is wrong.

In SGLang 0.5.17 some endpoints let exceptions about a request through, and others answer them with status 500.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import ValidationException
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

UNREADABLE = "the request cannot be read ({kind}: {error}); compare its fields with SGLang's documentation of requests"
NO_TOKEN = (
    "the grammar of the structured output refuses the sampled token, as no token is left that all options allow; "
    "check min_new_tokens, stop tokens, logit_bias and logit processors against the grammar"
)
GENERATE = {field.name for field in dataclasses.fields(GenerateReqInput)}
ANSWERED = (ValueError, HTTPException, ValidationException)  # the server answers these with status 400, or with their own

logger = logging.getLogger(__name__)


def refuse_parameters(dependant, values: dict[str, Any], is_coroutine: bool) -> None:
    """BEFORE an endpoint runs: refuse parameters of /vertex_generate from which it can make no request.

    Raises:
        ValueError: the message names the field.
    """
    asked = values.get("vertex_req")
    if asked is None or not asked.instances:
        return
    taken = {"image_data"} | {name for name in ("text", "input_ids", "input_embeds") if asked.instances[0].get(name)}
    for name in asked.parameters or ():
        if name in taken or name not in GENERATE:
            raise ValueError(f"parameters: found {name!r}, expected fields of a request that instances lack; leave it out")


def refuse_no_messages(serving, request, *args, **kwargs) -> None:
    """BEFORE messages become a prompt: refuse an empty list, for which chat templates raise exceptions of any kind.

    Raises:
        ValueError: the message names the field.
    """
    if not request.messages:
        raise ValueError("messages: found none with content, expected at least one; send one")


def refuse_no_labels(manager, query=None, items=None, label_token_ids=None, *args, **kwargs) -> None:
    """BEFORE items are scored: refuse an empty list of the tokens whose probability is asked for. Without items there is nothing to score.

    Raises:
        ValueError: the message names the field.
    """
    if items and label_token_ids == []:
        raise ValueError("label_token_ids: found none, expected at least one token; send one")


def as_clients_mistake(call: Callable, *args, **kwargs) -> Any:
    """AROUND a function that only reads a request: turn its exceptions into a ValueError, which SGLang answers with status 400."""
    try:
        return call(*args, **kwargs)
    except ANSWERED:
        raise
    except Exception as error:
        raise _mistake(error) from error


async def awaited_as_clients_mistake(original: Callable, *args, **kwargs) -> Any:
    """AROUND a coroutine: as `as_clients_mistake`."""
    try:
        return await original(*args, **kwargs)
    except ANSWERED:
        raise
    except Exception as error:
        raise _mistake(error) from error


def _mistake(error: Exception) -> ValueError:
    """The answer to an unforeseen exception. Its traceback goes to the log, because the fault may be the server's."""
    logger.error("a request cannot be read", exc_info=error)
    return ValueError(UNREADABLE.format(kind=type(error).__name__, error=_line(error)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def blame_options(original: Callable, processor, *args, **kwargs) -> Any:
    """AROUND the putting of a sampled token to a request's grammar: one that it refuses ends the request with status 400.

    SGLang 0.5.17 ends the answer there without a reason, and later releases answer with status 500.
    """
    req: Req = kwargs["req"] if "req" in kwargs else args[0]
    before = req.to_finish
    result = original(processor, *args, **kwargs)
    if req.to_finish is not before:
        req.to_finish = FINISH_ABORT(NO_TOKEN, HTTPStatus.BAD_REQUEST, "BadRequestError")
    return result


def anthropic_error(original: Callable, serving, status_code: int, error_type: str, message: str, exception_name: str | None = None):
    """AROUND an answer of the Anthropic API: one with status 500 about a ValueError is about a client's mistake."""
    error = sys.exception()
    if status_code == 500 and isinstance(error, ValueError) and not hasattr(error, "status_code"):
        status_code, error_type, message = 400, "invalid_request_error", _line(error)
    return original(serving, status_code, error_type, message, exception_name)


def answer_client_mistakes(*args, **kwargs) -> None:
    """BEFORE the HTTP server starts: answer a ValueError that an endpoint does not catch with status 400 or its own, as /generate does.

    An OverflowError comes of a number too wide for the message to the scheduler, and is answered alike.
    """
    from sglang.srt.entrypoints.http_server import app

    for kind in (ValueError, OverflowError):
        app.add_exception_handler(kind, _answer)


async def _answer(request, error: Exception):
    from fastapi.responses import JSONResponse

    status_code = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
    logger.error("%s is answered with status %d", request.url.path, status_code, exc_info=error)
    return JSONResponse({"error": {"message": _line(error)}}, status_code=status_code)
