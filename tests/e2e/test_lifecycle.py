"""Retraction, preemption, and requests that are ended early in every state: nothing is lost, nothing is held, and nobody else notices."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.needle import tasks
from clients import ENDLESS, assert_only_the_tree_holds_pages, begin, end_early, events, live
from oracle import Oracle
from serving import NEEDLE_MODEL, TestServer, freekv, wait_until

PAGE, CHUNK, CLIENTS, NEW_TOKENS = 16, 128, 16, 24
WAITING_S, RUNNING_S, ARRIVAL_S, MOST_ARRIVALS = 1, 10, 0.75, 96
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # how often SGLang asks whether the client of a whole answer is still there
}
RETRACTING = {"SGLANG_TEST_RETRACT": "1"}  # a request in every third decode step
LIMITED = {
    "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S),
    "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_S),
    # A row changes hands less often than requests may wait, if 90 steps take more than 1 s.
    "SGLANG_TEST_RETRACT_INTERVAL": "90",
}
SERVERS = {  # name -> budget, tau, rows, environment
    "speculative": (128, 0.9, CLIENTS, {}),
    "corrected": (128, 2, 4, {}),
    "retracting": (1024, 0.9, 4, RETRACTING),  # the budget covers every context, so that it does not matter who was retracted when
    "limited": (1024, 2, 4, RETRACTING | LIMITED),
}
PREEMPTING = "corrected"  # its requests go before others by priority
ONE_BY_ONE = "retracting"  # its log tells how many tokens of each request are prefilled
ON_BOTH_RELEASES = "retracting"  # a server for each release and kind would take the test run ten minutes more
HIGH_PRIORITY, SHORT = 100, 50


@dataclass(frozen=True)
class State:
    """Where a request is when it is ended.

    On a CPU transfers are over when a step is, and whoever ends a request is heard between steps. So "prefix" stands for staging and
    "offload" for a page on its way: the request is ended around the step that does it. What a transfer that is still under way does to
    rows and pages that change hands is tested with streams that are as late as they may be (test_retrieval, test_traffic, tests/gpu).

    Args:
        server: of SERVERS.
        tokens: it has had at least so many, and at most; none at all if the most is 0.
        seconds: after sending, if it has had no token or cannot see them.
        length: of its prompt, if it needs one of its own.
    """

    server: str
    tokens: tuple[int, int]
    seconds: tuple[float, float]
    length: int = 0


STATES = {  # by server, so that each starts once
    "queued": State("corrected", (0, 0), (0.1, 0.5)),
    "correction": State("corrected", (1, 20), (0.5, 2.0)),
    "prefill": State("speculative", (0, 0), (0.2, 1.5), length=1000),
    "prefix": State("speculative", (0, 0), (0.0, 0.4), length=24),
    "offload": State("speculative", (PAGE - 2, PAGE), (0.8, 1.6), length=4 * PAGE),
    "decode": State("speculative", (1, 20), (0.5, 2.0)),
    "retracted": State("retracting", (1, 20), (0.5, 2.0)),
}
WAYS = ("disconnect", "abort", "timeout")
IN_EVERY_WAY = ("prefill", "decode", "retracted")  # the other states are ended in one way each
ENDS = [
    (state, how)
    for index, state in enumerate(STATES)
    for turn, how in enumerate(WAYS)
    if state in IN_EVERY_WAY or turn == index % len(WAYS)
]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tasks.make_document(rng, int(length), needle_count=1).token_ids for length in rng.integers(80, 320, CLIENTS)]


@pytest.fixture(scope="module")
def shared_prefix() -> list[int]:
    return np.random.default_rng(6).integers(10, 5000, 1504).tolist()


@pytest.fixture(scope="module")
def served(serve, prompts, request) -> SimpleNamespace:
    """A server of SERVERS, and what it answers when nobody is ended early, which its own limits might do. One lives at a time."""
    budget, tau, rows, env = SERVERS[request.param]
    flags = freekv(budget, sink=16, window=32, tau=tau)
    flags |= {"--page-size": PAGE, "--chunked-prefill-size": CHUNK, "--max-running-requests": rows, "--max-total-tokens": 32768}
    if request.param == PREEMPTING:
        flags |= {"--enable-priority-scheduling": True}
    if request.param == ONE_BY_ONE:
        flags |= {"--prefill-max-requests": 1}
    with serve(flags, env=ENVIRONMENT | env) as (server,):
        unlimited = [] if env.keys() & LIMITED.keys() else prompts
        answers = server.generate_all(unlimited, NEW_TOKENS, concurrency=4)
        yield SimpleNamespace(server=server, undisturbed=[answer["output_ids"] for answer in answers])


def served_by(name: str):
    return pytest.mark.parametrize("served", [name], indirect=True, scope="module")


@contextmanager
def all_rows_taken(server: TestServer, queued: int):
    """Whoever comes within must wait; at the end of it, until so many are left waiting. Then the rows are free."""
    rows = server.state()["rows_total"]
    holders = [begin(server, range(10, 40 + index), ENDLESS, f"holder-{index}") for index in range(rows)]
    wait_until(lambda: server.state()["rows_used"] == rows)
    yield
    wait_until(lambda: server.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == queued)
    server.open("/abort_request", {"rid": "holder"}).close()
    for holder in holders:
        holder.close()


def prefilled(log: str) -> int:
    """Tokens that SGLang says to have prefilled, each batch of one request, and rounded up to pages, as some releases do by themselves."""
    batches = re.findall(r"Prefill batch.*#new-seq: (\d+), #new-token: (\d+)", log)
    assert batches and all(requests == "1" for requests, _ in batches)
    return sum(-(-int(tokens) // PAGE) * PAGE for _, tokens in batches)


@served_by(PREEMPTING)
def test_whoever_is_preempted_resumes_and_loses_no_token(served, prompts):
    """The budget covers their contexts, so that it does not matter who was preempted when."""
    server, rows = served.server, SERVERS[PREEMPTING][2]
    prompts = [prompt[:SHORT] for prompt in prompts[: 2 * rows - 1]]
    alone = [server.generate(prompt, SHORT)["output_ids"] for prompt in prompts]
    server.flush()

    def ask(prompt, priority: int) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": SHORT, "ignore_eos": True}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "priority": priority})

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, prompt, 0) for prompt in prompts[:rows]]
        wait_until(lambda: server.state()["rows_used"] == rows)
        asked += [pool.submit(ask, prompt, HIGH_PRIORITY) for prompt in prompts[rows:]]
        answers = [answer.result() for answer in asked]
    assert [answer["output_ids"] for answer in answers] == alone
    retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
    assert sum(retractions[:rows]) == rows - 1 and not any(retractions[rows:])
    assert_only_the_tree_holds_pages(server)


@pytest.mark.parametrize(
    ("served", "end"),
    [
        pytest.param(
            STATES[state].server, (state, how), id=f"{state}-{how}",
            marks=pytest.mark.both_releases if STATES[state].server == ON_BOTH_RELEASES else (),
        )
        for state, how in ENDS
    ],
    indirect=["served"],
    scope="module",
)  # fmt: skip
def test_a_request_that_ends_early_leaves_nothing(served, prompts, shared_prefix, end):
    """Of sixteen requests some are ended early: the others, and those that come after, are answered as ever."""
    (state, how), server, expected = end, served.server, served.undisturbed
    where = STATES[state]
    rng = np.random.default_rng([list(STATES).index(state), WAYS.index(how)])
    ended = rng.choice(CLIENTS, int(rng.integers(6, 11)), replace=False).tolist()
    others = [index for index in range(CLIENTS) if index not in ended]
    server.flush()
    if state == "prefix":
        server.generate(shared_prefix, 1)

    def live_or_end(index: int) -> list[int] | None:
        rid, own = f"{state}-{how}-{index:02}", np.random.default_rng([*map(ord, state), index])
        if index in others:
            return live(server, prompts[index], rid, NEW_TOKENS)["output_ids"]
        prompt = own.integers(10, 5000, where.length).tolist() if where.length else prompts[index]
        prompt = [*shared_prefix, *prompt] if state == "prefix" else prompt
        end_early(server, prompt, rid, how, int(own.integers(*where.tokens, endpoint=True)), own.uniform(*where.seconds))

    rows_taken = all_rows_taken(server, queued=len(others)) if state == "queued" else nullcontext()
    with ThreadPoolExecutor(CLIENTS) as pool:
        with rows_taken:
            clients = {index: pool.submit(live_or_end, index) for index in rng.permutation(CLIENTS).tolist()}
            if state == "queued":
                wait([clients[index] for index in ended])
        answers = {index: client.result() for index, client in clients.items()}
    assert [answers[index] for index in others] == [expected[index] for index in others]
    again = server.generate_all(prompts[:4], NEW_TOKENS)
    assert [answer["output_ids"] for answer in again] == expected[:4]
    assert_only_the_tree_holds_pages(server)


@pytest.mark.both_releases
@served_by(ON_BOTH_RELEASES)
def test_retraction_loses_no_token_and_computes_no_page_twice(served, prompts):
    server, oracle, prompts = served.server, Oracle(NEEDLE_MODEL), prompts[:8]
    server.flush()
    begun = len(server.log.read_text())
    answers = server.generate_all(prompts, 40)
    assert [answer["output_ids"] for answer in answers] == [oracle.generate(prompt, 40).tokens for prompt in prompts]
    counts = [answer["meta_info"] for answer in answers]
    for count in counts:  # the extend after a retraction may yield a token, too
        assert 39 - count["num_retractions"] <= count["freekv"]["decode_steps"] <= 39
    resumed = sum(count["num_retractions"] for count in counts)
    once = sum(-(-len(prompt) // PAGE) * PAGE for prompt in prompts)
    assert resumed > 0
    assert prefilled(server.log.read_text()[begun:]) == once + resumed * PAGE  # a page that was not full, and nothing before it
    assert_only_the_tree_holds_pages(server)


@served_by("limited")
def test_sglangs_own_timeouts(served, prompts):
    """Its limits end those that wait, retracted or new, and those that run. Clients arrive until each end was seen, however slow a step is."""
    server, oracle = served.server, Oracle(NEEDLE_MODEL)
    rows = server.state()["rows_total"]
    long_prompts = np.random.default_rng(7).integers(10, 5000, (CLIENTS // 4, 1000)).tolist()
    clients = [*prompts[: CLIENTS - len(long_prompts)], *long_prompts]
    waiting, running = (f"Request {state} timeout reached." for state in ("waiting", "running"))
    ends, seen = {(waiting, False), (waiting, True), (running, True)}, set()

    def live_until_ended(index: int) -> None:
        """Notes what ended it, and whether it had run before."""
        *earlier, last = events(begin(server, clients[index % CLIENTS], ENDLESS, f"limited-{index:03}"))
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        seen.add((last["meta_info"]["finish_reason"]["message"], bool(earlier)))

    with ThreadPoolExecutor(MOST_ARRIVALS) as pool:
        asked = []
        for index in range(MOST_ARRIVALS):
            asked.append(pool.submit(live_until_ended, index))
            time.sleep(ARRIVAL_S if index >= rows else 0)
            if index >= CLIENTS and seen >= ends:
                break
        for client in asked:
            client.result()
    assert seen == ends
    again = server.generate_all(prompts[:4], NEW_TOKENS, concurrency=1)
    assert [answer["output_ids"] for answer in again] == [oracle.generate(prompt, NEW_TOKENS).tokens for prompt in prompts[:4]]
    assert_only_the_tree_holds_pages(server)
