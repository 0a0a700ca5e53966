# SPDX-License-Identifier: Apache-2.0
"""The LayerTable of a model, from SGLang's ModelConfig."""

from __future__ import annotations

from collections.abc import Collection

from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config

from sglang_freekv.layers import LayerKind, LayerTable

NEAR = "sliding", "chunk", "local"  # parts of the names of layer types
GATED_DELTA_NETS = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"  # model types whose tests have run servers


def layer_table(model, layers: int | None = None) -> LayerTable:
    """The kind of each layer of ``model``, SGLang's ModelConfig. All layers that attend to the whole context are retrieval layers.

    Args:
        layers: how many the model has, if its config does not say it.
    """
    count = model.hf_text_config.num_hidden_layers if layers is None else layers
    if (recurrent := mambaish_config(model)) is not None:  # a layer may have both attention and a state, and then no list says which
        full = getattr(recurrent, "full_attention_layer_ids", range(count))
        return _table(count, full, LayerKind.STATELESS)
    if getattr(model, "swa_attention_layer_ids", None) is not None:
        return _table(count, model.full_attention_layer_ids, LayerKind.WINDOW)
    if not (model.attention_chunk_size or has_window(model)):
        return _table(count, range(count), LayerKind.WINDOW)
    types = getattr(model.hf_text_config, "layer_types", None) or NEAR[:1] * count
    full = {number for number, kind in enumerate(types) if not any(word in str(kind) for word in NEAR)}
    return _table(count, full, LayerKind.WINDOW)


def gated_delta_nets(model):
    """The config that tells the layers of ``model``, SGLang's ModelConfig, if they are full attention and gated delta nets; else None."""
    config = hybrid_gdn_config(model)
    return config if config is not None and config.model_type in GATED_DELTA_NETS else None


def has_window(model) -> bool:
    """Whether the model has a sliding window that is shorter than its longest context."""
    if model.attention_chunk_size:
        return False
    return model.is_hybrid_swa or (model.sliding_window_size or model.context_len) < model.context_len


def _table(count: int, full: Collection[int], otherwise: LayerKind) -> LayerTable:
    return LayerTable(tuple(LayerKind.RETRIEVAL if number in full else otherwise for number in range(count)))
