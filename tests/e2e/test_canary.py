"""KV that changes in host memory: who had it gets an error that names it, nobody gets a token made of it, and all others are served."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.needle import tasks
from room import room_for
from serving import FaultyServer, freekv, start_all, stop_all, wait_until
from sglang_freekv.launch.server import ServerFailed

pytestmark = pytest.mark.two_servers

PAGE, LAYER, HEAD, NEW_TOKENS, ROWS = 32, 3, 1, 24, 8

FLAGS = freekv(256, tau=2) | {
    "--max-running-requests": ROWS,
    "--chunked-prefill-size": 512,
    "--enable-metrics": True,
    "--sleep-on-idle": True,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """With a canary, and without one."""
    kinds = ({"--freekv-canary": "full"}, {})
    with room_for(len(kinds)):
        running = start_all(FaultyServer(FLAGS | kind, tmp_path_factory.mktemp("server") / "log.txt") for kind in kinds)
    yield running
    stop_all(running)


@pytest.fixture
def server(servers, expected) -> FaultyServer:
    """Its tree is empty: the first prompt gets host pages 1, 2, ..."""
    servers[0].flush()
    return servers[0]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(11)
    return [tasks.make_document(rng, length, needle_count=2).token_ids for length in (1000, 700, 800)]


@pytest.fixture(scope="module")
def expected(servers, prompts) -> list[list[int]]:
    """Undisturbed, and alike on both servers."""
    answers = [[server.generate(prompt, NEW_TOKENS)["output_ids"] for prompt in prompts] for server in servers]
    assert answers[0] == answers[1]
    return answers[0]


def refused(server: FaultyServer, token_ids, new_tokens: int = NEW_TOKENS) -> str:
    """What the client reads whose request had a page that changed."""
    with pytest.raises(ServerFailed, match="500") as error:
        server.generate(token_ids, new_tokens)
    return str(error.value)


def assert_served(server: FaultyServer, prompts, expected) -> None:
    """All prompts, anew; and nothing is held."""
    assert [answer["output_ids"] for answer in server.generate_all(prompts, NEW_TOKENS)] == expected
    assert server.flush()["host_pages_used"] == 0


def wait_until_decoding(server: FaultyServer, requests: int) -> None:
    """So many have rows, and a step has begun since: their prompts are in host memory, and what is damaged now is not written anew."""
    wait_until(lambda: server.state()["rows_used"] == requests)
    begun = server.state()["totals"]["decode_steps"]
    wait_until(lambda: server.state()["totals"]["decode_steps"] > begun + requests)  # one may have been under way


def test_without_a_canary_nobody_would_know(servers, prompts, expected):
    """The negative control: the same damage, and a wrong answer."""
    server = servers[1]
    server.flush()
    server.generate(prompts[0], 1)
    server.damage(LAYER, HEAD, *range(3, 30))
    assert server.generate(prompts[0], NEW_TOKENS)["output_ids"] != expected[0]


@pytest.mark.both_releases
def test_a_prefix_that_changed_is_computed_anew(server, prompts, expected):
    server.generate(prompts[0], 1)
    server.damage(LAYER, HEAD, 5)
    before = server.state()["canary"]
    message = refused(server, prompts[0])
    assert f"canary: host page 5, layer {LAYER}, kv head {HEAD}" in message and "send the request again" in message
    answer = server.generate(prompts[0], NEW_TOKENS)
    assert answer["output_ids"] == expected[0] and answer["meta_info"]["cached_tokens"] == 4 * PAGE
    after = server.state()["canary"]
    assert after["faults"] - before["faults"] == 1 and after["requests_ended"] - before["requests_ended"] == 1
    assert f"canary: host page 5, layer {LAYER}, kv head {HEAD}" in server.log.read_text()
    with server.open("/metrics") as page:
        found = re.search(r"sglang:freekv_canary_faults_total{.*} (.*)", page.read().decode())
    assert float(found[1]) == after["faults"]
    assert_served(server, prompts, expected)


@pytest.mark.both_releases
def test_a_request_that_decodes_ends_before_a_wrong_token(server, prompts, expected):
    with ThreadPoolExecutor(2) as clients:
        ended = clients.submit(refused, server, prompts[0], 600)
        wait_until_decoding(server, 1)
        others = clients.submit(server.generate_all, prompts[1:], NEW_TOKENS)
        server.damage(LAYER, HEAD, *range(3, 30))
        assert f"layer {LAYER}, kv head {HEAD}: the KV changed in host memory" in ended.result()
        assert [answer["output_ids"] for answer in others.result()] == expected[1:]
    server.flush()  # of the pages that were damaged, only those that were recalled have been found
    assert_served(server, prompts, expected)


@pytest.mark.both_releases
def test_who_gets_its_pages_next_is_served(server, prompts, expected):
    """All rows are taken, so the next request begins in the step in which this one ends. The step in flight finds more of the pages."""
    logged = len(server.log.read_text())
    with ThreadPoolExecutor(3) as clients:
        ended = clients.submit(refused, server, prompts[0], 600)
        wait_until_decoding(server, 1)
        fillers = clients.submit(server.generate_all, [range(20 + row, 60 + row) for row in range(1, ROWS)], 80)
        wait_until_decoding(server, ROWS)
        others = clients.submit(server.generate_all, prompts[1:], NEW_TOKENS)
        wait_until(lambda: server.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == len(prompts[1:]))
        server.damage(None, None, *range(3, 30))
        assert "the KV changed in host memory" in ended.result()
        assert [answer["output_ids"] for answer in others.result()] == expected[1:]
        assert len(fillers.result()) == ROWS - 1
    assert "no running request has it" in server.log.read_text()[logged:]
    server.flush()
    assert_served(server, prompts, expected)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_ends_with_an_error_and_without_a_wrong_token(server, prompts, expected, path):
    prompt, told = [int(token) for token in prompts[0]], []
    undisturbed = server.generate(prompt, 200)["output_ids"]
    server.flush()
    sampling = {"temperature": 0, "ignore_eos": True}
    asked = {"input_ids": prompt, "sampling_params": sampling | {"max_new_tokens": 200}}
    if path != "/generate":
        asked = {"model": "needle", "prompt": prompt, "max_tokens": 200} | sampling
    with server.open(path, asked | {"stream": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                told.append(json.loads(line[6:]))
                if len(told) == 10:
                    server.damage(LAYER, HEAD, *range(3, 30))
    *tokens, last = told
    if path == "/generate":
        reason = last["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] == 500 and "the KV changed in host memory" in reason["message"]
        assert 10 <= len(last["output_ids"]) < 200 and last["output_ids"] == undisturbed[: len(last["output_ids"])]
    else:
        assert last["error"]["code"] == 500 and "the KV changed in host memory" in last["error"]["message"]
    server.flush()
    assert_served(server, prompts, expected)


def test_all_that_share_the_page_end_and_nobody_else(server, prompts, expected):
    server.generate(prompts[0], 1)
    shared, questions = list(prompts[0][:640]), [list(prompt[100:200]) for prompt in prompts]
    texts = [shared + question for question in questions]
    answers = {}

    def ask(index: int, token_ids) -> None:
        try:
            answers[index] = server.generate(token_ids, 200)["output_ids"]
        except ServerFailed as error:
            answers[index] = str(error)

    alone = server.generate(prompts[1], 200)["output_ids"]
    threads = [threading.Thread(target=ask, args=each) for each in enumerate([*texts, prompts[1]])]
    for thread in threads:
        thread.start()
    wait_until_decoding(server, len(threads))
    server.damage(LAYER, HEAD, *range(3, 19))
    for thread in threads:
        thread.join()
    assert all("the KV changed in host memory" in answers[index] for index in range(len(texts)))
    assert answers[len(texts)] == alone
    server.flush()  # of the pages that were damaged, only those that were recalled have been found
    assert_served(server, prompts, expected)


def test_a_prompt_in_chunks_ends_at_the_next_one(server, prompts, expected):
    long = np.random.default_rng(3).integers(16, 5000, 6000).tolist()
    ended = []
    asked = threading.Thread(target=lambda: ended.append(refused(server, long, 8)))
    asked.start()
    while server.state()["host_pages_used"] < 40:
        time.sleep(0.01)
    server.damage(LAYER, HEAD, 7)
    asked.join()
    assert f"canary: host page 7, layer {LAYER}, kv head {HEAD}" in ended[0]
    server.wait_until_idle()
    answer = server.generate(long, 8)["meta_info"]
    assert answer["cached_tokens"] == 6 * PAGE
    assert_served(server, prompts, expected)


def test_an_idle_server_finds_it_before_anybody_asks(server, prompts, expected):
    server.generate(prompts[0], 1)
    before = server.state()["canary"]
    server.damage(LAYER, HEAD, 9, swept=True)
    wait_until(lambda: server.state()["canary"]["faults"] > before["faults"])
    after = server.state()["canary"]
    assert (after["faults"], after["requests_ended"]) == (before["faults"] + 1, before["requests_ended"])
    answer = server.generate(prompts[0], NEW_TOKENS)
    assert answer["output_ids"] == expected[0] and answer["meta_info"]["cached_tokens"] == 8 * PAGE
    assert_served(server, prompts, expected)
