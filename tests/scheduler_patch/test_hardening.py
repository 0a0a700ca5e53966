"""What would end a stock scheduler: each weakness is met by its function in hardening.py, without a server."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logprob_processor import LogprobStage, get_token_ids_logprobs_raw
from sglang.srt.managers import io_struct
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_freekv.scheduler_patch import hardening


def test_requests_with_and_without_chosen_token_ids_have_tensors_alike():
    logprobs = torch.arange(15.0).view(3, 5)
    asked = dict(stage=LogprobStage.DECODE, no_copy_to_cpu=True)
    result = get_token_ids_logprobs_raw(logprobs, [None, [1, 3], None], **asked)
    values, ids = hardening.even_values(result, logprobs, [None, [1, 3], None], **asked)
    assert [value.tolist() for value in values] == [[], [6.0, 8.0], []] and ids == [[], [1, 3], []]


class Scheduler:
    """As much of one as takes a request in."""

    model_config = SimpleNamespace(vocab_size=8)
    tokenizer = None

    def __init__(self, original) -> None:
        self.original, self.queue = original, []

    def init_req_max_new_tokens(self, req) -> None:
        pass

    def _add_request_to_queue(self, req) -> None:
        self.queue.append(req)

    def take_in(self, **fields):
        recv = SimpleNamespace(rid="r", stream=False, http_worker_ipc=None, sampling_params=SamplingParams(), custom_logit_processor=None)
        hardening.take_in(lambda scheduler, recv_req: self.original(recv_req), self, SimpleNamespace(**vars(recv) | fields))
        return self.queue


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: SimpleNamespace(tp_rank=0))


def test_what_sglang_tells_beside_a_request_is_handed_on():
    """From 0.5.23 on an image that cannot be read is told so."""
    received, recv = [], SimpleNamespace(custom_logit_processor=None)
    hardening.take_in(lambda *args, **kwargs: received.append((args, kwargs)), "scheduler", recv, mm_input_error="why")
    assert received == [(("scheduler", recv), {"mm_input_error": "why"})]


@pytest.mark.parametrize("error", [TypeError("of None"), KeyError("lora"), RecursionError("deep"), SystemExit(3)])
def test_what_a_request_raises_is_its_answer(one_rank, error):
    def original(recv_req):
        raise error

    (req,) = Scheduler(original).take_in()
    finish = req.to_finish.to_json()
    assert finish["status_code"] == 400 and type(error).__name__ in finish["message"] and len(req.origin_input_ids) == 1


@pytest.mark.parametrize("text", ["x", "{}", '{"callable": "80"}', '{"callable": "zz"}', '{"callable": "4b052e"}'])
def test_a_processor_that_cannot_be_loaded_is_refused(one_rank, text):
    (req,) = Scheduler(lambda recv_req: None).take_in(custom_logit_processor=text)
    assert req.to_finish.to_json()["status_code"] == 400


def test_a_control_request_that_raises_is_answered():
    def fails(dispatcher, obj):
        raise AssertionError("Cache flush failed")

    update = io_struct.UpdateWeightFromDiskReqInput(model_path="x")
    answer = hardening.answer_control(fails, None, update)
    assert isinstance(answer, io_struct.UpdateWeightFromDiskReqOutput) and not answer.success and "Cache flush failed" in answer.message
    assert hardening.answer_control(fails, None, io_struct.ProfileReq(req_type=io_struct.ProfileReqType.START_PROFILE)).success is False
    assert hardening.answer_control(fails, None, io_struct.SetInternalStateReq(server_args={})).updated is False
    assert hardening.answer_control(fails, None, io_struct.ConfigureLoggingReq()) is None
    with pytest.raises(AssertionError):  # it works on batches: what it raises is a fault of ours
        hardening.answer_control(fails, None, io_struct.PauseGenerationReqInput(mode="retract"))


class Raises(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        raise RuntimeError("no")


class Shrinks(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits[:, :2]


def loaded(kind: type):
    return hardening.load_processor(lambda cls, text: kind(), CustomLogitProcessor, "")


def params(**values) -> dict:
    return {"__req__": SimpleNamespace(to_finish=None)} | values


def test_requests_with_other_parameters_share_a_processor():
    """SGLang's own asserts that all requests of a batch forbid the same tokens."""
    each = [params(token_ids=[1]), params(token_ids=[2]), params(token_ids=[99]), params()]
    logits = loaded(DisallowedTokensLogitsProcessor)(torch.zeros(4, 5), each)
    assert (logits == -torch.inf).nonzero().tolist() == [[0, 1], [1, 2]]
    assert [one["__req__"].to_finish is None for one in each] == [True, True, False, False]
    assert "token_ids" in each[3]["__req__"].to_finish.to_json()["message"]


@pytest.mark.parametrize("kind", [Raises, Shrinks])
def test_a_processor_that_fails_ends_its_requests_alone(kind):
    each = [params(), params()]
    assert torch.equal(loaded(kind)(torch.ones(2, 5), each), torch.ones(2, 5))
    assert all(isinstance(one["__req__"].to_finish, FINISH_ABORT) for one in each)


def info(**options) -> SimpleNamespace:
    names = ("logit_bias", "acc_additive_penalties", "acc_scaling_penalties", "grammars", "penalizer_orchestrator")
    return SimpleNamespace(**dict.fromkeys(names) | {"has_custom_logit_processor": False} | options)


def test_logits_that_options_made_can_be_sampled_at_any_temperature():
    rows = [[-torch.inf] * 4, [torch.nan, 1.0, 2.0, 3.0], [torch.inf, torch.inf, 0.0, 0.0], [-torch.inf, 5.0, -torch.inf, 1.0]]
    logits = hardening.keep_finite(torch.tensor(rows), None, None, info(grammars=[object()]))
    for temperature in (1e-6, 1.0, 1e6):
        probabilities = torch.softmax(logits / temperature, -1)
        torch.multinomial(probabilities, 1)
    assert logits[3].tolist() == rows[3], "a token that is excluded has no logprob, as in stock SGLang"
    assert torch.equal(hardening.keep_finite(torch.tensor(rows), None, None, info()).isnan(), torch.tensor(rows).isnan())


class Answer:
    """A request with some text as its answer so far."""

    def __init__(self, text: str, *patterns: str) -> None:
        self.text, self.output_ids, self.finished_reason, self.finished_len = text, [1] * 7, None, None
        self.sampling_params = SimpleNamespace(stop_regex_strs=list(patterns))

    def tail_str(self, new_accepted_len: int) -> str:
        return self.text

    def check(self) -> bool:
        return hardening.find_stop_regex(lambda req, new_accepted_len: False, self)


def test_a_regular_expression_has_half_a_second():
    slow, found, not_found = Answer("a" * 3000, "(x+x+)+y|(a+a+)+b", "a"), Answer("a 12.", "x", r"\d+\."), Answer("a", "b")
    started = time.monotonic()
    assert slow.check() and time.monotonic() - started < 20 * hardening.REGEX_SECONDS
    assert slow.finished_reason.to_json()["status_code"] == 400
    assert found.check() and isinstance(found.finished_reason, FINISHED_MATCHED_REGEX) and found.finished_len == 7
    assert not not_found.check() and not_found.sampling_params.stop_regex_strs == ["b"]


@pytest.mark.parametrize("pattern, text", [("(?:foo){e}", "bar"), ("a{i}", "ab"), ("[{]e}", "e}"), (r"\{e}", "{}")])
def test_a_brace_that_repeats_nothing_is_text(pattern, text):
    """The library with the timeout would match with errors."""
    assert re.search(pattern, text) is None and not Answer(text, pattern).check()


@pytest.mark.parametrize(
    "pattern, text", [("a{2}", "aa"), ("ba{,2}c", "bac"), (r"\N{DIGIT ONE}", "1"), ("x{e}", "x{e}"), (r"a\{1,2}", "a{1,2}")]
)
def test_braces_mean_what_they_mean_to_sglang(pattern, text):
    assert re.search(pattern, text) and Answer(text, pattern).check()


def test_a_panic_of_a_compiler_is_an_exception():
    def panics(backend, key, require_reasoning):
        raise KeyboardInterrupt("a panic is no Exception either")

    with pytest.raises(RuntimeError, match="a panic"):
        hardening.compile_grammar(panics, None, ("regex", "a"), False)


class Profiler:
    """As much of SGLang's as a profile needs that is under way."""

    def __init__(self) -> None:
        self.torch_profiler, self.stopped = self, False
        self.profile_in_progress = True

    def stop(self) -> None:
        self.stopped = True
        raise RuntimeError("it may have been stopped")


def test_a_profile_that_fails_stops_recording():
    def fails(profiler, batch):
        raise PermissionError("/proc/none")

    profiler = Profiler()
    answer = hardening.profile(fails, profiler, None)
    assert not answer.success and "/proc/none" in answer.message
    assert profiler.stopped and profiler.torch_profiler is None and not profiler.profile_in_progress
