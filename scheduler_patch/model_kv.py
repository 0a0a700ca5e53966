# SPDX-License-Identifier: Apache-2.0
"""The KVShape of one rank of a model, from SGLang's ModelConfig."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig

from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import digests_of
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.scheduler_patch.layer_kinds import layer_table


def kv_shape(model: ModelConfig, config: FreeKVConfig, layers: int, ranks: int) -> KVShape:
    """Shape of the KV of one of ``ranks`` tensor-parallel ranks, which has ``layers`` layers and computes in the model's dtype.

    Raises:
        Refusal: the digest cannot summarise keys of this model.
    """
    return KVShape(
        layers=layer_table(model, layers).with_dense(config.dense_layers),
        kv_heads=model.get_num_kv_heads(ranks),
        query_heads=model.num_attention_heads // ranks,
        head_dim=model.head_dim,
        digest_shape=digests_of(config).shape(model.head_dim, model.dtype.itemsize),
        format=KVFormat.of(config.kv_dtype, model.dtype),
        window=(model.is_hybrid_swa and model.sliding_window_size) or 0,
    )
