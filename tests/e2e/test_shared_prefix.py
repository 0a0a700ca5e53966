"""Shared prefixes: as many tokens come from the tree as stock SGLang finds there, and a convoy of requests is let in as fast."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving import TestServer

pytestmark = pytest.mark.both_releases

PAGE, GROUPS, REQUESTS, CONVOY = 32, 4, 16, 24


@pytest.fixture(scope="module")
def trace() -> list[list[int]]:
    """Prompts of a few groups, each with a prefix of its own; every fourth one goes on where an earlier one ended."""
    rng = np.random.default_rng(11)
    prefixes = [rng.integers(16, 5000, int(length)).tolist() for length in rng.integers(300, 1500, GROUPS)]
    prompts: list[list[int]] = []
    for index in range(REQUESTS):
        before = prompts[int(rng.integers(len(prompts)))] if index % 4 == 3 else prefixes[int(rng.integers(GROUPS))]
        prompts.append([*before, *rng.integers(16, 5000, int(rng.integers(8, 200))).tolist()])
    return prompts


def cached(server: TestServer, trace: list[list[int]]) -> list[int]:
    server.flush()
    return [server.generate(prompt, 4)["meta_info"]["cached_tokens"] for prompt in trace]


def test_hits_are_those_of_stock_sglang_in_whole_pages(fleet, trace):
    stock = cached(fleet.stock, trace)  # its pages are of one token
    for server in (fleet.covering, fleet.small):
        ours = cached(server, trace)
        assert ours == [tokens // PAGE * PAGE for tokens in stock]
    assert sum(stock) > 0.5 * sum(map(len, trace))


def first_tokens(server: TestServer, prompts: list[list[int]]) -> list[float]:
    """Seconds to the first token of prompts that are sent at once, in ascending order."""

    def first(prompt: list[int]) -> float:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}, "stream": True}
        started = time.monotonic()
        with server.open("/generate", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    assert json.loads(line[6:])["meta_info"]["completion_tokens"] >= 1
                    taken = time.monotonic() - started
                    response.read()
                    return taken
        raise AssertionError("no token came")

    with ThreadPoolExecutor(len(prompts)) as pool:
        return sorted(pool.map(first, prompts))


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_convoy_over_one_prefix_meets_no_cliff(fleet, warm):
    rng = np.random.default_rng(12)
    prefix = rng.integers(16, 5000, 2048).tolist()
    prompts = [[*prefix, *rng.integers(16, 5000, 40).tolist()] for _ in range(CONVOY)]
    last = {}
    for name, server in (("stock", fleet.stock), ("freekv", fleet.small)):
        server.flush()
        if warm:
            server.generate(prefix, 1)
        times = first_tokens(server, prompts)
        last[name] = times[-1]
        print(f"{name}: first {times[0]:.2f}, median {times[CONVOY // 2]:.2f}, last {times[-1]:.2f} s")
    assert last["freekv"] < 2 * last["stock"] + 1
