"""``--kv-retrieval freekv`` and nothing else serves the default preset; a page size wins over it. Tokens are the oracle's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.needle import tasks
from oracle import Oracle, OracleSettings
from serving import NEEDLE_MODEL, TestServer
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

pytestmark = [pytest.mark.two_servers, pytest.mark.both_releases]

NEW_TOKENS = 12
ACCURATE = OracleSettings(budget=2048, sink=16, window=32, tau=0.8, page=8, digest="two-bit", hysteresis=1.0)
LARGER_PAGES = OracleSettings(budget=2048, sink=32, window=64, tau=0.8, page=32, digest="two-bit", hysteresis=1.0)
SERVED = {"nothing": ({}, ACCURATE), "a page size": ({"--page-size": 32}, LARGER_PAGES)}


@pytest.fixture(scope="module")
def servers(serve) -> dict[str, TestServer]:
    flags = {"--kv-retrieval": "freekv", "--max-total-tokens": 16384}
    first, *others = (flags | more for more, _ in SERVED.values())
    with serve(first, forked=False) as started, serve(*others) as forked:  # the first as a user starts it
        yield dict(zip(SERVED, started + forked))


@pytest.fixture(scope="module")
def question() -> tasks.Prompt:
    return tasks.make_prompt(np.random.default_rng(8), "magic-number", 3000)


@pytest.mark.parametrize("given", SERVED)
def test_a_server_answers_as_the_oracle_does(servers, question, given):
    answer = servers[given].generate(question.token_ids, NEW_TOKENS)
    counts = answer["meta_info"]["freekv"]
    assert question.is_answered_by(answer["output_ids"]) and counts["attended_pages"] < counts["context_pages"]
    assert answer["output_ids"] == Oracle(NEEDLE_MODEL).generate(question.token_ids, NEW_TOKENS, SERVED[given][1]).tokens


@pytest.mark.parametrize("given", SERVED)
def test_a_server_tells_what_it_has_of_the_preset(servers, given):
    settings, built = SERVED[given][1], servers[given].get("/server_info")["freekv"]
    told = {"budget_tokens": settings.budget, "sink_tokens": settings.sink, "window_tokens": settings.window, "tau": settings.tau}
    told |= {"page_size": settings.page, "digest": settings.digest, "hysteresis": settings.hysteresis, "preset": DEFAULT_PRESET}
    assert {name: built[name] for name in told} == told
    assert built["preset_set"] == [name for name in PRESETS[DEFAULT_PRESET].settings if given == "nothing" or name != "page_size"]
    part = 1 / settings.page + 1 / 16 / 2  # of the KV: a box, in float32 too, and codes, which are half as much of a float as of a half
    assert built["digest_bytes"] == pytest.approx(built["host_bytes"] * part)
