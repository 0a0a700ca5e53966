"""Every example does what its docstring promises, against the servers that all tests share."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = 32  # of the servers that all tests share
OFFLINE_PAGE = PRESETS[DEFAULT_PRESET].page_size


def start(name: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    """What it printed."""
    try:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        return printed
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """End it and what it started, if any of that still runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(name: str, *arguments: str) -> str:
    return finish(start(name, *arguments))


def numbers(pattern: str, printed: str) -> list[tuple[int, ...]]:
    """The groups of each match."""
    return [tuple(map(int, match.groups())) for match in re.finditer(pattern, printed)]


def assert_all_right(printed: str, answers: int) -> None:
    assert printed.count("(right)") == answers and "WRONG" not in printed, printed


@pytest.fixture(scope="module")
def engine():
    """The offline example, which starts while the others run."""
    process = start("offline_engine", "--documents", "2", "--tokens", "1500", "--host-memory", "0.5")
    yield process
    end(process)


def test_an_agents_turns_compute_their_new_tokens_alone(engine, fleet):
    fleet.small.flush()
    printed = run("agent", "--url", fleet.small.url, "--turns", "4", "--tokens", "600")
    assert_all_right(printed, 4)
    prompts, cached = zip(*numbers(r"prompt (\d+) tokens, cached (\d+)", printed))
    assert cached[0] == 0
    for before, hit in zip(prompts, cached[1:]):
        assert before // PAGE * PAGE <= hit <= before + PAGE


def test_the_branches_of_a_fork_find_the_document_cached(fleet):
    fleet.small.flush()
    printed = run("frontend_fork", "--url", fleet.small.url, "--questions", "3", "--tokens", "1500")
    assert_all_right(printed, 3)
    cached, document = [hit for _, hit in numbers(r"prompt (\d+) tokens, cached (\d+)", printed)], 1500 // PAGE * PAGE
    assert len(cached) == 3 and min(cached) == document
    assert max(cached) <= document + PAGE  # a late branch finds how the questions before it begin


def test_a_second_question_finds_the_document_cached(fleet):
    fleet.small.flush()
    printed = run("openai_client", "--url", fleet.small.url, "--tokens", "2500")
    assert_all_right(printed, 2)
    assert [cached for _, cached in numbers(r"prompt (\d+) tokens, cached (\d+)", printed)] == [0, 2500 // PAGE * PAGE]
    cold, hit = map(float, re.findall(r"first token after ([\d.]+) s", printed))
    assert hit < cold


def test_both_servers_answer_the_same_load(fleet):
    load = ("--prefixes", "2", "--questions", "2", "--prefix-tokens", "256", "--answer-tokens", "8")
    printed = run("bench_shared_prefix", "--stock", fleet.stock.url, "--freekv", fleet.small.url, *load)
    lines = re.findall(r"^(stock|freekv) +(\d+) answers, (\d+) tokens, .* [\d.]+ ms, \d+ tokens/s$", printed, re.MULTILINE)
    assert lines == [("stock", "4", "32"), ("freekv", "4", "32")]


def test_the_offline_engine_answers_by_fewer_pages_than_the_documents_have(engine):
    printed = finish(engine)
    assert_all_right(printed, 2)
    attended = numbers(r"attended to (\d+) of (\d+) pages in each of (\d+) decode steps", printed)
    assert [pages for pages, _, _ in attended] == [512 // OFFLINE_PAGE] * 2
    assert all(of >= 1500 // OFFLINE_PAGE and steps > 0 for _, of, steps in attended)
    assert all(recalled == 0 < selected for recalled, selected in numbers(r"recalled (\d+) of (\d+) selected units", printed))  # resident
