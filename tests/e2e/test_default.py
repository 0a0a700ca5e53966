"""``--kv-retrieval freekv`` and nothing else serves the default preset, and starts as a user starts it. Tokens are the oracle's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.needle import tasks
from oracle import Oracle, OracleSettings
from serving import NEEDLE_MODEL, TestServer
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

pytestmark = [pytest.mark.two_servers, pytest.mark.both_releases]

NEW_TOKENS = 12
SETTINGS = OracleSettings(budget=2048, sink=16, window=32, tau=0.8, page=8, digest="two-bit", hysteresis=1.0)


@pytest.fixture(scope="module")
def server(serve) -> TestServer:
    with serve({"--kv-retrieval": "freekv", "--max-total-tokens": 16384}, forked=False) as (server,):
        yield server


def test_it_answers_as_the_oracle_does(server):
    question = tasks.make_prompt(np.random.default_rng(8), "magic-number", 3000)
    answer = server.generate(question.token_ids, NEW_TOKENS)
    counts = answer["meta_info"]["freekv"]
    assert question.is_answered_by(answer["output_ids"]) and counts["attended_pages"] < counts["context_pages"]
    assert answer["output_ids"] == Oracle(NEEDLE_MODEL).generate(question.token_ids, NEW_TOKENS, SETTINGS).tokens


def test_it_tells_what_it_has_of_the_preset(server):
    built = server.get("/server_info")["freekv"]
    told = {"budget_tokens": SETTINGS.budget, "sink_tokens": SETTINGS.sink, "window_tokens": SETTINGS.window, "tau": SETTINGS.tau}
    told |= {"page_size": SETTINGS.page, "digest": SETTINGS.digest, "hysteresis": SETTINGS.hysteresis, "preset": DEFAULT_PRESET}
    assert {name: built[name] for name in told} == told
    assert built["preset_set"] == list(PRESETS[DEFAULT_PRESET].settings)
    part = 1 / SETTINGS.page + 1 / 16 / 2  # of the KV: a box, in float32 too, and codes, which are half as much of a float as of a half
    assert built["digest_bytes"] == pytest.approx(built["host_bytes"] * part)
