"""What a client may put in the fields of a request, without a server."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_freekv.scheduler_patch import fields

MODEL = SimpleNamespace(vocab_size=5120, context_len=4096, hidden_size=4, hf_text_config=SimpleNamespace(vocab_size=5120))


def normalized(**body) -> GenerateReqInput:
    request = GenerateReqInput(**{"input_ids": [5, 6, 7]} | body)
    fields.normalize(GenerateReqInput.normalize_batch_and_arguments, request)
    return request


NAN, INF = float("nan"), float("inf")
BAD_SAMPLING = [
    ({"unknown": 1}, "found 'unknown', expected one of max_new_tokens"), ({"is_normalized": True}, "found 'is_normalized'"),
    ({"n": 1.5}, "n is '1.5'"), ({"n": 0}, "n is 0, expected 1 to 1024"), ({"n": 2**31}, "n is 2147483648, expected 1 to 1024"),
    ({"n": True}, "n is 'True'"), ({"top_k": 2**33}, "expected -1 to 2147483647"), ({"top_k": 2**70}, "expected a number of 64 bits"),
    ({"min_new_tokens": 2**31}, "expected 0 to 2147483647"), ({"max_new_tokens": "4"}, "Expected `int | null`, got `str`"),
    ({"temperature": NAN}, "temperature is nan"), ({"temperature": 1e39}, "expected 0 to 1000000"), ({"top_p": 1e-300}, "top_p is 1e-300"),
    ({"repetition_penalty": 1e-300}, "expected 1e-06 to 2"), ({"stream_interval": 0}, "stream_interval is 0"),
    ({"logit_bias": {"5": NAN}}, "token 5 is nan"), ({"logit_bias": {"5": INF}}, "token 5 is inf"), ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_regex": "("}, "stop_regex: '(' is no regular expression"), ({"stop_regex": "(" * 5000}, "is no regular expression"),
    ({"stop_regex": "((a{1000}){1000}){1000}"}, "has 1000000000 characters"), ({"stop_regex": "a" * 10_001}, "of 10001 characters"),
    ({"stop_regex": "((a*){4000000}){4000000}"}, "written out, expected at most 10000"), ({"stop_regex": "(?:ab|cd){2501}"}, "has 10004"),
    ({"custom_params": {"a": 2**70}}, "custom_params: expected a number of 64 bits"),
    ({"custom_params": {"a": [5, 2**70]}}, "custom_params: expected a number of 64 bits"),
    ({"sampling_seed": 2**70}, "sampling_seed"), ({"stop_token_ids": {"a": 1}}, "stop_token_ids"), ({"json_schema": {}}, "json_schema"),
    ({"skip_special_tokens": "yes"}, "skip_special_tokens"), ({"custom_params": [[[1]]]}, "custom_params"),
]  # fmt: skip


@pytest.mark.parametrize("params, named", BAD_SAMPLING, ids=str)
def test_a_bad_sampling_parameter_is_named(params, named):
    for asked in (params, [params]):
        with pytest.raises(ValueError) as refused:
            normalized(sampling_params=asked, input_ids=[[5, 6]] if isinstance(asked, list) else [5, 6])
        assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("body, named", [
    ({"bootstrap_host": "2.2.2.2"}, "bootstrap_host: expected none"), ({"bootstrap_room": 5}, "bootstrap_room"),
    ({"http_worker_ipc": "ipc:///x"}, "SGLang sets it"), ({"lora_id": "x"}, "from lora_path"),
    ({"positional_embed_overrides": {"a": 1}}, "no JSON makes it"), ({"multi_item_delimiter_indices": [1]}, "SGLang sets it"),
    ({"rid": ["a"]}, "rid: expected a string, found ['a']"), ({"rid": [5], "input_ids": [[5], [6]]}, "rids length mismatch"),
    ({"rid": [5, 6], "input_ids": [[5], [6]]}, "rid: expected a string for each prompt"),
    ({"lora_path": ["a"], "input_ids": [[5], [6]]}, "cannot be read (IndexError"), ({"sampling_params": []}, "cannot be read (IndexError"),
    ({"input_ids": None, "input_embeds": [[]]}, "cannot be read (IndexError"),
    *[({"sampling_params": each}, "sampling_params: expected an object, or one for each prompt, found") for each in ([None], [3], ["a"], "ab")],
    ({"video_data": "a.mp4"}, "video_data: expected none, because only images"), ({"audio_data": [["a.wav"]]}, "audio_data: expected none"),
    *[({"token_indices_to_pool": [9]}, "in setwise scoring")] * hasattr(GenerateReqInput, "token_indices_to_pool"),
], ids=str)  # fmt: skip
def test_a_bad_field_is_named(body, named):
    with pytest.raises(ValueError) as refused:
        normalized(**body)
    assert named in str(refused.value)


def test_what_is_sound_passes():
    assert normalized(sampling_params={"n": None, "top_k": None, "max_new_tokens": None}).is_single
    assert normalized(sampling_params={"stop_regex": [r"(?:[A-Za-z]+, ){0,99}[^a-c]{2,}$", "(?i)(?=end)|.{0,5000}"]}).is_single
    assert normalized(sampling_params={"n": 3, "top_k": -1, "stop_regex": [r"\d+"], "logit_bias": {"5": -100}}).batch_size == 1
    assert normalized(input_ids=[[5], [6]], rid=["a", "b"], priority=None)[1].rid == "b"
    assert normalized(image_data="a.png", video_data=[None], audio_data=[]).is_single  # as the OpenAI endpoints make them


def tokenized(input_ids=(5, 6, 7), input_embeds=None, **body):
    request = normalized(input_ids=None if input_embeds else list(input_ids), input_embeds=input_embeds, **body)
    made = {name: None for name in fields.TOKENIZED} | {"rid": "r"}

    def original(manager, obj, text, ids, *rest):
        return SimpleNamespace(**made | {"input_ids": array("q", ids), "token_ids_logprob": obj.token_ids_logprob, "bootstrap_port": None} | {
            name: getattr(obj, name) for name in ("stream", "session_id", "extra_key", "routed_experts_start_len")
        })  # fmt: skip

    return fields.tokenize(original, SimpleNamespace(model_config=MODEL), request, None, request.input_ids, request.input_embeds)


@pytest.mark.parametrize("body, named", [
    ({"input_ids": [5, 5120]}, "token id 5120 is out of range, expected 0 to 5119"), ({"input_ids": [-1]}, "token id -1"),
    ({"sampling_params": {"stop_token_ids": [5120]}}, "stop_token_ids: token id 5120"), ({"return_logprob": True, "top_logprobs_num": 5121}, "top_log"),
    ({"return_logprob": True, "token_ids_logprob": [[5]]}, "token_ids_logprob is"), ({"logprob_start_len": -9}, "logprob_start_len is -9"),
    ({"return_logprob": True, "top_logprobs_num": 5120, "sampling_params": {"max_new_tokens": None}}, "expected at most 16777216"),
    ({"custom_logit_processor": "x", "sampling_params": {"custom_params": {"token_ids": [5, 5120]}}}, "token_ids: token id 5120"),
    ({"session_params": {"bogus": 5}}, "unknown field `bogus`"), ({"session_params": {"id": "s", "offset": 1.5}}, "at `$.offset`"),
    ({"session_params": {"id": "s", "replace": True}}, "replace without rid"), ({"extra_key": {}}, "extra_key"),
    ({"routed_experts_start_len": 2**70}, "routed_experts_start_len: expected a number of 64 bits"),
    ({"input_embeds": [[0.1] * 4, [0.1] * 3]}, "rows of [3, 4] numbers, expected 4"), ({"input_embeds": [[0.1] * 5]}, "rows of [5] numbers"),
    ({"input_embeds": [[NAN] * 4]}, "expected numbers from"), ({"input_embeds": [[1e300] * 4]}, "expected numbers from"),
    ({"input_embeds": [[0.1] * 4], "session_params": {"id": "s"}}, "leave out session_params"), ({"image_data": "a.png"}, "reads text alone"),
], ids=lambda value: str(value)[:60])  # fmt: skip
def test_what_the_model_tells_is_looked_at(body, named):
    with pytest.raises(ValueError) as refused:
        tokenized(**body)
    assert named in str(refused.value)


def test_embeddings_become_overrides_of_tokens():
    request = tokenized(input_embeds=[[0.5] * 4, [0.25] * 4])
    overrides = request.positional_embed_overrides
    assert list(request.input_ids) == [1, 1] and overrides.positions == [0, 1] and overrides.embeds.tolist() == [[0.5] * 4, [0.25] * 4]


def test_stray_tokens_of_images_are_looked_for():
    image = SimpleNamespace(mm_tokens_per_image=2, boi_token_index=7, eoi_token_index=9)
    manager = SimpleNamespace(model_config=SimpleNamespace(**vars(MODEL), hf_config=image))
    request = normalized(input_ids=[7, 8, 8, 9, 8], image_data=["a.png"])
    read = SimpleNamespace(mm_items=[SimpleNamespace(offsets=[(1, 2), (4, 4)])])
    with pytest.raises(ValueError, match="expected tokens of images in their 1 places alone"):
        fields.tokenize(None, manager, request, None, request.input_ids, None, read)


def test_what_nobody_foresaw_is_logged(caplog):
    with pytest.raises(ValueError, match="cannot be read"):
        normalized(sampling_params=[])
    assert "IndexError" in caplog.text and "Traceback" in caplog.text
