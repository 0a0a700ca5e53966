"""Quantised weights with KV in bfloat16: within the budget the answers of stock SGLang, and beyond it right ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.needle import tasks
from likeness import alike
from quantised import make_checkpoint
from serving import NEEDLE_MODEL, TestServer, freekv, start_all, stop_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

KINDS, NEW_TOKENS, BUDGET = ("fp8", "awq", "gptq"), 24, 512
ON_GPU = {"--device": "cuda", "--dtype": "bfloat16", "--sampling-backend": "pytorch", "--mem-fraction-static": 0.3}
SYSTEMS = {"stock": {"--attention-backend": "flashinfer"}, "freekv": freekv(BUDGET, host_memory=4)}
WITHIN = [tasks.make_document(np.random.default_rng(seed), length).token_ids for seed, length in enumerate((230, 300, 400, 480))]


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module", params=KINDS)
def servers(tmp_path_factory, request):
    directory = tmp_path_factory.mktemp(request.param)
    flags = {"--quantization": "fp8"}  # as the server loads the weights
    if request.param != "fp8":
        make_checkpoint(NEEDLE_MODEL, directory / "model", request.param)
        flags = {"--model-path": directory / "model"}
    pair = start_all(TestServer(ON_GPU | flags | own, directory / name / "log.txt") for name, own in SYSTEMS.items())
    yield dict(zip(SYSTEMS, pair))
    stop_all(pair)


def test_within_the_budget_answers_are_stock_sglangs(servers):
    stock, ours = servers["stock"], servers["freekv"]
    expected, alone = (tokens(stock.generate_all(WITHIN, NEW_TOKENS, concurrency)) for concurrency in (4, 1))
    answers = [tokens(ours.generate_all(WITHIN, NEW_TOKENS, 4)) for _ in ("cold", "from the prefix cache")]
    least = alike(expected, alone) - 0.1  # bfloat16: stock SGLang differs from itself, one request at a time
    assert min(alike(expected, each) for each in answers) >= least > alike(expected, expected[1:] + expected[:1])


def test_beyond_the_budget_needles_are_found(servers):
    document = tasks.make_document(np.random.default_rng(7), 4000, needle_count=4, tasks=("magic-number", "code-word"))
    questions = [document.ask(fact) for fact in document.facts]
    for name, server in servers.items():
        answers = tokens(server.generate_all([question.token_ids for question in questions], 16))
        assert all(question.is_answered_by(answer) for question, answer in zip(questions, answers)), name
    assert servers["freekv"].when_idle()["totals"]["recalled_units"] > 0
