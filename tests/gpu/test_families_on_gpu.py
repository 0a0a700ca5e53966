"""Hybrids, mixtures of experts and models with window layers on a GPU, some on two: decode and prefill graphs, states, heads of 256."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from families import FAMILIES, HYBRIDS, VOCABULARY, WINDOWED, Family, make_model
from likeness import alike
from serving import TestServer, freekv, start_all, stop_all
from sglang_freekv import releases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

NEW_TOKENS, BUDGET = 24, 512
WIDE = dict(hidden_size=512, intermediate_size=512, num_hidden_layers=8)
LINEAR = dict(linear_num_key_heads=4, linear_num_value_heads=12, linear_key_head_dim=128, linear_value_head_dim=128)
ON_GPU = {
    "--device": "cuda", "--dtype": "bfloat16", "--sampling-backend": "pytorch", "--mem-fraction-static": 0.35, "--skip-tokenizer-init": True,
    "--page-size": 8, "--chunked-prefill-size": 1024,
}  # fmt: skip
SYSTEMS = {"stock": {}, "freekv": freekv(BUDGET, preset="accurate", host_memory=4)}


class Served(NamedTuple):
    """A family, changes to its tiny checkpoint, flags of both servers, how many GPUs they share, and the stock server's attention.

    SGLang's FlashInfer knows no learned sinks, and no window in a prompt without a prefix. Its Triton knows sinks on every GPU, but not
    Command-A's windows. FlashAttention 3 knows them, on Hopper alone.
    """

    family: Family
    changes: dict[str, Any]
    flags: dict
    ranks: int = 1
    attention: str = "flashinfer"


HYBRID = Served(HYBRIDS["qwen3.5"], WIDE | LINEAR | dict(head_dim=256), {"--max-mamba-cache-size": 64})
NARROW = dict(hidden_size=512, intermediate_size=512, head_dim=64, num_attention_heads=8)
SINKS = Served(WINDOWED["granite-swa"], NARROW | dict(sliding_window=128, attention_multiplier=1 / 64), {}, attention="triton")
WINDOWS = Served(WINDOWED["olmo-3"], NARROW | dict(sliding_window=128, num_key_value_heads=8), {}, attention="fa3")
COMMAND = Served(WINDOWED["command-a"], NARROW | dict(sliding_window=128, num_key_value_heads=2), {}, attention="fa3")
GPT_OSS = Served(WINDOWED["gpt-oss"], dict(hidden_size=512, intermediate_size=512), {}, attention="fa3")
NOT_FUSED = {"--enforce-disable-flashinfer-allreduce-fusion": True}  # it asks for multicast, and stock SGLang waits for it on GPUs without
EXPERTS = Served(FAMILIES["qwen3-moe"], WIDE | dict(head_dim=128), {})
MODELS = {
    "hybrid": HYBRID, "experts": EXPERTS, "windows and sinks": SINKS, "windows": WINDOWS, "gpt-oss": GPT_OSS, "command-a": COMMAND,
    "hybrid, two ranks": HYBRID._replace(ranks=2), "experts, two ranks": EXPERTS._replace(ranks=2, flags=NOT_FUSED),
    "windows and sinks, two ranks": SINKS._replace(ranks=2), "gpt-oss, two ranks": GPT_OSS._replace(ranks=2),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def servers(tmp_path_factory, request):
    model, directory = MODELS[request.param], tmp_path_factory.mktemp("family")
    if torch.cuda.device_count() < model.ranks:
        pytest.skip(f"needs {model.ranks} GPUs")
    if model.attention == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3, which these are compared with, runs on Hopper alone")
    if model.family in (HYBRID.family, SINKS.family, WINDOWS.family, COMMAND.family) and not releases.has("checkpoint"):
        pytest.skip("hybrids, and models with window layers other than gpt-oss, are refused on this release")
    make_model(model.family, directory / "model", dtype=torch.bfloat16, **model.changes)
    flags = ON_GPU | model.flags | {"--model-path": directory / "model", "--tp-size": model.ranks}
    systems = SYSTEMS | {"stock": {"--attention-backend": model.attention}}
    pair = start_all(TestServer(flags | own, directory / name / "log.txt") for name, own in systems.items())
    yield dict(zip(SYSTEMS, pair))
    stop_all(pair)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(VOCABULARY), k=length) for length in lengths]


def tokens(answers: list[dict], most: int | None = None) -> list[list[int]]:
    return [answer["output_ids"][:most] for answer in answers]


def test_within_the_budget_answers_are_stock_sglangs(servers):
    asked = prompts(0, 60, 130, 260, 400, 480, 300, 90, 210, 350, 440, 170, 240)
    expected, alone = (tokens(servers["stock"].generate_all(asked, NEW_TOKENS, concurrency)) for concurrency in (12, 1))
    answers = [servers["freekv"].generate_all(asked, NEW_TOKENS, 12) for _ in ("cold", "from the prefix cache")]
    least = alike(expected, alone) - 0.25  # bfloat16: stock SGLang differs from itself, one request at a time, and by kernel
    others = expected[1:] + expected[:1]
    assert min(alike(expected, tokens(each)) for each in answers) >= least > alike(expected, others)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers[1]) >= 2000


def test_long_contexts_recall_and_leave_nothing(servers):
    """Newcomers, hits and decode steps side by side; each prompt again gives its first tokens again, until rounding routes one elsewhere."""
    ours, asked = servers["freekv"], prompts(1, *[3000 + 64 * index for index in range(8)])
    first = ours.generate_all(asked, 200, 8)
    with ThreadPoolExecutor(2) as pool:
        again, _ = pool.map(lambda some: ours.generate_all(some, 200, 8), (asked, prompts(2, *[500] * 16)))
    begun, others = tokens(first, NEW_TOKENS), tokens(first[1:] + first[:1], NEW_TOKENS)
    assert alike(begun, tokens(again, NEW_TOKENS)) > alike(begun, others) + 0.15
    state = ours.when_idle()
    assert state["totals"]["recalled_units"] > 0
    after = ours.flush()
    assert after["host_pages_used"] == 0
    assert all(after.get(kind, {}).get("used", 0) == 0 for kind in ("states", "windows"))
