"""Mistakes of clients, sent to SGLang's own endpoints with a manager that answers without a model: status 400, and one line."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_tokenizer
from transformers import AutoTokenizer

from serving import NEEDLE_MODEL
from sglang_freekv import scheduler_patch
from sglang_freekv.scheduler_patch import mistakes, registry

ANSWER = {"text": "x", "output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 1}}


class Manager:
    """As much of SGLang's tokenizer manager as the endpoints use."""

    served_model_name, num_reserved_tokens = "needle", 0
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE_MODEL)
    request_logger = SimpleNamespace(log_requests=False)
    server_args = SimpleNamespace(
        tool_call_parser=None, reasoning_parser=None, default_chat_template_kwargs=None, tokenizer_metrics_allowed_custom_labels=None,
        context_length=None,
    )  # fmt: skip
    model_config = SimpleNamespace(
        is_multimodal=False, context_len=8192, vocab_size=5120, hf_config=SimpleNamespace(model_type="llama", architectures=["Llama"]),
        hf_text_config=SimpleNamespace(vocab_size=5120), get_default_sampling_params=dict,
    )  # fmt: skip

    def config_value(self, name: str):
        return getattr(self.server_args, name)

    async def generate_request(self, obj, request=None):
        obj.normalize_batch_and_arguments()
        yield ANSWER


@pytest.fixture(scope="module")
def client():
    """SGLang's application with the launcher's hooks, which go again after it."""
    set_global_server_args_for_tokenizer(ServerArgs(model_path="dummy", device="cpu"))
    with pytest.MonkeyPatch.context() as patched:
        for patch in filter(registry.Patch.concerns, scheduler_patch.LAUNCHER):
            place, name = patch.target.rsplit(".", 1)
            owner = pkgutil.resolve_name(place)
            patched.setattr(owner, name, vars(owner).get(name, getattr(owner, name)))
        patched.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
        patched.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
        patched.setattr(registry, "_registered", set())
        registry.apply(scheduler_patch.LAUNCHER)
        app, manager, templates = http_server.app, Manager(), TemplateManager()
        patched.setattr(app, "exception_handlers", app.exception_handlers.copy())
        patched.setattr(app, "middleware_stack", None)
        patched.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager, template_manager=templates))
        chat = OpenAIServingChat(manager, templates)
        for name, serving in {
            "openai_serving_chat": chat, "openai_serving_responses": OpenAIServingResponses(manager, templates),
            "openai_serving_detokenize": OpenAIServingDetokenize(manager), "ollama_serving": OllamaServing(manager),
            "anthropic_serving": AnthropicServing(chat),
        }.items():  # fmt: skip
            patched.setitem(app.state._state, name, serving)
        mistakes.answer_client_mistakes()
        yield TestClient(app, raise_server_exceptions=False)


ONE, NO_IMAGE = [{"text": "b"}], [{"role": "user", "content": [{"type": "image"}]}]
CALL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_call_parser": "qwen25"}
ASKED = {"model": "needle", "max_tokens": 3}


@pytest.mark.parametrize("path, body, named", [
    ("/vertex_generate", {"instances": ONE, "parameters": {"bogus": 1}}, "found 'bogus'"),
    ("/vertex_generate", {"instances": ONE, "parameters": {"text": "x"}}, "found 'text'"),
    ("/vertex_generate", {"instances": ONE, "parameters": {"image_data": None}}, "found 'image_data'"),
    ("/vertex_generate", {"instances": [{"sampling_params": 5}]}, "should be provided"),
    ("/detokenize", {"tokens": [-1]}, "token id -1 is out of range, expected 0 to 5119"),
    ("/detokenize", {"tokens": [[5], [2**40]]}, f"token id {2**40}"),
    *(("/v1/responses", ASKED | {"input": messages}, "messages: found none") for messages in ([], [{"type": "reasoning"}])),
    *(("/v1/messages/count_tokens", {"model": "needle", "messages": messages}, "messages: found none") for messages in ([], NO_IMAGE)),
    *(("/v1/messages", ASKED | {"messages": messages}, "Messages cannot be empty") for messages in ([], NO_IMAGE)),
    ("/api/chat", {"model": "needle", "messages": []}, "messages: found none"),
    ("/parse_function_call", CALL | {"text": "<tool_call>\n[5]\n</tool_call>"}, "cannot be read (AttributeError: 'int'"),
], ids=str)  # fmt: skip
def test_a_mistake_is_answered_in_one_line(client, path, body, named):
    answer = client.post(path, json=body)
    error = answer.json().get("error", answer.json())
    assert answer.status_code == 400 and named in error["message"] and "\n" not in error["message"]


HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("path, body", [
    ("/vertex_generate", {"instances": ONE, "parameters": {"sampling_params": {"max_new_tokens": 3}}}),
    ("/vertex_generate", {"instances": []}), ("/detokenize", {"tokens": [[5, 5119], []]}), ("/detokenize", {"tokens": []}),
    ("/v1/messages/count_tokens", {"model": "needle", "messages": HELLO}),
    ("/parse_function_call", CALL | {"text": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}),
], ids=str)  # fmt: skip
def test_what_is_sound_is_answered(client, path, body):
    assert client.post(path, json=body).status_code == 200


def test_a_chat_template_that_fails_is_the_clients_mistake(client, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("role\nof two lines")

    monkeypatch.setattr(Manager.tokenizer, "apply_chat_template", fails)
    for path in ("/v1/messages/count_tokens", "/v1/messages", "/v1/responses", "/api/chat"):
        answer = client.post(path, json=ASKED | {"messages": HELLO, "input": "Hello."})
        assert answer.status_code == 400 and "KeyError" in answer.text, f"{path}: {answer.text}"
    assert client.post("/v1/messages", json=ASKED | {"messages": HELLO}).json()["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_server_stays_one(client, monkeypatch):
    async def fails(self, obj, request=None):
        raise RuntimeError("no scheduler")
        yield

    monkeypatch.setattr(Manager, "generate_request", fails)
    assert client.post("/v1/messages", json=ASKED | {"messages": HELLO}).status_code == 500
    assert client.post("/vertex_generate", json={"instances": ONE}).status_code == 500


class Grammar:
    """Refuses one token."""

    finished = False

    def accept_token(self, token: int) -> None:
        if token == 5:
            raise ValueError("parser stopped")

    def is_terminated(self) -> bool:
        return False


@pytest.mark.parametrize("token", [4, 5])
def test_a_token_that_its_grammar_refuses_ends_a_request_as_its_mistake(token):
    for arguments in (
        lambda req: ("_apply_prefill_grammar", (), {"req": req, "next_token_id": token}),
        lambda req: ("_accept_grammar_tokens", (req, token), {}),
    ):
        req = SimpleNamespace(rid="r", grammar=Grammar(), to_finish=None, finished=lambda: False)
        name, positional, named = arguments(req)
        mistakes.blame_options(getattr(SchedulerBatchResultProcessor, name), None, *positional, **named)
        ended = req.to_finish and req.to_finish.to_json()
        assert ended == (
            {"type": "abort", "message": mistakes.NO_TOKEN, "status_code": 400, "err_type": "BadRequestError"} if token == 5 else None
        )
