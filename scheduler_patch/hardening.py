# SPDX-License-Identifier: Apache-2.0
"""Guards against requests that end a stock SGLang. A guard is not attached to releases that have mended its weakness.

| guard | weakness, and its place in SGLang | thread | mended in |
|---|---|---|---|
| even_values | a batch mixes requests with and without token_ids_logprob: a list has no tolist (logprob_processor.py) | #34719, #35705 | 0.5.23 |
| take_in, refuse_empty | an exception about one request ends the event loop (managers/scheduler.py, handle_generate_request) | | |
| answer_control | an exception about one control request does the same (process_input_requests) | | |
| load_processor | a custom logit processor that raises ends the scheduler (layers/sampler.py) | | |
| keep_finite | biases, penalties, grammars and processors make logits from which no token can be sampled (layers/sampler.py) | | |
| find_stop_regex | a regular expression that backtracks for ever holds the scheduler (managers/schedule_batch.py) | #28203 | |
| compile_grammar | a panic of a grammar's compiler is not an Exception (constrained/grammar_manager.py) | | |
| forget_overrides | input embeddings of a prompt keep its decode steps off the graph (managers/schedule_batch.py) | | 0.5.23 |
| profile | a profile that cannot be written ends the forward pass (scheduler_components/profiler_manager.py) | | |
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import regex
import torch
from sglang.srt.layers.logprob_processor import LogprobStage
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    RpcReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX, Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_freekv.scheduler_patch import stop_regex

logger = logging.getLogger(__name__)

REGEX_SECONDS = 0.5
MOST_LOGIT = 1e30  # still finite in float32 when divided by the least temperature, 1e-6
NOT_CONTAINED = (  # answer_control lets their exceptions pass: they are our errors, or take_in has answered them
    TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput, TokenizedEmbeddingReqInput, BatchTokenizedEmbeddingReqInput,
    PauseGenerationReqInput, ContinueGenerationReqInput, FlushCacheReqInput, AbortReq, RpcReqInput,
)  # fmt: skip


def even_values(
    result: tuple, logprobs: torch.Tensor, token_ids_logprobs_list, stage: LogprobStage, no_copy_to_cpu: bool = False, **kwargs
) -> tuple:
    """AFTER the logprobs of chosen token ids are gathered: give a request without any an empty tensor instead of an empty list."""
    values, ids = result
    if stage == LogprobStage.DECODE and no_copy_to_cpu:
        values = [value if torch.is_tensor(value) else logprobs.new_empty(0) for value in values]
    return values, ids


def take_in(original: Callable, scheduler, recv_req: TokenizedGenerateReqInput, *args, **kwargs) -> None:
    """AROUND the receipt of one request: an exception becomes its answer, with status 400."""
    try:
        if recv_req.custom_logit_processor is not None:
            CustomLogitProcessor.from_str(recv_req.custom_logit_processor)
            if recv_req.sampling_params.custom_params is None:
                recv_req.sampling_params.custom_params = {}  # SGLang stores the request in it; `_Processor` ends the request through it
        original(scheduler, recv_req, *args, **kwargs)
    except (Exception, SystemExit) as error:
        logger.error("request %s cannot be taken in", recv_req.rid, exc_info=True)
        _refuse(scheduler, recv_req, f"the request cannot be taken in ({type(error).__name__}: {error}); check its fields")


def refuse_empty(error: str | None, req: Req, *args, **kwargs) -> str | None:
    """AFTER a prompt's length is checked: refuse an empty prompt. For a session's first request it is not known earlier."""
    return error or (None if len(req.origin_input_ids) else "input_ids: found no token, expected at least one; send a prompt")


def _refuse(scheduler, recv_req: TokenizedGenerateReqInput, message: str) -> None:
    """Answer as SGLang does when a session does not exist: queue a request of one token, which is aborted in its first step."""
    params = SamplingParams(max_new_tokens=0)
    params.normalize(None)
    req = Req(
        recv_req.rid, None, array("q", [0]), params, stream=recv_req.stream,
        vocab_size=scheduler.model_config.vocab_size, http_worker_ipc=recv_req.http_worker_ipc,
    )  # fmt: skip
    req.tokenizer = scheduler.tokenizer
    req.set_finish_with_abort(message)
    scheduler.init_req_max_new_tokens(req)
    scheduler._add_request_to_queue(req)


def answer_control(original: Callable, dispatcher, obj: Any) -> Any:
    """AROUND the handling of one message: a control request that raises is answered with a failure."""
    if isinstance(obj, NOT_CONTAINED):
        return original(dispatcher, obj)
    try:
        return original(dispatcher, obj)
    except Exception as error:
        logger.error("%s failed", type(obj).__name__, exc_info=True)
        return _failure(obj, f"{type(error).__name__}: {error}")


def _failure(request: Any, message: str) -> Any:
    """A failed answer, of the type that SGLang waits for; None if it waits for none. SGLang names it ``...Output`` for ``...Input``."""
    kind = getattr(io_struct, type(request).__name__.removesuffix("Input") + "Output", None)
    if kind is None:
        return None
    told = {"success": False, "updated": False, "message": message, "error_message": message, "parameter": None, "internal_state": {}}
    told["session_id"] = getattr(request, "session_id", None)
    return kind(**{field.name: told[field.name] for field in msgspec.structs.fields(kind) if field.name in told})


def load_processor(original: Callable, cls: type, json_str: str) -> Callable:
    """AROUND the loading of a custom logit processor, once for every prefill: wrap it so that it can end its own request only."""
    processor = original(cls, json_str)
    if not callable(processor):
        raise ValueError(f"custom_logit_processor: expected a class whose objects can be called, found {type(processor).__name__}")
    return _Processor(processor)


class _Processor:
    """A client's processor. If it raises for a batch, it is called for each request alone, and those for which it raises end."""

    def __init__(self, processor: Callable) -> None:
        self._processor = processor

    def __call__(self, logits: torch.Tensor, params: list[dict]) -> torch.Tensor:
        """Process the logits of all requests that have this processor.

        Args:
            logits: ``[B, vocabulary]``.
            params: ``custom_params`` of each request.

        Returns:
            ``[B, vocabulary]`` logits, unchanged for a request that ends.
        """
        try:
            return self._checked(logits.clone(), params)
        except Exception:
            rows = [self._alone(logits[row : row + 1], params[row]) for row in range(len(params))]
            return torch.cat(rows)

    def _alone(self, logits: torch.Tensor, params: dict) -> torch.Tensor:
        try:
            return self._checked(logits.clone(), [params])
        except Exception as error:
            _end(params["__req__"], f"custom_logit_processor: it raised {type(error).__name__}: {error}; mend it, or its custom_params")
            return logits

    def _checked(self, logits: torch.Tensor, params: list[dict]) -> torch.Tensor:
        shape, result = logits.shape, self._processor(logits, params)
        if not torch.is_tensor(result) or result.shape != shape:
            raise ValueError(f"it returned {getattr(result, 'shape', type(result).__name__)}, expected logits {tuple(shape)}")
        return result


def _end(req: Req, message: str) -> None:
    """Finish a running request in its next step, with status 400."""
    req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def keep_finite(logits: torch.Tensor, sampler, _, sampling_info) -> torch.Tensor:
    """AFTER logits are ready for sampling: if options may have changed them, leave a number to sample from in each row.

    A token that an option excludes keeps -inf, unless its row has no other. Logits of a batch without such options stay as they are.
    """
    info = sampling_info
    options = (info.logit_bias, info.acc_additive_penalties, info.acc_scaling_penalties)
    penalizers = info.penalizer_orchestrator
    changed = info.has_custom_logit_processor or any(info.grammars or ()) or any(option is not None for option in options)
    if changed or (penalizers and penalizers.is_required):
        hopeless = ~logits.isfinite().any(-1, keepdim=True)
        torch.nan_to_num_(logits, nan=-MOST_LOGIT, posinf=MOST_LOGIT, neginf=-torch.inf)
        logits.masked_fill_(hopeless & logits.isneginf(), -MOST_LOGIT)
    return logits


def find_stop_regex(original: Callable, req: Req, new_accepted_len: int = 1) -> bool:
    """AROUND the search of an answer for its stop strings: its regular expressions share ``REGEX_SECONDS`` in each step."""
    params = req.sampling_params
    if not params.stop_regex_strs:
        return original(req, new_accepted_len)
    patterns, params.stop_regex_strs = params.stop_regex_strs, []
    try:
        if original(req, new_accepted_len):
            return True
    finally:
        params.stop_regex_strs = patterns
    text, end = req.tail_str(new_accepted_len), time.monotonic() + REGEX_SECONDS
    for pattern in patterns:
        try:
            found = regex.search(stop_regex.as_re_reads_it(pattern), text, timeout=max(end - time.monotonic(), 1e-6))
        except (TimeoutError, regex.error) as error:
            late = f"was not done in the {REGEX_SECONDS:g} s of a step ({type(error).__name__})"
            message = f"stop_regex: {pattern[:80]!r} {late}; simplify it"
            req.finished_reason = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
            return True
        if found:
            req.finished_reason, req.finished_len = FINISHED_MATCHED_REGEX(matched=pattern), len(req.output_ids)
            return True
    return False


def compile_grammar(original: Callable, backend, key: tuple[str, str], require_reasoning: bool) -> Any:
    """AROUND the compiling of a grammar: a panic becomes an Exception, which SGLang answers with status 400."""
    try:
        return original(backend, key, require_reasoning)
    except Exception:
        raise
    except BaseException as panic:
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from None


def forget_overrides(batch) -> None:
    """BEFORE a decode step: forget the embeddings that a client sent for its prompt."""
    batch.replace_embeds = batch.replace_positions = None


def profile(original: Callable, profiler, *args, **kwargs) -> Any:
    """AROUND the profiler's look at a batch, and the end of a profile: an exception ends the profile, but not the step."""
    try:
        return original(profiler, *args, **kwargs)
    except Exception as error:
        logger.error("the profile failed", exc_info=True)
        _end_profile(profiler)
        return io_struct.ProfileReqOutput(success=False, message=f"the profile failed ({type(error).__name__}: {error})")


def _end_profile(profiler) -> None:
    """Stop the recording, so that the next profile can start."""
    recording, profiler.torch_profiler = getattr(profiler, "torch_profiler", None), None
    profiler.profile_in_progress = profiler.profile_by_stage = False
    profiler.profiler_start_forward_ct = profiler.profiler_target_forward_ct = None
    if recording is not None:
        with suppress(Exception):  # it may have stopped already
            recording.stop()
