"""Two tensor-parallel ranks: each decides by itself who is resident, partial, retracted or refused, and all decide alike."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.needle import tasks
from room import room_for
from serving import HEAD_DIM, FaultyServer, freekv, start_all, stop_all, wait_until
from sglang_freekv import releases
from sglang_freekv.launch.server import ServerFailed

pytestmark = pytest.mark.two_servers  # a rank takes nearly what a server does
both_releases = pytest.mark.both_releases

RANKS, PAGE, LAYER, NEW_TOKENS = 2, 32, 3, 24
ROWS, POOL, TRIES = 4, 6400, 4
# KV as codes on one release and as numbers on the other, with room for as many pages
KV_DTYPE, RESIDENT = ("int8", 0.01 * (HEAD_DIM + 2) / (4 * HEAD_DIM)) if releases.has("checkpoint") else ("auto", 0.01)
FLAGS = freekv(256, canary="full", tau=2, resident_memory=RESIDENT, kv_dtype=KV_DTYPE) | {
    "--tp-size": RANKS, "--max-running-requests": ROWS, "--max-total-tokens": POOL, "--chunked-prefill-size": 1024,
    "--schedule-conservativeness": 0.1,  # it lets in more than it can finish
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with room_for(RANKS), pytest.MonkeyPatch.context() as patch:
        cores = sorted(os.sched_getaffinity(0))
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[rank % len(cores)]) for rank in range(RANKS)))
        (server,) = start_all([FaultyServer(FLAGS, tmp_path_factory.mktemp("server") / "log.txt")])
    yield server
    stop_all([server])


@pytest.fixture(scope="module")
def documents() -> list:
    rng = np.random.default_rng(11)
    return [tasks.make_document(rng, length, needle_count=2, tasks=("magic-number",)) for length in (1200, 700, 1000, 900, 1100, 800)]


@pytest.fixture(scope="module")
def questions(documents) -> list:
    return [document.ask(document.facts[0]) for document in documents]


@pytest.fixture(scope="module")
def expected(server, questions) -> list[list[int]]:
    """Each alone."""
    server.flush()
    return answers(server, questions, concurrency=1)


def answers(server: FaultyServer, questions, concurrency: int = 6) -> list[list[int]]:
    return [answer["output_ids"] for answer in server.generate_all([each.token_ids for each in questions], NEW_TOKENS, concurrency)]


@both_releases
def test_all_questions_are_answered(expected, questions):
    assert all(question.is_answered_by(tokens) for question, tokens in zip(questions, expected))


@both_releases
def test_answers_depend_neither_on_memory_nor_on_neighbours(server, questions, expected):
    """Cold and as hits. Pages are given up, and rows become partial."""
    server.flush()
    before, most = server.state(), 0
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            running = pool.submit(answers, server, questions)
            while not running.done():
                most = max(most, server.state()["partial_rows"])
            assert running.result() == expected
    after = server.state()
    assert most > 0 and after["given_up_pages_total"] > before["given_up_pages_total"]
    assert server.flush()["host_pages_used"] == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=both_releases), *range(1, RANKS)])
def test_what_one_rank_finds_all_ranks_refuse(server, questions, expected, rank):
    question, *others = questions
    server.flush()
    server.generate(question.token_ids, 1)
    assert answers(server, others) == expected[1:]  # by now the first prompt is in host memory alone
    server.damage(LAYER, 0, 5, rank=rank)
    with pytest.raises(ServerFailed, match=f"500.*canary: host page 5, layer {LAYER}"):
        server.generate(question.token_ids, NEW_TOKENS)
    answer = server.generate(question.token_ids, NEW_TOKENS)
    assert answer["output_ids"] == expected[0] and answer["meta_info"]["cached_tokens"] == 4 * PAGE
    assert answers(server, questions) == expected


def test_retracted_and_aborted_requests_leave_nothing_on_any_rank(server, questions, expected):
    """One client leaves. Four answers outgrow the pool, and are of full length, though they might end early.

    SGLang 0.5.17 lets in three of the four, which do not.
    """
    server.flush()
    long = [[*questions[index].token_ids, *questions[index + 1].token_ids][:1400] for index in range(ROWS)]
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(server.post, "/generate", {"rid": "left", "input_ids": long[0], "sampling_params": {"max_new_tokens": 2000}})
        wait_until(lambda: server.state()["rows_used"] == 1)
        server.open("/abort_request", {"rid": "left"}).close()
        assert left.result()["meta_info"]["finish_reason"]["type"] == "abort"
    for _ in range(TRIES):
        told = server.generate_all(long, 240, ROWS, ignore_eos=False, min_new_tokens=240)
        assert [len(answer["output_ids"]) for answer in told] == [240] * ROWS
        if sum(answer["meta_info"]["num_retractions"] for answer in told):
            break  # under load one may begin so late that another has ended, and nobody is retracted
    else:
        pytest.fail(f"nobody was retracted in {TRIES} tries")
    assert server.flush()["host_pages_used"] == 0
    assert answers(server, questions) == expected
