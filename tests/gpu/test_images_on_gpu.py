"""Models that read images on a GPU: stock SGLang's answers within the budget, recall beyond it, and the same image as a hit."""

from __future__ import annotations

import pytest
import torch

from likeness import alike
from seeing import FAMILIES, encoded, make_model, picture
from serving import TestServer, freekv, start_all, stop_all
from sglang_freekv import releases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`"),
    pytest.mark.skipif(not releases.has("checkpoint"), reason="images are refused on this release"),
]

NEW_TOKENS, BUDGET, CHUNK = 24, 512, 1024
WIDE = dict(hidden_size=512, intermediate_size=1024, head_dim=64, num_attention_heads=8)
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]}
MODELS = {
    "qwen3-vl": WIDE | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}},
    "qwen2.5-vl": WIDE | {"rope_parameters": SECTIONS},
    "mistral-small-3.2": WIDE,
    "gemma-3": WIDE,
}
ON_GPU = {
    "--device": "cuda", "--dtype": "bfloat16", "--sampling-backend": "pytorch", "--mem-fraction-static": 0.3, "--enable-multimodal": True,
    "--chunked-prefill-size": CHUNK, "--page-size": 8,
}  # fmt: skip
SYSTEMS = {"stock": {"--attention-backend": "flashinfer"}, "freekv": freekv(BUDGET, preset="accurate", host_memory=4)}


@pytest.fixture(scope="module", params=MODELS)
def servers(tmp_path_factory, request):
    directory, family = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    vision = {"out_hidden_size": WIDE["hidden_size"]} if "out_hidden_size" in family.vision else {}
    make_model(family._replace(vision=family.vision | vision), directory / "model", **MODELS[request.param])
    flags = ON_GPU | {"--model-path": directory / "model"}
    pair = start_all(TestServer(flags | own, directory / name / "log.txt") for name, own in SYSTEMS.items())
    yield dict(zip(SYSTEMS, pair)) | {"picture": family.picture}
    stop_all(pair)


def ask(server: TestServer, texts: list[str], seeds: list[int], new_tokens: int = NEW_TOKENS) -> list[dict]:
    """A text with an image each, in one batch."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    images = [encoded(picture(seed)) for seed in seeds]
    return server.post("/generate", {"text": texts, "image_data": images, "sampling_params": sampling})


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_within_the_budget_answers_are_stock_sglangs(servers):
    seeds = list(range(6))
    texts = [servers["picture"] + "what is it? " + "abc def " * (12 + seed) for seed in seeds]
    expected = tokens(ask(servers["stock"], texts, seeds))
    alone = [tokens(ask(servers["stock"], [text], [seed]))[0] for text, seed in zip(texts, seeds)]
    cold, hits = ask(servers["freekv"], texts, seeds), ask(servers["freekv"], texts, seeds)
    least = alike(expected, alone) - 0.25  # bfloat16: stock SGLang differs from itself, one request at a time, and by kernel
    others = expected[1:] + expected[:1]
    assert min(alike(expected, tokens(each)) for each in (cold, hits)) >= least > alike(expected, others)
    assert all(answer["meta_info"]["cached_tokens"] > 100 for answer in hits)


def test_long_prompts_recall_and_leave_nothing(servers):
    ours, seeds = servers["freekv"], list(range(10, 14))
    texts = ["ghi jkl mno " * (100 + seed) + servers["picture"] + "pqr stu " * 100 for seed in seeds]
    first, again, other = (ask(ours, texts, each, 64) for each in (seeds, seeds, seeds[1:] + seeds[:1]))
    assert alike(tokens(first), tokens(again)) > alike(tokens(first), tokens(other)) + 0.1
    before = [len("ghi jkl mno ") * (100 + seed) for seed in seeds]
    for length, answer in zip(before, other):  # a window may be left where another prompt parts, a page before
        assert length - 16 <= answer["meta_info"]["cached_tokens"] <= length + 8
    assert ours.when_idle()["totals"]["recalled_units"] > 0
    assert ours.flush()["host_pages_used"] == 0
