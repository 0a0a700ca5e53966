"""``--tokenizer-worker-num``: every worker has the hooks, whichever of them takes a request; and they end with their server."""

from __future__ import annotations

import json
import os
import re
import signal

import numpy as np
import pytest

from benchmarks.needle import tasks
from clients import assert_only_the_tree_holds_pages, stay_while_others_end
from oracle import Oracle, OracleSettings
from serving import NEEDLE_MODEL, TestServer, freekv, wait_until
from sglang_freekv.launch.server import ServerFailed

pytestmark = pytest.mark.two_servers  # a worker takes nearly what a server does

WORKERS, PROMPTS, NEW_TOKENS = 2, 12, 12
STARTED = "Application startup complete"
SETTINGS = OracleSettings(budget=256, sink=64, window=64, tau=0.8, page=32)


@pytest.fixture(scope="module")
def server(serve) -> TestServer:
    flags = freekv(SETTINGS.budget, sink=SETTINGS.sink, window=SETTINGS.window, tau=SETTINGS.tau)
    with serve(flags | {"--tokenizer-worker-num": WORKERS, "--enable-metrics": True}, forked=False) as (server,):
        # the server is ready with its first worker
        wait_until(lambda: server.log.read_text().count(STARTED) == WORKERS)
        yield server


def workers(server: TestServer) -> list[int]:
    """Their process ids, in the order in which they began."""
    return [int(pid) for pid in re.findall(r"Start multi-tokenizer worker process (\d+)", server.log.read_text())]


@pytest.fixture(params=range(WORKERS))
def alone(server, request) -> TestServer:
    """The server, while one of its workers takes all requests, and the others are halted."""
    found = workers(server)
    assert len(found) == WORKERS
    others = [pid for index, pid in enumerate(found) if index != request.param]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    yield server
    for pid in others:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def prompts() -> list[tasks.Prompt]:
    rng = np.random.default_rng(4)
    return [tasks.make_prompt(rng, "magic-number", int(length)) for length in rng.integers(300, 900, PROMPTS)]


def test_tokens_and_counts_are_the_oracle_s(server, prompts):
    oracle = Oracle(NEEDLE_MODEL)
    expected = [oracle.generate(prompt.token_ids, NEW_TOKENS, SETTINGS) for prompt in prompts]
    answers = server.generate_all([prompt.token_ids for prompt in prompts], NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
    counts = [answer["meta_info"]["freekv"] for answer in answers]  # as SGLang's own a list with an item for each token
    assert [each["decode_steps"] for each in counts] == [NEW_TOKENS - 1] * PROMPTS
    assert [each["corrections"] for each in counts] == [
        sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected
    ]


def test_streams_of_the_openai_api_carry_counts(alone, prompts):
    body = {"model": "needle", "messages": list(prompts[0].messages), "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
    with alone.open("/v1/chat/completions", body | {"return_meta_info": True}) as response:
        chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    told = [choice["meta_info"]["freekv"] for chunk in chunks for choice in chunk["choices"] if "meta_info" in choice]
    assert [each["decode_steps"] for each in told] == [NEW_TOKENS - 1]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2**70}}),
        ("/generate", {"input_ids": [5120], "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/chat/completions", {"model": "needle", "messages": [{"role": "user", "content": "a"}], "tools": 7}),
        ("/slow_down", {"forward_sleep_time": float("nan")}),
    ],
    ids=["too wide", "no token", "no tools", "no number"],
)
def test_a_clients_mistake_is_told(alone, path, body):
    with pytest.raises(ServerFailed, match="answered 4"):
        alone.post(path, body)
    assert len(alone.generate([5, 6, 7], 2)["output_ids"]) == 2


def test_state_and_metrics_are_told(alone):
    totals = alone.when_idle()["totals"]
    with alone.open("/metrics") as page:
        found = re.search(r"sglang:freekv_decode_steps_total{.*} (.*)", page.read().decode())
    assert float(found[1]) == totals["decode_steps"] > 0


@pytest.mark.parametrize("how", ["disconnect", "abort"])
def test_a_request_that_ends_early_leaves_nothing(server, prompts, how):
    """An abort may come to another worker than its request."""
    ended, stay = ([prompt.token_ids for prompt in some] for some in (prompts[:6], prompts[6:10]))
    server.flush()
    expected = [answer["output_ids"] for answer in server.generate_all(stay, NEW_TOKENS)]
    server.flush()
    answers = stay_while_others_end(server, how, ended, stay, NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert_only_the_tree_holds_pages(server)


def test_a_worker_that_is_killed_has_a_hooked_successor(server, prompts):
    """The last test, because the log tells of what happened."""
    started = server.log.read_text().count(STARTED)
    killed, _ = workers(server)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count(STARTED) > started)
    successor, other = workers(server)[-1], workers(server)[1]
    os.kill(other, signal.SIGSTOP)
    try:
        counts = server.generate(prompts[0].token_ids, NEW_TOKENS)["meta_info"]["freekv"]
    finally:
        os.kill(other, signal.SIGCONT)
    assert successor not in (killed, other) and counts["decode_steps"] == NEW_TOKENS - 1
