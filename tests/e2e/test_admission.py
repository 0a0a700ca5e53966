"""Admission by host pages and by device rows: whoever has to wait gets in when there is room, and whoever can never fit is told so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.needle import tasks
from serving import TestServer, freekv, wait_until

pytestmark = pytest.mark.two_servers

PAGE, POOL, ROWS, CLIENTS, NEW_TOKENS = 32, 1024, 4, 12, 80


class Sample(NamedTuple):
    """What the server says of itself at one moment."""

    waiting: int
    rows: int
    pages: int


@pytest.fixture(scope="module")
def server(serve):
    """Room for 32 pages and 4 requests. It expects answers to be short, and so lets in more than it can finish; the budget covers
    every context, so that it does not matter which pages a retracted request has to compute again."""
    flags = {"--max-total-tokens": POOL, "--max-running-requests": ROWS, "--schedule-conservativeness": 0.1}
    with serve(freekv(POOL) | flags, env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}) as (server,):
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(9)
    return [tasks.make_document(rng, int(length), needle_count=1).token_ids for length in rng.integers(160, 220, CLIENTS)]


def answered(server: TestServer, prompts, concurrency: int) -> list[dict]:
    """Of full length, though they might end early: SGLang reserves the most tokens for a request that may not."""
    return server.generate_all(prompts, NEW_TOKENS, concurrency, ignore_eos=False, min_new_tokens=NEW_TOKENS)


def outputs(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def waiting_requests(server: TestServer) -> int:
    return server.get("/v1/loads")["loads"][0]["num_waiting_reqs"]


@contextmanager
def watched(server: TestServer) -> Iterator[list[Sample]]:
    """Samples of the server while something is going on."""
    samples, over = [], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            waiting, state = waiting_requests(server), server.state()
            waiting = min(waiting, waiting_requests(server))  # before and after
            assert state["rows_total"] == ROWS and state["host_pages_total"] == POOL // PAGE
            samples.append(Sample(waiting, state["rows_used"], state["host_pages_used"]))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield samples
        finally:
            over.set()
            watching.result()


def test_more_requests_than_rows_and_pages_are_all_answered_as_ever(server, prompts):
    assert sum(map(len, prompts)) > 2 * POOL and len(prompts) > 2 * ROWS
    alone = outputs(answered(server, prompts, concurrency=2))
    server.flush()
    begun = len(server.log.read_text())
    with watched(server) as samples:
        answers = answered(server, prompts, concurrency=CLIENTS)
    assert outputs(answers) == alone
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length"}
    assert "KV cache pool is full. Retract requests." in server.log.read_text()[begun:]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert max(sample.rows for sample in samples) == ROWS and max(sample.pages for sample in samples) <= POOL // PAGE
    assert max(sample.pages for sample in samples) > POOL // PAGE - ROWS  # no page for the next step of all rows
    assert server.when_idle()["rows_used"] == 0
    assert server.flush()["host_pages_used"] == 0


@pytest.mark.parametrize("short_of, lengths, new_tokens", [("pages", [640], 350), ("rows", [40] * ROWS, 120)], ids=["pages", "rows"])
def test_a_request_waits_for_what_is_short_though_the_other_is_free(server, short_of, lengths, new_tokens):
    """New tokens are as many as fit, so that a busy machine has seen the holders before they end."""
    rng = np.random.default_rng(10)
    holders = [rng.integers(10, 5000, length).tolist() for length in lengths]
    late = rng.integers(10, 5000, 400).tolist()
    alone = server.generate(late, 20)["output_ids"]
    server.flush()
    with watched(server) as samples, ThreadPoolExecutor(len(holders)) as pool:
        held = [pool.submit(server.generate, holder, new_tokens) for holder in holders]
        wait_until(lambda: server.state()["rows_used"] == len(holders))
        begun = len(samples) + 1
        assert server.generate(late, 20)["output_ids"] == alone
        assert all(len(answer.result()["output_ids"]) == new_tokens for answer in held)
    waited = next(sample for sample in samples[begun:] if sample.waiting)
    if short_of == "pages":
        assert waited.rows == 1 and waited.pages * PAGE + len(late) > POOL
    else:
        assert waited.rows == ROWS and waited.pages * PAGE + len(late) + NEW_TOKENS < POOL
    assert server.flush()["host_pages_used"] == 0


def test_whoever_stands_behind_a_request_that_gives_up_is_let_in(server):
    """The first in the queue waits for pages; once it is aborted, the second has room, though nobody who runs has finished."""
    rng = np.random.default_rng(12)
    holder, first, second = (rng.integers(10, 5000, length).tolist() for length in (640, 400, 40))
    server.flush()
    with ThreadPoolExecutor(3) as pool:
        held = pool.submit(server.generate, holder, 250)
        wait_until(lambda: server.state()["rows_used"] == 1)
        given_up = pool.submit(server.post, "/generate", {"rid": "first", "input_ids": first, "sampling_params": {"max_new_tokens": 20}})
        wait_until(lambda: waiting_requests(server) == 1)
        behind = pool.submit(server.generate, second, 4)
        wait_until(lambda: waiting_requests(server) == 2)
        server.open("/abort_request", {"rid": "first"}).close()
        assert behind.result()["output_ids"] and not held.done()
    assert given_up.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.flush()["host_pages_used"] == 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(server, prompts):
    most = POOL - 2 * PAGE  # a page for the first token, and the one that admission reserves
    for length in (most + 1, most + PAGE, most + PAGE + PAGE // 2, 2 * POOL):
        with pytest.raises(RuntimeError, match=rf"answered 400.*\({length} tokens\).*\({most + 1} tokens\)"):
            server.generate([7] * length, 4)
    with pytest.raises(RuntimeError, match=r"answered 400.*1000200.*\d{4}"):
        server.generate([7] * 200, 1_000_000)
    assert len(server.generate([7] * most, 4)["output_ids"]) > 0
    assert server.flush()["host_pages_used"] == 0


def test_an_answer_ends_where_the_pool_does(server):
    answer = server.generate(np.random.default_rng(11).integers(10, 5000, 800), 4000)["meta_info"]
    assert answer["finish_reason"]["type"] == "length"
    assert POOL - 3 * PAGE < 800 + answer["completion_tokens"] <= POOL
    assert server.flush()["host_pages_used"] == 0
