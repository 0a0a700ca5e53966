"""LoRA adapters under decode graphs: where the budget covers the context, the answers of stock SGLang."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from adapters import make_adapter
from benchmarks.needle import tasks
from likeness import alike
from serving import NEEDLE_MODEL, TestServer, freekv, start_all, stop_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

NEW_TOKENS = 24
NAMES = (None, "one", "two")
ON_GPU = {"--device": "cuda", "--dtype": "bfloat16", "--mem-fraction-static": 0.3, "--sampling-backend": "pytorch"}
LORA = {"--enable-lora": True, "--max-lora-rank": 8, "--lora-target-modules": "all"}


def test_adapters_side_by_side_are_those_of_stock_sglang(tmp_path):
    model = LlamaForCausalLM.from_pretrained(NEEDLE_MODEL, dtype=torch.bfloat16)
    for seed, name in enumerate(NAMES[1:]):
        make_adapter(model, tmp_path / name, seed, size=0.1)
    flags = ({"--attention-backend": "flashinfer"}, freekv(8192, host_memory=4))
    servers = start_all(TestServer(ON_GPU | LORA | own, tmp_path / f"server-{at}" / "log.txt") for at, own in enumerate(flags))
    stock, covering = servers
    for server in servers:
        for name in NAMES[1:]:
            server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)})
    prompts = [tasks.make_document(np.random.default_rng(seed), length).token_ids for seed, length in enumerate((300, 900, 1500, 2500))]

    def ask(server, concurrency: int) -> list[list[int]]:
        def one(asked) -> dict:
            prompt, name = asked
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            return server.post("/generate", {"input_ids": [int(t) for t in prompt], "sampling_params": sampling, "lora_path": name})

        with ThreadPoolExecutor(concurrency) as pool:
            return [answer["output_ids"] for answer in pool.map(one, [(prompt, name) for prompt in prompts for name in NAMES])]

    expected, alone = ask(stock, 8), ask(stock, 1)
    ours = [ask(covering, 8), ask(covering, 8)]  # cold, and from the prefix cache
    stop_all(servers)
    least = alike(expected, alone) - 0.1  # bfloat16: stock SGLang differs from itself, one request at a time
    others = [expected[at - 1 if at % 3 else at + 2] for at in range(len(expected))]  # another adapter's answer to the prompt
    assert min(alike(expected, answers) for answers in ours) >= least > alike(expected, others)
