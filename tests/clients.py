"""Clients that stay until their answer is whole, or leave before, and what they must not leave behind."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving import DEADLINE_S, TestServer

ENDLESS = 2000  # tokens of an answer that is ended early


def assert_only_the_tree_holds_pages(server: TestServer) -> None:
    assert server.when_idle()["rows_used"] == 0
    assert server.get("/v1/loads")["loads"][0]["num_used_tokens"] == 0  # SGLang counts those that the tree could not evict
    assert server.flush()["host_pages_used"] == 0


def begin(server: TestServer, token_ids, max_new_tokens: int, rid: str, stream: bool = True, timeout_s: float = DEADLINE_S):
    """Send a request and leave the connection open."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": [int(token) for token in token_ids], "sampling_params": sampling, "stream": stream, "rid": rid}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def events(connection: http.client.HTTPConnection) -> Iterator[dict]:
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def live(server: TestServer, token_ids, rid: str, max_new_tokens: int) -> dict:
    """A request that is let alone: its last event."""
    *_, last = events(begin(server, token_ids, max_new_tokens, rid))
    return last


def end_early(server: TestServer, token_ids, rid: str, how: str, tokens: int, seconds: float) -> None:
    """A request that would not end for long, ended after so many tokens, or seconds if it has had none or waits for the whole answer."""
    if how == "timeout":
        connection = begin(server, token_ids, ENDLESS, rid, stream=False, timeout_s=seconds)
        with pytest.raises(TimeoutError):
            connection.getresponse()
    else:
        connection = begin(server, token_ids, ENDLESS, rid)
        coming = events(connection)
        if tokens:
            next(event for event in coming if event["meta_info"]["completion_tokens"] >= tokens)
        else:
            time.sleep(seconds)
        if how == "abort":
            server.open("/abort_request", {"rid": rid}).close()
            *_, last = coming
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
    connection.close()


def stay_while_others_end(server: TestServer, how: str, ended, stay, new_tokens: int) -> list[dict]:
    """The answers to ``stay``, beside requests that end early: while they decode, in a chunk of their prompt, or waiting for a row."""
    with ThreadPoolExecutor(len(ended) + len(stay)) as pool:
        ends = [
            pool.submit(end_early, server, prompt, f"{how}-{index}", how, index % 4, 0.1 + index / 4) for index, prompt in enumerate(ended)
        ]
        answers = list(pool.map(lambda prompt: server.generate(prompt, new_tokens), stay))
        for end in ends:
            end.result()
    return answers
