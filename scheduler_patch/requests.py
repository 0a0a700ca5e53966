# SPDX-License-Identifier: Apache-2.0
"""Requests that SGLang would take and never answer, or die of."""

from __future__ import annotations

from typing import Literal

import msgspec
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

MAX_REQ_INPUT_LEN = 5  # its place in what get_worker_info returns
SAMPLING_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
SESSION = msgspec.defstruct(  # as it comes in JSON; SGLang's own is an array
    "SessionParams", [(field.name, field.type, None) for field in msgspec.structs.fields(SessionParams)], forbid_unknown_fields=True
)
TYPES = {  # of the other parts of a request, which SGLang passes on as they come
    "stream": bool, "return_logprob": bool, "return_hidden_states": bool | Literal["last"], "return_text_in_logprobs": bool,
    "logprob_start_len": int, "top_logprobs_num": int, "token_ids_logprob": list[int], "priority": int, "rid": str, "extra_key": str,
    "lora_path": str, "custom_logit_processor": str, "session_params": SESSION,
    "positional_embed_overrides": None,  # an object that no JSON makes
}  # fmt: skip
LEAST_INT = -(1 << 63)
MOST_ANSWERS = 1024
JSON_TYPES = (bool, int, float, str, list, dict)


def refuse_bad_request(_, manager, obj, input_ids) -> None:
    """AFTER SGLang has validated a request: what would end the scheduler or the detokenizer, and all other requests with it.

    Raises:
        ValueError: no token ids, or some outside the vocabulary, or parts of a request of a type or size that SGLang does not expect. SGLang
            answers with status 400 and the message.
    """
    vocabulary = manager.model_config.vocab_size  # of what is answered; a model that answers in another than it reads has two
    known = max(vocabulary, getattr(manager.model_config.hf_text_config, "vocab_size", None) or 0)
    if input_ids is not None and not len(input_ids) and not any(getattr(obj, name, None) for name in ("input_embeds", "session_params")):
        raise ValueError("input_ids: found no token, expected at least one; send a prompt")
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < known:
        wrong = min(input_ids) if min(input_ids) < 0 else max(input_ids)
        raise ValueError(f"input_ids: token id {wrong} is out of range, expected 0 to {known - 1}; check the tokenizer")
    asked = getattr(obj, "sampling_params", None) or {}
    told = [(name, value, SAMPLING_TYPES[name]) for name, value in asked.items() if name in SAMPLING_TYPES]
    told += [(name, getattr(obj, name, None), kind) for name, kind in TYPES.items()]
    for name, value, kind in told:
        if type(value) not in JSON_TYPES:  # nobody sends it over HTTP: an Engine's caller knows what it does
            continue
        try:
            msgspec.convert(value, kind)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ValueError(f"{name} is {str(value)[:80]!r}: {error}; send it as SGLang's documentation of requests has it") from None
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not LEAST_INT <= number <= -LEAST_INT - 1:
                raise ValueError(f"{name}: expected a number of 64 bits, found one of {number.bit_length()}")
    session = getattr(obj, "session_params", None) or {}
    if session.get("replace") and session.get("rid") is None:
        raise ValueError("session_params: replace without rid ends SGLang 0.5.17; send the rid of the request to replace, or open a session")
    if not 0 <= (most := getattr(obj, "top_logprobs_num", None) or 0) <= vocabulary:
        raise ValueError(f"top_logprobs_num is {most}, expected 0 to the {vocabulary} tokens of the vocabulary")
    if (start := getattr(obj, "logprob_start_len", None) or 0) < -1:
        raise ValueError(f"logprob_start_len is {start}, expected a position in the prompt, or -1 for none of it")
    if wrong := [number for number in getattr(obj, "token_ids_logprob", None) or () if not 0 <= number < vocabulary]:
        raise ValueError(f"token_ids_logprob: token id {wrong[0]} is out of range, expected 0 to {vocabulary - 1}")


def refuse_too_many_answers(manager, obj, *args, **kwargs) -> None:
    """BEFORE SGLang makes a request of each answer that is asked for, however many.

    Raises:
        ValueError: so many that the process would run out of memory; SGLang answers with status 400 and the message.
    """
    asked = getattr(obj, "sampling_params", None)
    for each in asked if isinstance(asked, list) else [asked]:
        count = each.get("n") if isinstance(each, dict) else None
        if isinstance(count, int | float) and not count <= MOST_ANSWERS:
            raise ValueError(f"sampling_params: n is {count}, expected at most {MOST_ANSWERS} answers; send several requests")


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
