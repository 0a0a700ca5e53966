"""LoRA adapters: the tokens of each are those of the oracle with the adapter in its weights, side by side and from the prefix cache."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adapters import make_adapter, merge_adapter
from oracle import Oracle, OracleSettings
from room import room_for
from serving import LoraServer, freekv, start_all, stop_all

NEW_TOKENS, VOCABULARY = 16, 512
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False}
SETTINGS = OracleSettings(budget=256, sink=64, window=64, tau=0.8, page=32)


def test_same_tokens_as_the_oracle_with_the_adapter(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).float()
    with torch.no_grad():  # small weights make every token alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "model")
    adapters = {None: None, "one": tmp_path / "one", "two": tmp_path / "two"}
    oracles = {}
    for seed, (name, path) in enumerate(adapters.items()):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        if path is not None:
            make_adapter(model, path, seed)
            merge_adapter(model, path)
        oracles[name] = Oracle(model)

    flags = freekv(SETTINGS.budget, sink=SETTINGS.sink, window=SETTINGS.window, tau=SETTINGS.tau)
    flags |= {"--model-path": tmp_path / "model", "--skip-tokenizer-init": True, "--max-total-tokens": 8192}
    flags |= {"--lora-paths": f"one={adapters['one']}", "--lora-backend": "torch_native", "--max-lora-rank": 8}
    draw = random.Random(0)
    prompts = [draw.choices(range(VOCABULARY), k=length) for length in (77, 230, 501, 901)]
    asked = [(name, prompt) for prompt in prompts for name in adapters]
    expected = [oracles[name].generate(prompt, NEW_TOKENS, SETTINGS).tokens for name, prompt in asked]
    assert all(len({tuple(tokens) for tokens in expected[first : first + 3]}) == 3 for first in range(0, len(asked), 3))

    with room_for(1):
        (server,) = start_all([LoraServer(flags, tmp_path / "log.txt")])
    try:
        server.post("/load_lora_adapter", {"lora_name": "two", "lora_path": str(adapters["two"])})

        def ask(name_and_prompt) -> dict:
            name, prompt = name_and_prompt
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "lora_path": name})

        for cached in (False, True):
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, asked))
            assert [answer["output_ids"] for answer in answers] == expected
            assert all((answer["meta_info"]["cached_tokens"] > 0) == cached for answer in answers)
        assert any(answer["meta_info"]["freekv"]["recalled_units"] for answer in answers)
    finally:
        stop_all([server])
