"""Models that SGLang serves with one pool: with KV retrieval it tells their window layers from full ones, and all others stay as they are."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import ModelConfig
from transformers import AutoConfig

from sglang_freekv.layers import LayerKind
from sglang_freekv.scheduler_patch import windows
from sglang_freekv.scheduler_patch.layer_kinds import layer_table

TURNS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
SHAPE = dict(num_hidden_layers=6, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, intermediate_size=64)
CONFIGS = {
    "Cohere2ForCausalLM": ("cohere2", {"layer_types": TURNS, "sliding_window": 40}),
    "Gemma3ForCausalLM": ("gemma3_text", {"layer_types": TURNS, "sliding_window": 40}),
    "Olmo3ForCausalLM": ("olmo3", {"layer_types": TURNS, "sliding_window": 40}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "LlamaForCausalLM": ("llama", {}),
}


@pytest.fixture(params=CONFIGS)
def model(request, tmp_path) -> ModelConfig:
    """As SGLang makes it for such a model without KV retrieval."""
    kind, fields = CONFIGS[request.param]
    config = AutoConfig.for_model(kind, **SHAPE, **fields).to_dict() | {"architectures": [request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelConfig(str(tmp_path), disable_hybrid_swa_memory="layer_types" in fields)


def test_window_layers_are_told_from_full_ones(model):
    assert not model.is_hybrid_swa
    mixed = getattr(model.hf_text_config, "sliding_window", None) == 40
    windows.tell_again(model)
    assert model.is_hybrid_swa == mixed
    if mixed:
        assert (model.swa_attention_layer_ids, model.full_attention_layer_ids) == ([0, 1, 3, 4], [2, 5])
        assert layer_table(model).numbers(LayerKind.RETRIEVAL) == [2, 5]
    else:
        assert layer_table(model).numbers(LayerKind.RETRIEVAL) == list(range(6))


def test_a_model_of_window_layers_alone_stays_as_it_is():
    text = SimpleNamespace(layer_types=["sliding_attention"] * 3)
    model = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(architectures=["Gemma3ForCausalLM"]))
    windows.keep_windows_apart(model)
    assert vars(text) == {"layer_types": ["sliding_attention"] * 3}
