"""Serving as users do: OpenAI API, streaming, frontend programs; and what the server shows of itself."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import numpy as np
import openai
import pytest
import sglang as sgl
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.needle import tasks
from serving import HEAD_DIM, KV_HEADS, LAYERS, wait_until
from sglang_freekv.metrics import METRICS

ARGUMENTS = {
    "type": "object",
    "properties": {"page": {"enum": [5, 17]}, "unit": {"enum": ["token", "page"]}},
    "required": ["page", "unit"],
    "additionalProperties": False,
}


def are_arguments(found) -> bool:
    return found.keys() == {"page", "unit"} and found["page"] in (5, 17) and found["unit"] in ("token", "page")


def a_document(length: int = 2048, seed: int = 3):
    return tasks.make_document(np.random.default_rng(seed), length, tasks=("magic-number", "code-word"))


def test_openai_api_answers_from_the_prefix_cache(fleet):
    fleet.small.flush()
    document = a_document()
    cached = []
    for fact in document.facts[:2]:
        prompt = document.ask(fact)
        body = {"model": "needle", "messages": list(prompt.messages), "temperature": 0, "max_tokens": 16}
        reply = fleet.small.post("/v1/chat/completions", body)
        assert reply["choices"][0]["message"]["content"] == prompt.answer_text
        cached.append((reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    assert cached == [0, 2048]


def test_a_stream_ends_with_the_counts_of_the_whole(fleet):
    prompt = a_document(1500).token_ids
    whole = fleet.small.generate(prompt, 40)["meta_info"]["freekv"]
    body = {"input_ids": [int(t) for t in prompt], "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    with fleet.small.open("/generate", body | {"stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    counts = [chunk["meta_info"]["freekv"] for chunk in chunks]
    assert counts[-1] == whole and whole["decode_steps"] == 39 and whole["recalled_units"] > 0
    assert [count["decode_steps"] for count in counts] == sorted(count["decode_steps"] for count in counts)
    assert whole["context_pages"] == (1500 + 40 + 31) // 32 and whole["attended_pages"] == 16 and whole["resident_pages"] == 0


def test_streaming_through_the_openai_api(fleet):
    prompt = a_document().ask(a_document().facts[0])
    body = {"model": "needle", "messages": list(prompt.messages), "temperature": 0, "max_tokens": 16, "stream": True}
    with fleet.small.open("/v1/chat/completions", body) as response:
        deltas = [json.loads(line[6:])["choices"] for line in response if line.startswith(b"data: {")]
    assert "".join(choice["delta"].get("content") or "" for delta in deltas for choice in delta) == prompt.answer_text


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_openai_answers_carry_the_counts_of_each_choice(fleet, chat):
    document = a_document(1500)
    prompt, tokens = document.ask(document.facts[0]), 12
    asked = {"messages": list(prompt.messages)} if chat else {"prompt": [int(token) for token in prompt.token_ids]}
    asked |= {"model": "needle", "temperature": 0, "max_tokens": tokens, "n": 2}
    asked["extra_body"] = {"ignore_eos": True, "return_meta_info": True}
    counts = fleet.small.generate(prompt.token_ids, tokens)["meta_info"]["freekv"]
    assert counts["decode_steps"] == tokens - 1 and counts["recalled_units"] > 0
    with openai.OpenAI(base_url=f"{fleet.small.url}/v1", api_key="none") as client:
        create = client.chat.completions.create if chat else client.completions.create
        whole = create(**asked)
        chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
        plain = list(create(**asked | {"extra_body": None}, stream=True))
    assert [choice.meta_info["freekv"] for choice in whole.choices] == [counts] * 2
    last = {choice.index: choice for chunk in chunks for choice in chunk.choices if choice.finish_reason}
    assert [last[index].meta_info["freekv"] for index in range(2)] == [counts] * 2
    assert sum(hasattr(choice, "meta_info") for chunk in chunks for choice in chunk.choices) == 2
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 2 * tokens
    assert not any(hasattr(choice, "meta_info") for chunk in plain for choice in chunk.choices)
    with pytest.raises(RuntimeError, match="answered 400"):
        path = "/v1/chat/completions" if chat else "/v1/completions"
        fleet.small.post(path, {name: value for name, value in asked.items() if name != "extra_body"} | {"return_meta_info": "si"})


def test_a_prefix_hit_comes_from_host_memory(fleet):
    fleet.small.flush()
    body = {"input_ids": [int(token) for token in a_document(1500).token_ids], "sampling_params": {"max_new_tokens": 1}}
    cached = [fleet.small.post("/generate", body)["meta_info"].get("cached_tokens_details") for _ in range(2)]
    assert cached == [None, {"device": 0, "host": 1472}]


def metrics_page(server) -> str:
    with server.open("/metrics") as response:
        return response.read().decode()


def exported(page: str) -> dict[tuple[str, str | None], float]:
    """FreeKV's samples by name and pool."""
    return {
        (sample.name.removeprefix("sglang:freekv_"), sample.labels.get("pool")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("sglang:freekv_")
    }


def test_server_info_and_metrics(fleet):
    before = fleet.small.when_idle()["totals"]
    counts = fleet.small.generate(a_document(1800, seed=9).token_ids, 30)["meta_info"]["freekv"]
    state, info = fleet.small.when_idle(), fleet.small.get("/server_info")
    after = state["totals"]
    assert {name: after[name] - before[name] for name in after} == {name: counts[name] for name in after}
    assert counts["selected_units"] >= 29 * (LAYERS - 1) * KV_HEADS * 8 and counts["correction_decisions"] == 29 * (LAYERS - 1) * KV_HEADS
    built = info["freekv"]
    assert built["budget_tokens"] == 512 and built["sink_tokens"] == built["window_tokens"] == 128
    assert built["host_bytes"] == (131072 + 32) * (LAYERS - 1) * 2 * KV_HEADS * HEAD_DIM * 4
    assert state["rows_used"] == 0 and state["frames_total"] == 8 * 16 and built["frame_tokens"] == 9 * 512  # slots, and those of padding
    assert state["host_pages_total"] == 4096
    assert state["absent_pages"] == (1800 + 29) // 32 + 1
    expected = {f"{name}_total": total for name, total in after.items()}
    expected |= {name: state[name] for name in ("host_pages_used", "host_pages_total", "rows_used", "rows_total")}
    expected |= {name: state[name] for name in ("partial_rows", "frames_used", "frames_total", "resident_pages", "absent_pages")}
    expected |= {name: state[name] for name in ("brought_pages_total", "given_up_pages_total")}
    expected |= {"recalled_bytes_total": after["recalled_units"] * 2 * 32 * HEAD_DIM * 4, "canary_faults_total": 0}
    expected |= dict.fromkeys(("recall_seconds_total", "recall_wait_seconds_total", "sampled_steps_total"), 0)
    described = {
        "host": "host",
        "digests": "digest",
        "device_cache": "device_cache",
        "dense_layers": "dense",
        "staging": "staging",
    }
    pools = {("pool_bytes", pool): built[f"{name}_bytes"] for pool, name in described.items()}
    expected = {(name, None): value for name, value in expected.items()} | pools
    with suppress(AssertionError):  # the scheduler exports once it finds itself idle
        wait_until(lambda: exported(metrics_page(fleet.small)) == expected, 30)
    assert exported(page := metrics_page(fleet.small)) == expected and min(pools.values()) > 0
    for metric in METRICS:
        assert f"# HELP {metric.name} {metric.text}" in page and f"# TYPE {metric.name} {metric.kind}" in page


@pytest.mark.parametrize(
    ("constraint", "is_met"),
    [
        ({"regex": "[0-9]{3}-[a-c]{4}"}, lambda text: re.fullmatch("[0-9]{3}-[a-c]{4}", text)),
        ({"ebnf": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"json_schema": json.dumps(ARGUMENTS)}, lambda text: are_arguments(json.loads(text))),
    ],
    ids=["regex", "grammar", "JSON schema"],
)
def test_structured_output(fleet, constraint, is_met):
    sampling = {"max_new_tokens": 60, "temperature": 0} | constraint
    prompts = ["Answer:", "The magic number", "Once", "7"]
    answers = fleet.small.post("/generate", {"text": prompts, "sampling_params": sampling})
    assert all(is_met(answer["text"]) for answer in answers), answers


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=["required", "named"])
def test_a_required_tool_call(fleet, choice):
    function = {"name": "look_up", "parameters": ARGUMENTS, "strict": True}
    body = {"model": "needle", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 80, "temperature": 0}
    body |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "parallel_tool_calls": False}
    message = fleet.small.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert message["tool_calls"], message
    assert all(call["function"]["name"] == "look_up" for call in message["tool_calls"])
    assert all(are_arguments(json.loads(call["function"]["arguments"])) for call in message["tool_calls"])
    [call] = json.loads(fleet.covering.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])  # without a parser
    assert call.keys() == {"name", "parameters"} and call["name"] == "look_up" and are_arguments(call["parameters"])


def test_the_config_is_told_once(fleet):
    told = [json.dumps(fleet.small.get(path)) for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info")]
    assert not any("_freekv" in text for text in told) and "_freekv" not in fleet.small.log.read_text()


def test_the_activation_line(fleet):
    line = next(line for line in fleet.small.log.read_text().splitlines() if "KV retrieval is on" in line)
    for fact in ("freekv on cpu", "budget 512 tokens", "131072 tokens", "8 requests", "GiB", "dense layers [0]"):
        assert fact in line


def test_a_frontend_program_with_forks(fleet):
    @sgl.function
    def ask_all(s, document, questions):
        s += document
        branches = s.fork(len(questions))
        for branch, question in zip(branches, questions):
            branch += question
            branch += sgl.gen("answer", max_tokens=16, temperature=0, stop="</s>")
        branches.join()
        s["answers"] = [branch["answer"] for branch in branches]

    document = a_document(seed=4)
    facts = document.facts[:4]
    text = document.corpus.decode(document.token_ids[1:])  # the server adds the first token
    questions = [f"<|user|>{fact.question}<|assistant|>" for fact in facts]
    backend = sgl.RuntimeEndpoint(fleet.small.url)
    answers = ask_all.run(document=text, questions=questions, backend=backend)["answers"]
    assert [answer == fact.answer for answer, fact in zip(answers, facts)][:2] == [True, True]


def test_mixed_lengths_at_once_do_not_disturb_each_other(fleet):
    rng = np.random.default_rng(8)
    prompts = [a_document(int(length), seed=int(length)).token_ids for length in rng.integers(300, 3000, 8)]
    alone = [fleet.small.generate(prompt, 20)["output_ids"] for prompt in prompts]
    fleet.small.flush()
    together = [answer["output_ids"] for answer in fleet.small.generate_all(prompts, 20)]
    assert together == alone


@pytest.mark.parametrize("bad", [{"input_ids": []}, {"input_ids": [5120]}, {"input_ids": [-1]}, {"input_ids": [5] * 40000}, {"text": 7}])
def test_bad_requests_are_answered_and_the_server_stays(fleet, bad):
    with pytest.raises(RuntimeError, match="answered 4|answered 5"):
        fleet.small.post("/generate", bad | {"sampling_params": {"max_new_tokens": 4}})
    assert fleet.small.generate([5, 6, 7, 8], 4)["output_ids"]
