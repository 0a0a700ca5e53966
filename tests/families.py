"""Tiny random-weight models of many families."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, LAYERS = 512, 3


class Family(NamedTuple):
    """A model type of transformers, with heads in the proportion of a published model.

    Args:
        more: other fields of its config.
        published: fields that SGLang reads and transformers does not save. They are in the config.json of published checkpoints.
    """

    kind: str
    query_heads: int
    kv_heads: int
    more: dict[str, Any] = {}
    published: dict[str, Any] = {}


def rotary(kind: str = "default", **others) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e6} | others}


def experts(count: str, **others) -> dict[str, Any]:
    return {count: 8, "num_experts_per_tok": 2} | others


YARN = dict(factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=256)
LONG = dict(short_factor=[1, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1, 1.5, 2, 3, 4, 5], original_max_position_embeddings=1024)
FAMILIES = {
    "qwen2": Family("qwen2", 4, 2),  # biases of query, key and value
    "granite": Family("granite", 4, 2, {"attention_multiplier": 0.6}),  # 1 / sqrt(D) with the others
    "qwen3": Family("qwen3", 6, 3),  # norms of each head
    "llama-mha": Family("llama", 4, 4),
    "llama-8q-1kv": Family("llama", 8, 1),
    "qwen3-moe": Family("qwen3_moe", 32, 2, experts("num_experts", moe_intermediate_size=32, norm_topk_prob=True)),  # 235B-A22B
    "glm4-moe": Family(  # GLM-4.6: norms, biases, half of each head turned, a dense layer before those of experts
        "glm4_moe", 24, 2,
        experts("n_routed_experts", moe_intermediate_size=32, first_k_dense_replace=1, routed_scaling_factor=2.5)
        | {"attention_bias": True, "use_qk_norm": True}
        | rotary(partial_rotary_factor=0.5),
    ),
    "minimax-m2": Family(  # norms over all heads, half of each head turned
        "minimax_m2", 12, 2, experts("num_local_experts", intermediate_size=32) | rotary(partial_rotary_factor=0.5),
        dict(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer", rotary_dim=8, rope_theta=1e6),
    ),
    "ministral3": Family(  # YaRN, tied weights, queries that grow with their position
        "ministral3", 8, 2,
        rotary("yarn", llama_4_scaling_beta=0.1, **YARN) | {"tie_word_embeddings": True},
        {"original_max_position_embeddings": YARN["original_max_position_embeddings"]},
    ),
    "phi-4": Family("phi3", 16, 4, {"sliding_window": None}),  # one matrix for query, key and value
    "phi-4-mini": Family(  # three quarters of each head turned, factors for each frequency; heads are as wide as they are by default
        "phi3", 6, 2,
        rotary("longrope", partial_rotary_factor=0.75, **LONG)
        | {"hidden_size": 96, "head_dim": None, "sliding_window": None, "tie_word_embeddings": True},
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": LONG["original_max_position_embeddings"]},
    ),
    "olmo-2": Family("olmo2", 4, 4),  # norms over all heads, and behind attention
    "seed-oss": Family("seed_oss", 20, 2, {"attention_bias": True, "attention_out_bias": False}),  # SGLang serves transformers' model
}  # fmt: skip
LINEAR = dict(
    num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    partial_rotary_factor=0.5,
)  # fmt: skip
EIGHT = {"num_hidden_layers": 8}
SHARED = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32)
EVERY = {"full_attention_interval": 4}  # transformers saves the list of layers alone
HYBRIDS = {  # three gated delta nets, then gated attention
    "qwen3-next": Family("qwen3_next", 16, 2, experts("num_experts", **SHARED) | LINEAR, EVERY),  # 80B-A3B
    "qwen3.5": Family("qwen3_5_text", 12, 2, LINEAR | EIGHT, EVERY),  # 27B has 24 and 4
    "qwen3.5-moe": Family("qwen3_5_moe_text", 16, 2, experts("num_experts", **SHARED) | LINEAR | EIGHT, EVERY),  # 35B-A3B
}
TURNS = ["sliding_attention", "full_attention"] * 3
WINDOWS = {"num_hidden_layers": 6, "layer_types": TURNS, "sliding_window": 40}  # full and sliding-window layers in turns
SINKS = {  # learned sinks in all layers
    "granite-swa": Family("granite_swa", 4, 2, WINDOWS | {"attention_multiplier": 0.25}),
    "granite-moe-swa": Family(  # its first layer has no window, and is dense
        "granitemoe_swa",
        4,
        2,
        WINDOWS | experts("num_local_experts", intermediate_size=32, attention_multiplier=0.25, layer_types=TURNS[::-1]),
    ),
    "gpt-oss": Family(  # 20B: groups of eight, heads of 64 that together are wider than the model, biases, and YaRN without whole dimensions
        "gpt_oss",
        16,
        2,
        experts("num_local_experts", intermediate_size=48)
        | WINDOWS
        | {"head_dim": 64, "sliding_window": 128}
        | rotary("yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=128),
        {"swiglu_limit": 7.0},
    ),
}
ONE_POOL = {  # SGLang keeps KV of both kinds of layers in one pool, and FreeKV in two
    "gemma-3": Family(  # 1B: norms of each head, another RoPE in full layers
        "gemma3_text", 4, 1, WINDOWS | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    ),
    "command-a": Family(  # attention beside the MLP, RoPE in window layers alone, scaled logits
        "cohere2", 4, 1, WINDOWS | {"logit_scale": 0.25, "tie_word_embeddings": True}
    ),
    "olmo-3": Family("olmo3", 4, 4, WINDOWS, {"rope_theta": 5e5, "rope_parameters": None}),
}
WINDOWED = SINKS | ONE_POOL


CALM = 0.5  # of queries and keys in wider models, whose attention would turn rounding into other tokens
WIDER = {  # factors of weights in wider models besides
    # YaRN and two products of experts enlarge rounding until no token is as before. Beside small embeddings each answer repeats a token.
    "gpt_oss": {"q_proj": 0.5, "k_proj": 0.5, "o_proj": 0.25, "experts": 0.1, "embed_tokens": 32},
}


def spread(hidden_size: int = 64, **_) -> float:
    """Of weights, by the width of a model."""
    return 0.4 * (64 / hidden_size) ** 0.5


def make_model(family: Family, path: Path, *, dtype: torch.dtype = torch.float32, **changes: int) -> None:
    """Write a checkpoint of the family, with ``changes`` to its config.

    Wider ones have smaller weights and calmer attention, so that rounding stays as small.
    """
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "head_dim": 16}
    heads = {"num_attention_heads": family.query_heads, "num_key_value_heads": family.kv_heads}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # by default beyond the vocabulary
    fields = shape | heads | tokens | {"max_position_embeddings": 4096, "tie_word_embeddings": False} | family.more | changes
    if fields["head_dim"] is None:
        del fields["head_dim"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.kind, **fields), dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, and small weights make every token and every page alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (spread(**changes) if parameter.ndim > 1 else 0.3))
        if family.kind == "gemma3_text":  # it makes embeddings larger, and with tied ones each token would repeat itself
            model.get_input_embeddings().weight.mul_(0.1)
        for name, parameter in model.named_parameters():
            if fields["hidden_size"] >= 512:
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.mul_(CALM)
                parameter.mul_(math.prod(factor for part, factor in WIDER.get(family.kind, {}).items() if part in name))
            if name.endswith("sinks"):  # SGLang has them in this type, and those of a trained model are of many sizes
                parameter.copy_((torch.randn_like(parameter) * 2).bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.to(dtype).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | family.published))
