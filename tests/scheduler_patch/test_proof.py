"""A hook that is attached but not called stops the start: one of the launcher the first answer, one of a scheduler its announcement."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from types import SimpleNamespace

import pytest
from fastapi import HTTPException, Request
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import run_scheduler_process

from sglang_freekv import releases, scheduler_patch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.scheduler_patch import activation, mistakes, observe, proof, registry
from sglang_freekv.scheduler_patch.arguments import CONFIG
from sglang_freekv.scheduler_patch.registry import COUNTED, DECODE, HTTP_REQUEST, REQUEST, SAMPLE, STEP, TEXT_REQUEST, Drift

PASSED = [patch for patch in scheduler_patch.launcher("cuda") if patch.due in (REQUEST, TEXT_REQUEST, HTTP_REQUEST) and patch.concerns()]
STEPPED = [patch for patch in scheduler_patch.scheduler("cpu") if patch.due in (STEP, SAMPLE, DECODE) and patch.concerns()]
ARGS = SimpleNamespace(**{CONFIG: FreeKVConfig(), "enable_tokenizer_batch_encode": False})
BY_HTTP = Request({"type": "http", "path": "/generate", "headers": []})
ANSWERED = {"completion_tokens": 1, "finish_reason": {"type": "length"}, "freekv": {"decode_steps": 0}}


@pytest.fixture(autouse=True)
def attached(monkeypatch):
    """All hooks of the launcher are attached, and none has been called."""
    monkeypatch.setattr(proof, "resolved", lambda server_args: server_args)
    monkeypatch.setattr(registry, "_registered", set(PASSED))
    for name in ("_called", "_proven"):
        monkeypatch.setattr(registry, name, set())


def ask(server_args=ARGS, request: Request | None = None, stream: bool = True, **changes) -> list[dict]:
    """The answers to a request with a text, the last of which has these changes in its meta_info. A request that is not streamed has one."""

    async def answers(manager, obj, request):
        if stream:
            yield {"text": "first", "output_ids": [1], "meta_info": ANSWERED | {"finish_reason": None}}
        last = {name: value for name, value in (ANSWERED | changes).items() if value is not None}
        yield {"text": "last", "output_ids": [1, 2], "meta_info": last}

    async def collect():
        manager = SimpleNamespace(server_args=server_args)
        return [answer async for answer in proof.wait_for_answer(answers, manager, GenerateReqInput(text="a", stream=stream), request)]

    return asyncio.run(collect())


def test_what_is_due_is_all_that_a_request_passes():
    assert {patch.target.rpartition(".")[2] for patch in PASSED} == {
        "__init__", "generate_request", "normalize_batch_and_arguments", "_create_tokenized_object", "_tokenize_one_request",
        "_wait_one_response", "_setup_and_run_http_server", "run_endpoint_function", "solve_dependencies",
    }  # fmt: skip


@pytest.mark.parametrize("missed", PASSED, ids=lambda patch: patch.hook)
def test_an_answer_that_did_not_pass_a_hook_is_an_error_each_time(missed):
    registry._called.update(set(PASSED) - {missed})
    for _ in range(2):
        with pytest.raises(HTTPException, match=f"500: .*{missed.target} is hooked, but {missed.due} did not call it; use SGLang 0.5.17"):
            ask(request=BY_HTTP, stream=False)
        (only,) = ask(request=BY_HTTP)  # not even the first chunk of a stream says what the model did
        finish = only["meta_info"]["finish_reason"]
        assert (only["text"], only["output_ids"], finish["type"]) == ("", [], "abort") and missed.target in finish["message"]
        assert finish["status_code"].name == "INTERNAL_SERVER_ERROR"  # the OpenAI API asks for a name
    registry._called.add(missed)
    assert len(ask(request=BY_HTTP)) == 2 and registry.is_proven({REQUEST, TEXT_REQUEST, HTTP_REQUEST, COUNTED})


def test_an_engine_passes_no_hook_of_the_server():
    with pytest.raises(Drift, match=f"but {REQUEST} did not call it"):
        ask()
    registry._called.update(patch for patch in PASSED if patch.due != HTTP_REQUEST)
    assert len(ask()) == 2 and not registry.is_proven({HTTP_REQUEST})


def test_an_answer_without_counts_is_an_error():
    registry._called.update(PASSED)
    with pytest.raises(Drift, match="_maybe_collect_customized_info is hooked, but an answer came without its counts"):
        ask(freekv=None)
    assert not registry.is_proven({COUNTED}) and ask(request=BY_HTTP, freekv=None)[-1]["text"] == ""


def test_an_aborted_answer_proves_nothing():
    assert len(ask(stream=False, freekv=None, finish_reason={"type": "abort"})) == 1 and not registry._proven


def test_without_retrieval_nothing_is_asked():
    assert len(ask(SimpleNamespace(), freekv=None)) == 2


@pytest.mark.parametrize("called", [True, False])
def test_a_server_is_ready_when_its_hooks_were_called(monkeypatch, called):
    ended, ready = [], []
    monkeypatch.setattr(proof, "kill_process_tree", ended.append)

    def run(server_args, execute_warmup_func=lambda server_args: True):
        ready.append(execute_warmup_func(server_args))

    registry._called.update(PASSED if called else ())
    proof.serve(run, ARGS)
    assert (ready, len(ended)) == ([called], not called)


def test_drift_is_no_clients_mistake():
    assert asyncio.run(mistakes._answer(BY_HTTP, registry.drift("a.b", "is gone"))).status_code == 500
    assert asyncio.run(mistakes._answer(BY_HTTP, ValueError("a"))).status_code == 400


def process(prefill_only: bool = False, decode: bool = True, finished: bool = False) -> bool:
    """Let a scheduler process the results of a step; returns whether SGLang came to do so."""
    processed = []
    req = SimpleNamespace(finished=lambda: finished)
    batch = SimpleNamespace(is_prefill_only=prefill_only, forward_mode=SimpleNamespace(is_decode=lambda: decode), reqs=[req])
    scheduler = SimpleNamespace(_freekv_observer=SimpleNamespace(quarantine=None, export=lambda: None))
    observe.process_batch_result(lambda *args: processed.append(args), scheduler, batch, SimpleNamespace(logits_output=None))
    return bool(processed)


def test_what_is_due_is_all_that_a_step_passes():
    everywhere = {
        "add_one_req", "run_batch", "forward_batch_generation", "process_batch_result", "handle_generate_request", "__call__",
        "_preprocess_logits", "validate_input_length", "_check_str_based_finish", "_profile_batch_predicate",
    }  # fmt: skip
    older = {"_abort_on_waiting_timeout", "prepare_for_decode", "support_triton", "alloc_extend", "alloc_decode"}
    assert {patch.target.rpartition(".")[2] for patch in STEPPED} == everywhere | (set() if releases.is_since("0.5.23") else older)


@pytest.mark.parametrize("missed", STEPPED, ids=lambda patch: f"{patch.due}: {patch.hook}")
def test_a_step_that_did_not_pass_a_hook_ends_its_scheduler(monkeypatch, missed):
    monkeypatch.setattr(registry, "_registered", set(STEPPED))
    registry._called.update(set(STEPPED) - {missed})
    with pytest.raises(Drift, match=f"{missed.target} is hooked, but {missed.due} did not call it"):
        process()
    due = {STEP: [], SAMPLE: [{"prefill_only": True, "decode": False}], DECODE: [{"decode": False}, {"finished": True}]}
    assert all(process(**passes_by) for passes_by in due[missed.due])
    registry._called.add(missed)
    assert process() and registry.is_proven({STEP, SAMPLE, DECODE})


class Pipe:
    def __init__(self) -> None:
        self.sent = []

    def send(self, info: dict) -> None:
        self.sent.append(info)


BETWEEN = list(inspect.signature(run_scheduler_process).parameters).index("pipe_writer") - 1  # arguments between server_args and the pipe


def scheduler_process(info: dict, *args):
    """A caller's own, with no names for its arguments."""
    args[1 + BETWEEN].send(info)


@pytest.mark.parametrize("rank", range(2))
def test_each_scheduler_says_that_it_is_hooked_or_is_not_ready(rank, monkeypatch):
    monkeypatch.setattr(activation, "_announces", False)
    sound, stock = Pipe(), Pipe()
    between = [rank] * BETWEEN
    activation.run_scheduler(partial(scheduler_process, {"freekv": {}, "status": "ready"}), ARGS, *between, sound)
    with pytest.raises(Drift, match="get_init_info is hooked, but a scheduler started without calling it"):
        activation.run_scheduler(partial(scheduler_process, {"status": "ready"}), ARGS, *between, stock)
    assert len(sound.sent) == 1 and not stock.sent


def test_the_launcher_hands_its_own_start_of_a_scheduler_on(monkeypatch):
    monkeypatch.setattr(activation, "verify", lambda patches: None)
    monkeypatch.setattr(activation, "apply", lambda patches: None)
    monkeypatch.setattr(activation, "resolved", lambda server_args: SimpleNamespace(device="cpu", tokenizer_worker_num=1))
    monkeypatch.setattr(activation, "_announces", False)
    args, handed = SimpleNamespace(**{CONFIG: FreeKVConfig()}), []

    def launch(cls, server_args, init_tokenizer_manager_func, run_scheduler_process_func):
        handed.append(run_scheduler_process_func)

    activation.in_launcher(launch, None, args, None, partial(scheduler_process, {"freekv": {}}))
    with pytest.raises(Drift, match="_launch_subprocesses did not hand its run_scheduler_process_func on"):
        activation.in_scheduler(args, 0)
    pipe = Pipe()
    handed[0](args, *[0] * BETWEEN, pipe)
    assert pipe.sent == [{"freekv": {}}] and activation._announces
