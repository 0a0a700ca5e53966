"""Retraction, aborts and disconnects in every state: nothing is lost, nothing is held."""

from __future__ import annotations

import http.client
import json
import threading
import time

import numpy as np
import pytest
import tasks
from oracle import Oracle
from serving import NEEDLE_MODEL, TestServer, freekv

CHUNK = 256


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tasks.make_document(rng, int(length), needle_count=2).token_ids for length in rng.integers(100, 900, 8)]


@pytest.fixture(scope="module")
def server(serve):
    """Every third decode step retracts a request; the memory check runs while busy; prompts are many chunks long."""
    flags = freekv(2048, sink=256, window=256) | {"--chunked-prefill-size": CHUNK, "--max-running-requests": 4}
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with serve(flags, env=env) as (server,):
        yield server


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    oracle = Oracle(NEEDLE_MODEL)
    return [oracle.generate(prompt, 40).tokens for prompt in prompts]


def assert_nothing_is_held(server: TestServer) -> None:
    state = server.flush()
    assert state["host_pages_used"] == 0
    assert state["rows_used"] == 0


def begin(server: TestServer, token_ids, max_new_tokens: int, rid: str) -> http.client.HTTPConnection:
    """Send a streaming request and leave the connection open."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": [int(token) for token in token_ids], "sampling_params": sampling, "stream": True, "rid": rid}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def test_retraction_loses_nothing(server, prompts, expected):
    answers = server.generate_all(prompts, 40)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [answer["output_ids"] for answer in answers] == expected
    for answer in (answer["meta_info"] for answer in answers):  # the extend after a retraction may yield a token, too
        assert 39 - answer["num_retractions"] <= answer["freekv"]["decode_steps"] <= 39
    assert_nothing_is_held(server)


@pytest.mark.parametrize("how", ["abort", "disconnect"])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "retracted"])
def test_a_request_that_ends_early_leaves_nothing(server, prompts, expected, state, how):
    others = threading.Thread(target=lambda: server.generate_all(prompts[:4], 60, concurrency=4))
    if state in ("queued", "retracted"):  # four requests fill the rows; under retraction they take turns
        others.start()
        time.sleep(1.5)
    long_prompt = np.random.default_rng(len(state)).integers(10, 5000, 6000 if state == "prefill" else 300)
    connection = begin(server, long_prompt, 200, rid=f"{state}-{how}")
    if state in ("decode", "retracted"):
        response = connection.getresponse()
        for _ in range(6 if state == "decode" else 12):
            response.readline()
    else:
        time.sleep(0.5)
    if how == "abort":
        server.open("/abort_request", {"rid": f"{state}-{how}"}).close()
        if state not in ("decode", "retracted"):
            response = connection.getresponse()
        assert b'"abort"' in response.read()
    connection.close()
    if others.ident is not None:
        others.join()
    assert_nothing_is_held(server)
    assert [answer["output_ids"] for answer in server.generate_all(prompts[:3], 40)] == expected[:3]
    assert_nothing_is_held(server)
