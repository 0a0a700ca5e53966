"""bench_serving's loads on a CPU: every request is answered, nothing is held, and the tree gives what stock SGLang's does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from room import room_for
from serving import ROOT

pytestmark = pytest.mark.two_servers

PAGE, GROUPS = 32, 4
SERIAL, PARTS = "generated-shared-prefix/serial", ("random-ids/2", "generated-shared-prefix/serial", "generated-shared-prefix/16")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("load")
    command = [sys.executable, "-m", "benchmarks.bench_load", "--device", "cpu", "--out", str(out), "--only", *PARTS]
    with room_for(1):  # stock SGLang's server, and then FreeKV's
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    written = json.loads((out / "bench_load-needle.json").read_text())
    run = written["runs"][-1]
    assert not run.get("failures")
    return written["results"]


def test_both_systems_were_sent_the_same_and_answered_all(results):
    assert set(results) == {f"{system}/{part}" for system in ("stock", "freekv") for part in PARTS}
    for part in PARTS:
        stock, ours = results[f"stock/{part}"], results[f"freekv/{part}"]
        assert len(ours["input_lens"]) == (16 if "shared" in part else 8)
        assert ours["input_lens"] == stock["input_lens"] and ours["output_lens"] == stock["output_lens"]
        assert min(ours["output_lens"]) > 0 and len(set(ours["input_lens"])) > 1


def test_figures_are_there_and_nothing_is_held(results):
    for key, result in results.items():
        assert result["output_throughput"] > 0 and result["retractions"] == 0
        for what in ("ttft", "tpot", "itl"):
            assert 0 < result[f"median_{what}_ms"] <= result[f"p90_{what}_ms"] <= result[f"p99_{what}_ms"]
        if key.startswith("freekv"):
            assert result["at_rest"] == {"host_pages_used": 0, "rows_used": 0}
            assert result["totals"]["decode_steps"] > 0


def test_one_by_one_the_hits_are_those_of_stock_sglang_in_whole_pages(results):
    stock, ours = (results[f"{system}/{SERIAL}"]["cached_tokens"] for system in ("stock", "freekv"))
    assert ours == [tokens // PAGE * PAGE for tokens in stock]
    assert sum(tokens == 0 for tokens in stock) == GROUPS  # the first of each group


def test_at_a_rate_the_tree_gives_no_more_than_one_by_one(results):
    """The first requests of a prefix find nothing if they come together: how many do depends on how long prefill takes."""
    for system in ("stock", "freekv"):
        serial, at_rate = (sum(results[f"{system}/{part}"]["cached_tokens"]) for part in (SERIAL, PARTS[2]))
        assert 0.4 * serial < at_rate <= serial


def test_prompts_without_a_shared_prefix_find_nothing(results):
    assert not any(results["stock/random-ids/2"]["cached_tokens"]) and not any(results["freekv/random-ids/2"]["cached_tokens"])
