"""A real server on a GPU: decode graphs, the overlap schedule and pinned memory, where the CPU's server has none of them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from benchmarks.needle import tasks
from serving import FaultyServer, freekv, start_all, stop_all
from sglang_freekv.config import SGLANG_FP8, STORED_DTYPES
from sglang_freekv.launch.server import ServerFailed

gpus = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(gpus < 1, reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

LAYER, HEAD, PAGE = 3, 0, 32
FLAGS = freekv(512, canary="full", tau=2, host_memory=4) | {
    "--device": "cuda", "--dtype": "bfloat16", "--mem-fraction-static": 0.4, "--sampling-backend": "pytorch",
    "--chunked-prefill-size": 2048,
}  # fmt: skip


def start(directory, **more) -> FaultyServer:
    (server,) = start_all([FaultyServer(FLAGS | more, directory / "log.txt")])
    server.flush()
    return server


two = pytest.param(2, marks=pytest.mark.skipif(gpus < 2, reason="needs two GPUs"))


@pytest.fixture(scope="module", params=[1, two], ids=["tp 1", "tp 2"])
def server(tmp_path_factory, request):
    server = start(tmp_path_factory.mktemp("server"), **{"--tp": request.param})
    server.ranks = request.param
    yield server
    stop_all([server])


@pytest.fixture(scope="module")
def questions() -> list:
    document = tasks.make_document(np.random.default_rng(7), 4000, needle_count=4, tasks=("magic-number", "code-word"))
    return [document.ask(fact) for fact in document.facts]


def right(server, questions) -> list[bool]:
    answers = server.generate_all([question.token_ids for question in questions], 16)
    return [question.is_answered_by(answer["output_ids"]) for question, answer in zip(questions, answers)]


def test_a_prompt_replays_captured_parts(server, questions):
    """Attention is launched between them, and reads as many tokens as there are, where the parts are padded."""
    server.flush()
    before = len(server.log.read_text())
    assert all(right(server, questions))
    assert len(re.findall("Prefill batch.*cuda graph: True", server.log.read_text()[before:])) >= 2, server.tail()


def head_of(rank: int, ranks: int) -> int:
    """A kv head of a rank, as the rank counts: of two heads each rank of two has one."""
    return HEAD if ranks == 2 else rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefix_that_changed_is_computed_anew(server, questions, rank):
    server.flush()
    assert all(right(server, questions))
    server.flush()
    server.generate(questions[0].token_ids, 1)
    server.damage(LAYER, head_of(rank, server.ranks), 20, rank=rank if server.ranks == 2 else 0)
    with pytest.raises(ServerFailed, match="500.*canary: host page 20, layer 3"):
        server.generate(questions[0].token_ids, 16)
    answer = server.generate(questions[0].token_ids, 16)
    assert questions[0].is_answered_by(answer["output_ids"]) and answer["meta_info"]["cached_tokens"] == 19 * PAGE
    assert all(right(server, questions))
    assert server.flush()["host_pages_used"] == 0


def test_no_token_is_made_of_a_page_that_changed_under_a_graph(server, questions):
    """Ends in the step that recalls it: a request that decodes, and is corrected in every step."""
    prompt, ended = questions[0].token_ids, []

    def ask() -> None:
        with pytest.raises(ServerFailed) as error:
            server.generate(prompt, 4000)
        ended.append(str(error.value))

    server.flush()
    before = server.state()["totals"]["decode_steps"]
    asking = threading.Thread(target=ask)
    asking.start()
    while server.state()["totals"]["decode_steps"] < before + 20:
        time.sleep(0.02)
    server.damage(LAYER, HEAD, *range(6, 120))
    asking.join()
    assert "500" in ended[0] and "the KV changed in host memory" in ended[0]
    server.flush()
    assert all(right(server, questions))


def test_an_idle_server_finds_it_before_anybody_asks(server, questions):
    """Ranks rest each for itself; what they find they act on together, with the next step."""
    server.flush()
    server.generate(questions[0].token_ids, 1)
    before, deadline = server.state()["canary"], time.monotonic() + 30
    server.damage(LAYER, HEAD, 30, swept=True)
    while server.state()["canary"]["pages_swept"] < before["pages_swept"] + 256:
        assert time.monotonic() < deadline, "no sweep"
        time.sleep(0.2)
    if server.ranks > 1:
        server.generate(range(100, 140), 2)
    assert server.state()["canary"]["faults"] == before["faults"] + 1
    assert all(right(server, questions))


@pytest.mark.parametrize("cycles", [0, 10_000_000], ids=["at once", "graphs 5 ms late"])
def test_prefix_hits_that_come_beside_decode_graphs(server, cycles):
    """Newcomers with a prefix while others decode, and others that end at any length and are continued at once: the canary compares
    every page that is staged with what was written, and the answers are right. Late graphs are under way when prefixes come."""
    generator = np.random.default_rng(11)
    documents = [tasks.make_document(generator, 3000 + 32 * index, 4, ("magic-number", "code-word", "multi-query")) for index in range(4)]
    server.flush()
    server.delay_graphs(cycles)
    faults, over, wrong = server.state()["canary"]["faults"], threading.Event(), []

    def decode(index: int) -> None:
        prompt, turn = list(documents[index].token_ids), 0
        while not over.is_set():
            answer = server.generate(prompt, 40 + 7 * (turn % 9))
            prompt = (prompt + answer["output_ids"])[:8000]  # its last page may have been filled by the step in flight
            turn += 1

    decoding = [threading.Thread(target=decode, args=[index]) for index in range(2)]
    for thread in decoding:
        thread.start()
    try:
        for turn in range(60):
            question = documents[turn % 4].ask(documents[turn % 4].facts[turn % 3])
            if not question.is_answered_by(server.generate(question.token_ids, 40)["output_ids"]):
                wrong.append(question.answer_text)
    finally:
        over.set()
        for thread in decoding:
            thread.join()
        server.delay_graphs(0)
    assert not wrong and server.state()["canary"]["faults"] == faults


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
def test_the_default_preset_answers(tmp_path, questions, kv_dtype):
    """Pages of 8, two-bit digests, hysteresis and prefill graphs, with nothing resident, so that pages are recalled. Each prompt again is a
    hit, whose pages the canary compares."""
    left_out = {"--freekv-preset": None, "--freekv-budget": None, "--freekv-tau": None}
    server = start(tmp_path, **left_out, **{"--kv-cache-dtype" if kv_dtype in SGLANG_FP8 else "--freekv-kv-dtype": kv_dtype})
    assert all(right(server, questions)) and all(right(server, questions))
    assert server.state()["canary"]["faults"] == 0
    told = server.get("/server_info")["freekv"]
    assert told["kv_dtype"] == kv_dtype
    assert (told["preset"], told["page_size"], told["digest"], told["hysteresis"]) == ("accurate", 8, "two-bit", 1)
    assert server.when_idle()["totals"]["recalled_units"] > 0
    stop_all([server])


def test_sigterm_unpins_and_ends(tmp_path):
    server = start(tmp_path, **{"--freekv-host-memory": 16, "--cuda-graph-backend-decode": "disabled"})
    assert "GiB pinned in" in server.log.read_text()
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.wait(60)
    log = server.log.read_text(errors="replace")
    assert "Traceback (most recent call last)" not in log, server.tail()
