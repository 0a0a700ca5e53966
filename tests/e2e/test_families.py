"""Tiny random-weight models of other families: as the oracle, within the budget (which is dense) and beyond it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oracle import Oracle, OracleSettings
from serving import freekv
from sglang_freekv.architectures import TESTED_ARCHITECTURES

NEW_TOKENS, VOCABULARY = 16, 512
SETTINGS = OracleSettings(budget=256, sink=64, window=64, tau=0.8, page=32)
FAMILIES = {  # model type, query heads, kv heads, more
    "qwen2": ("qwen2", 4, 2, {}),
    "granite": ("granite", 4, 2, {"attention_multiplier": 0.6}),  # 1 / sqrt(D) with the others
    "qwen3": ("qwen3", 6, 3, {}),
    "llama-mha": ("llama", 4, 4, {}),
    "llama-8q-1kv": ("llama", 8, 1, {}),
    "qwen3-moe": ("qwen3_moe", 4, 2, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}


def test_the_architectures_that_are_called_tested_are_these():
    kinds = {kind for kind, *_ in FAMILIES.values()}
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in kinds} == TESTED_ARCHITECTURES


def make_model(family: str, path) -> None:
    kind, query_heads, kv_heads, more = FAMILIES[family]
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **heads, **shape, max_position_embeddings=4096, tie_word_embeddings=False, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, and small weights make every token alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
    model.save_pretrained(path)


@pytest.mark.parametrize("families", [list(FAMILIES)[:3], list(FAMILIES)[3:]], ids="+".join)
def test_same_tokens_as_the_oracle(serve, tmp_path, families):
    flags = freekv(SETTINGS.budget, sink=SETTINGS.sink, window=SETTINGS.window, tau=SETTINGS.tau)
    flags |= {"--skip-tokenizer-init": True, "--max-total-tokens": 8192}
    for family in families:
        make_model(family, tmp_path / family)
    with serve(*(flags | {"--model-path": tmp_path / family} for family in families)) as servers:
        for family, server in zip(families, servers):
            draw = random.Random(family)
            prompts = [draw.choices(range(VOCABULARY), k=length) for length in (16, 77, 200, 230, 500, 901)]
            answers = server.generate_all(prompts, NEW_TOKENS)
            oracle = Oracle(tmp_path / family)
            expected = [oracle.generate(prompt, NEW_TOKENS, SETTINGS).tokens for prompt in prompts]
            assert [answer["output_ids"] for answer in answers] == expected, family
            recalled = [answer["meta_info"]["freekv"]["recalled_units"] for answer in answers]
            assert not any(recalled[:4]) and all(recalled[4:]), family
