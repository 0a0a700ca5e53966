# SPDX-License-Identifier: Apache-2.0
"""Checks the fields of a request. SGLang declares their types but does not check them all, and a wrong one can end its scheduler.

The types are read from SGLang's own structs. `RANGES` adds the range of each number, which its tensor or SGLang's arithmetic sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_freekv.scheduler_patch import images, stop_regex
from sglang_freekv.scheduler_patch.mistakes import as_clients_mistake

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
MOST_ANSWERS = 1024
MOST_LOGPROBS = 1 << 24  # values of one request; in Python each takes some 70 bytes in three processes
MOST_EMBEDDING = 1e4  # fits float16, and sums of squares fit float32
JSON_TYPES = (bool, int, float, str, list, dict)
HEALTH_RID, HEALTH_PATHS = "HEALTH_CHECK", ("/health", "/health_generate")

SET_BY_SGLANG = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
SAMPLING = {field.name: field.type for field in msgspec.structs.fields(SamplingParams) if field.name not in SET_BY_SGLANG}
TOKENIZED = {field.name: field.type for field in msgspec.structs.fields(TokenizedGenerateReqInput) if field.name != "sampling_params"}
SESSION = msgspec.defstruct(  # clients send an object; SGLang's own struct is an array
    "SessionParams", [(field.name, field.type, None) for field in msgspec.structs.fields(SessionParams)], forbid_unknown_fields=True
)
RANGES = {  # of sampling_params: least, most, reason
    "n": (1, MOST_ANSWERS, "as many requests are made at once"),
    "top_k": (-1, INT32, "it ends in a tensor of 32 bits"),
    "min_new_tokens": (0, INT32, "it ends in a tensor of 32 bits"),
    "max_new_tokens": (0, INT64, "it is a number of 64 bits"),
    "sampling_seed": (-INT64 - 1, INT64, "it ends in a tensor of 64 bits"),
    "stream_interval": (1, INT32, "answers are streamed every so many tokens"),
    "temperature": (0, 1e6, "logits are divided by it in float32"),
    "top_p": (1e-30, 1, "it ends in a tensor of float32"),
    "min_p": (0, 1, "it is a probability"),
    "repetition_penalty": (1e-6, 2, "logits are divided by it in float32"),
}
MOST_BIAS = 1e30
OF_SGLANG = {  # fields that only SGLang's processes and disaggregated servers send to each other, and why a client may not
    "http_worker_ipc": "SGLang sets it", "lora_id": "SGLang sets it, from lora_path", "positional_embed_overrides": "no JSON makes it",
    "need_wait_for_mm_inputs": "SGLang sets it", "num_items_assigned": "SGLang sets it", "mm_data_mooncake": "SGLang sets it",
    "encoder_urls": "SGLang sets it", "multi_item_delimiter_indices": "SGLang sets it, in scoring",
    "token_indices_to_pool": "SGLang sets it, in setwise scoring, which is not served so far",
} | dict.fromkeys(  # with a fake bootstrap host, stock SGLang loses the pages of a prompt longer than a chunk (sglang#36855)
    ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank"),
    "this server is not disaggregated",
)  # fmt: skip
NOT_TESTED = ("video_data", "audio_data")  # of what models read


def refuse_unanswered(manager, obj, request=None) -> None:
    """BEFORE a request is taken: refuse two kinds that the scheduler does not serve.

    It answers a priority with status 503 if priorities are disabled, and a request that is named like a health check may never be answered.

    Raises:
        ValueError: the message names the field; SGLang answers with status 400 and the message.
    """
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    if isinstance(obj, GenerateReqInput) and obj.priority is not None and not manager.server_args.enable_priority_scheduling:
        if manager.server_args.abort_on_priority_when_disabled:
            raise ValueError("priority: expected none without --enable-priority-scheduling; leave it out, or start the server with it")
    if request is not None and request.url.path not in HEALTH_PATHS:
        if any(str(rid).startswith(HEALTH_RID) for rid in rids):
            raise ValueError(f"rid: found one that starts with {HEALTH_RID}, which SGLang's health checks do; choose another")


def normalize(original: Callable, obj) -> None:
    """AROUND the splitting of a request by prompt and answer: check its fields before, and that each part can be made after.

    Raises:
        ValueError: the message names the field; SGLang answers with status 400 and the message.
    """
    generates = isinstance(obj, GenerateReqInput)
    if generates:
        for name, reason in OF_SGLANG.items():
            if isinstance(getattr(obj, name, None), JSON_TYPES):
                raise ValueError(f"{name}: expected none, because {reason}; leave it out")
        for name in NOT_TESTED:
            if any(each is not None for each in _leaves(getattr(obj, name, None))):
                raise ValueError(f"{name}: expected none, because only images have been tested with KV retrieval; leave it out")
        asked = obj.sampling_params
        for params in asked if isinstance(asked, list) else [asked or {}]:
            if not isinstance(params, dict):
                raise ValueError(
                    f"sampling_params: expected an object, or one for each prompt, found {str(params)[:80]}; send JSON objects"
                )
            _check_sampling(params)
    as_clients_mistake(original, obj)
    if not all(isinstance(rid, str) for rid in ([obj.rid] if obj.is_single else obj.rid)):
        raise ValueError(f"rid: expected {'a string' if obj.is_single else 'a string for each prompt'}, found {str(obj.rid)[:80]}")
    if generates and not obj.is_single:
        as_clients_mistake(lambda: [obj[i] for i in range(obj.batch_size)])
        vars(obj).pop("_sub_obj_cache", None)  # SGLang changes the request again before it takes its parts


def tokenize(original: Callable, manager, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, token_type_ids=None):
    """AROUND the making of the object that goes to the scheduler: check all fields that could end the scheduler.

    Input embeddings become overrides of the tokens at given positions. SGLang can batch these with other requests, but not its lists of
    embeddings.

    Raises:
        ValueError: as `normalize`.
    """
    generates = isinstance(obj, GenerateReqInput)
    overrides = None
    if generates:
        if input_embeds is not None:
            overrides = _overrides(obj, input_embeds, manager.model_config.hidden_size)
            input_ids, input_embeds = [1] * len(overrides.positions), None
        _check_request(manager.model_config, obj, input_ids)
        images.refuse_unread(obj.image_data, mm_inputs)
        images.refuse_stray(manager.model_config, input_ids, mm_inputs)
    tokenized = as_clients_mistake(original, manager, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids)
    if generates:
        for name, kind in TOKENIZED.items():
            _check_type(name, getattr(tokenized, name), kind)
        if overrides is not None:
            tokenized.positional_embed_overrides = overrides
    return tokenized


def refuse_unknown_tokens(serving, adapted_request, request, raw_request) -> None:
    """BEFORE tokens are turned into text: refuse ids that the model does not have.

    Raises:
        ValueError: as `normalize`.
    """
    if ids := list(_leaves(request.tokens)):
        _check_known("tokens", ids, serving.tokenizer_manager.model_config)


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless ``value`` has the declared type. A value of no JSON type comes from ``Engine``, and is not checked."""
    if type(value) not in JSON_TYPES:
        return
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is {str(value)[:80]!r}: {error}; send it as SGLang's documentation of requests has it") from None
    for number in _leaves(value):
        if isinstance(number, int) and not -INT64 - 1 <= number <= INT64:
            raise ValueError(f"{name}: expected a number of 64 bits, found one of {number.bit_length()}; send a smaller one")


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and dicts, whose depth the checked type bounds."""
    if not isinstance(value, list | dict):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _leaves(inner)


def _check_sampling(params: dict[str, Any]) -> None:
    if "n" in params and params["n"] is None:  # for every other field SGLang takes null as the default
        del params["n"]
    for name, value in params.items():
        if name not in SAMPLING:
            raise ValueError(f"sampling_params: found {name!r}, expected one of {', '.join(SAMPLING)}; leave it out")
        _check_type(name, value, SAMPLING[name])
        if name in RANGES and isinstance(value, int | float):
            least, most, reason = RANGES[name]
            if not least <= value <= most:
                raise ValueError(f"sampling_params: {name} is {value}, expected {least} to {most}, because {reason}")
    for token, bias in (params.get("logit_bias") or {}).items():
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ValueError(f"logit_bias: that of token {token} is {bias}, expected {-MOST_BIAS:g} to {MOST_BIAS:g}")
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        stop_regex.check(pattern)


def _check_request(model, obj: GenerateReqInput, input_ids: list[int] | None) -> None:
    vocabulary = model.vocab_size  # of the output; some models have another one for the input
    if input_ids is not None and not len(input_ids) and not obj.session_params:
        raise ValueError("input_ids: found no token, expected at least one; send a prompt")
    if input_ids:
        _check_known("input_ids", input_ids, model)
    _check_type("session_params", obj.session_params, SESSION)
    session = obj.session_params or {}
    if session.get("replace") and session.get("rid") is None:
        raise ValueError("session_params: replace without rid ends stock SGLang; send the rid of the request to replace, or open a session")
    for name in ("return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob"):
        _check_type(name, getattr(obj, name), TOKENIZED[name])
    most, start = obj.top_logprobs_num or 0, obj.logprob_start_len or 0
    if not 0 <= most <= vocabulary:
        raise ValueError(f"top_logprobs_num is {most}, expected 0 to the {vocabulary} tokens of the vocabulary")
    if start < -1:
        raise ValueError(f"logprob_start_len is {start}, expected a position in the prompt, or -1 for none of it")
    chosen = {"token_ids_logprob": obj.token_ids_logprob, "stop_token_ids": obj.sampling_params.get("stop_token_ids")}
    if obj.custom_logit_processor:  # its processors index logits with them, and one out of range ends a GPU
        chosen["custom_params: token_ids"] = _whole_numbers((obj.sampling_params.get("custom_params") or {}).get("token_ids"))
    for name, ids in chosen.items():
        if wrong := [number for number in ids or () if not 0 <= number < vocabulary]:
            raise ValueError(f"{name}: token id {wrong[0]} is out of range, expected 0 to {vocabulary - 1}; check the tokenizer")
    prompt = max(0, len(input_ids or ()) - start) if start >= 0 else 0
    answer = obj.sampling_params.get("max_new_tokens", 128)
    positions = prompt + (model.context_len if answer is None else min(answer, model.context_len))
    if obj.return_logprob and (values := positions * (most + len(obj.token_ids_logprob or ()))) > MOST_LOGPROBS:
        raise ValueError(
            f"return_logprob: found {values} values asked for at {positions} positions, expected at most {MOST_LOGPROBS}; lower "
            "top_logprobs_num, token_ids_logprob or max_new_tokens, or raise logprob_start_len"
        )


def _check_known(name: str, ids: list[int], model) -> None:
    """Raise ValueError unless the model's input or output has all tokens."""
    known = max(model.vocab_size, getattr(model.hf_text_config, "vocab_size", None) or 0)
    if not 0 <= min(ids) <= max(ids) < known:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"{name}: token id {wrong} is out of range, expected 0 to {known - 1}; check the tokenizer")


def _whole_numbers(value: Any) -> list[int]:
    return [number for number in _leaves(value) if isinstance(number, int) and not isinstance(number, bool)]


def _overrides(obj: GenerateReqInput, rows: list[list[float]], width: int) -> PositionalEmbeds:
    """``rows`` as embeddings ``[tokens, width]`` float32, which replace those of a prompt's tokens.

    Raises:
        ValueError: the request goes on a session, a row has another width, or a number is too large.
    """
    if obj.session_params:
        raise ValueError("input_embeds: a session goes on from tokens, not from embeddings; leave out session_params")
    widths = {len(row) for row in rows}
    if widths != {width}:
        raise ValueError(f"input_embeds: found rows of {sorted(widths)[:4]} numbers, expected {width}, the model's hidden size")
    embeds = torch.tensor(rows, dtype=torch.float32)
    if not (embeds.abs() <= MOST_EMBEDDING).all():
        raise ValueError(f"input_embeds: expected numbers from {-MOST_EMBEDDING:g} to {MOST_EMBEDDING:g}, found others; scale them")
    return PositionalEmbeds(embeds=embeds, positions=list(range(len(rows))))
