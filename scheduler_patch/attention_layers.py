# SPDX-License-Identifier: Apache-2.0
"""What the attention layers of a model attend to, by SGLang's ModelConfig."""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.configs.hybrid_arch import mambaish_config

NEAR = "sliding", "chunk", "local"  # in the type of a layer


class AttentionLayers(NamedTuple):
    """How many layers of a model attend to the whole context, and how many to tokens nearby: a sliding window or a chunk."""

    full: int
    near: int

    @classmethod
    def of(cls, model) -> AttentionLayers:
        """Those of SGLang's ModelConfig, where a layer may have other than attention besides."""
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
