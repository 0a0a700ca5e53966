# SPDX-License-Identifier: Apache-2.0
"""AttentionLayers: a model's attention layers, counted by their range, from SGLang's ModelConfig."""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.configs.hybrid_arch import mambaish_config

NEAR = "sliding", "chunk", "local"  # parts of the names of layer types


class AttentionLayers(NamedTuple):
    """Layers that attend to the whole context (``full``), and layers that attend to a sliding window or a chunk (``near``)."""

    full: int
    near: int

    @classmethod
    def of(cls, model) -> AttentionLayers:
        """The attention layers of ``model``, SGLang's ModelConfig. Layers without attention are not counted."""
        if (recurrent := mambaish_config(model)) is not None:
            return cls(len(getattr(recurrent, "full_attention_layer_ids", "?")), 0)
        if (near := getattr(model, "swa_attention_layer_ids", None)) is not None:
            return cls(len(model.full_attention_layer_ids), len(near))
        count = model.hf_text_config.num_hidden_layers
        if not (kinds := getattr(model.hf_text_config, "layer_types", None)):
            all_near = model.attention_chunk_size or model.sliding_window_size
            return cls(0, count) if all_near else cls(count, 0)
        near = sum(any(word in str(kind) for word in NEAR) for kind in kinds[:count])
        return cls(len(kinds[:count]) - near, near)
