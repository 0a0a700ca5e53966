"""Every retrieval method in a real server: needle questions below the budget of the context, and what the counts say of the method."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.needle import tasks
from serving import freekv
from sglang_freekv.methods import METHODS

LAYERS, HEADS = 7, 2  # retrieval layers of the needle model, and their kv heads
BLOCKING = [method for method, defaults in METHODS.items() if defaults.tau is None]


@pytest.fixture(scope="module")
def questions() -> list[tasks.Prompt]:
    document = tasks.make_document(np.random.default_rng(5), 3000, 12, ("magic-number", "code-word", "multi-query", "variable-3") * 2)
    return [document.ask(fact) for fact in document.facts[:8]]


@pytest.fixture(scope="module")
def servers(serve):
    with serve(*(freekv(512) | {"--kv-retrieval": method, "--freekv-preset": None} for method in BLOCKING)) as started:
        yield dict(zip(BLOCKING, started))


@pytest.mark.parametrize("method", BLOCKING)
def test_a_blocking_method_selects_for_every_kv_head_in_every_step(servers, questions, method):
    server = servers[method]
    answers = server.generate_all([question.token_ids for question in questions], 40)
    right = [question.is_answered_by(answer["output_ids"]) for question, answer in zip(questions, answers)]
    assert sum(right) >= 7, right
    for answer in answers:
        counts = answer["meta_info"]["freekv"]
        assert counts["corrections"] == counts["correction_decisions"] == counts["decode_steps"] * LAYERS * HEADS
        assert counts["attended_pages"] < counts["context_pages"]
    told = server.get("/server_info")["freekv"]
    assert (told["method"], told["page_size"], told["digest"], told["preset"]) == (method, 32, METHODS[method].digest, None)
    assert server.flush()["host_pages_used"] == 0


@pytest.fixture(scope="module")
def louiskv(serve):
    with serve(freekv(512) | {"--kv-retrieval": "louiskv", "--freekv-preset": None}) as (server,):
        yield server


def test_a_trigger_corrects_all_kv_heads_of_a_layer_or_none(louiskv, questions):
    server = louiskv
    answers = server.generate_all([question.token_ids for question in questions], 40)
    right = [question.is_answered_by(answer["output_ids"]) for question, answer in zip(questions, answers)]
    assert sum(right) >= 7, right
    for counts in (answer["meta_info"]["freekv"] for answer in answers):
        assert counts["correction_decisions"] == counts["decode_steps"] * LAYERS * HEADS
        assert counts["corrections"] % HEADS == 0 and 0 < counts["corrections"] < counts["correction_decisions"]
    told = server.get("/server_info")["freekv"]
    assert (told["method"], told["tau"]) == ("louiskv", METHODS["louiskv"].tau)
    assert (told["page_size"], told["digest"], told["hysteresis"], told["preset"]) == (32, "cuboid-mean", 0, None)
    assert server.flush()["host_pages_used"] == 0
