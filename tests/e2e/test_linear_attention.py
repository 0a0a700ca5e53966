"""Stock SGLang on a CPU serves tiny random-weight models with linear attention: tokens of transformers, cold and behind a prefix."""

from __future__ import annotations

import json
import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from room import room_for
from serving import STOCK, LinearServer, start_all, stop_all

NEW_TOKENS, VOCABULARY, EVERY = 24, 512, 4  # of four layers one has full attention
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
FLAGS = {"--skip-tokenizer-init": True, "--max-total-tokens": 8192, "--max-running-requests": 4, "--max-mamba-cache-size": 64}
FLAGS |= {"--page-size": 8, "--chunked-prefill-size": 512}

KINDS = {"qwen3_next": EXPERTS, "qwen3_5_moe_text": EXPERTS}


def make_model(kind: str, path) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **HEADS, **LINEAR, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and decays start as constants, and small weights make every token alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"full_attention_interval": EVERY}))  # transformers writes the list alone
    return model.eval()


@torch.no_grad()
def continued(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def test_same_tokens_as_transformers(tmp_path):
    models = {kind: make_model(kind, tmp_path / kind) for kind in KINDS}
    draw = random.Random(0)
    prompts = [draw.choices(range(VOCABULARY), k=length) for length in (3, 77, 300, 901, 250)]
    prompts.append(prompts[3][:640] + draw.choices(range(VOCABULARY), k=50))
    for kind, model in models.items():
        flags = STOCK | FLAGS | {"--model-path": tmp_path / kind}
        with room_for(1):  # states of the convolution are bfloat16 unless SGLang is told
            (server,) = start_all([LinearServer(flags, tmp_path / f"{kind}.txt", {"SGLANG_MAMBA_CONV_DTYPE": "float32"})])
        try:
            expected = [continued(model, prompt) for prompt in prompts]
            # a state is kept behind whole chunks of 64 tokens: of each prefill the last, and where a prompt leaves another's path
            for cached in ([0, 0, 0, 0, 0, 512], [0, 64, 256, 896, 192, 640]):
                answers = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
                assert [answer["output_ids"] for answer in answers] == expected, kind
                assert [answer["meta_info"]["cached_tokens"] for answer in answers] == cached, kind
            answers = server.generate_all(prompts[::-1], NEW_TOKENS)
            assert [answer["output_ids"] for answer in answers] == expected[::-1], kind
            again = prompts[4] + expected[4] + prompts[0]  # the decode step with 256 tokens has left its state
            answer = server.generate(again, NEW_TOKENS)
            assert answer["output_ids"] == continued(model, again), kind
            assert answer["meta_info"]["cached_tokens"] == 256, kind
        finally:
            stop_all([server])
