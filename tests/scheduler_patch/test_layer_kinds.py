"""The kind of each layer of a model, by its config, and pools for a model with two kinds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.scheduler_patch import layer_kinds

LETTERS = {"R": LayerKind.RETRIEVAL, "D": LayerKind.DENSE, "W": LayerKind.WINDOW, "S": LayerKind.STATELESS}


def table(letters: str) -> LayerTable:
    return LayerTable(tuple(LETTERS[letter] for letter in letters))


def model(layer_types=None, chunk=None, window=None, hybrid=False, recurrent=None, **others) -> SimpleNamespace:
    """What of SGLang's ModelConfig tells the kinds of four layers."""
    text = SimpleNamespace(num_hidden_layers=4, layer_types=layer_types)
    sizes = {"attention_chunk_size": chunk, "sliding_window_size": window, "context_len": 4096}
    return SimpleNamespace(hf_text_config=text, is_hybrid_swa=hybrid, recurrent=recurrent, **sizes, **others)


@pytest.fixture(autouse=True)
def recurrent(monkeypatch):
    monkeypatch.setattr(layer_kinds, "mambaish_config", lambda config: config.recurrent)


@pytest.mark.parametrize(
    "config, expected",
    [
        (model(), "RRRR"),
        (model(window=4096), "RRRR"),
        (model(window=128), "WWWW"),
        (model(chunk=128), "WWWW"),
        (model(["sliding_attention", "full_attention"] * 2, window=128), "WRWR"),
        (model(["sliding_attention", "full_attention"] * 2, window=8192), "RRRR"),
        (model(["chunked_attention"] * 3 + ["full_attention"], chunk=128), "WWWR"),
        (model(window=128, hybrid=True, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3]), "WRWR"),
        (model(recurrent=SimpleNamespace(full_attention_layer_ids=[3])), "SSSR"),
        (model(recurrent=SimpleNamespace()), "RRRR"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_that_attends_to_the_whole_context_is_retrieved(config, expected):
    assert layer_kinds.layer_table(config) == table(expected)


def test_dense_layers_are_among_those_that_would_be_retrieved():
    kinds = table("WRSRRW").with_dense({0, 2, 3, 9})
    assert kinds == table("WRSDRW")
    assert (kinds.full, kinds.near, kinds.retrieval_index) == (3, 2, {1: 0, 4: 1})


def test_a_model_of_two_kinds_has_buffers_for_one_and_a_store_for_the_other():
    config = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8, dense_layers=(0, 2))
    shape = KVShape(table("RRRR").with_dense(config.dense_layers), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32))
    pool = FreeKVPool(config, shape, 256, 2, 128, "cpu")
    sizing = Sizing(config, shape, 128)
    assert [len(buffer) for buffer in pool.k_buffer] == [264, 0, 264, 0] and len(pool.store.host.layers) == 2
    assert pool.describe()["dense_layers"] == [0, 2]
    assert pool.describe()["dense_bytes"] == 264 * sizing.dense_bytes_per_token
    assert pool.store.host.num_bytes == 264 * sizing.host_bytes_per_token
    assert pool.store.digests.num_bytes == 264 * sizing.digest_bytes_per_token
    assert pool.store.staging.num_bytes == sizing.staging_bytes
    with pytest.raises(RuntimeError, match=r"layer 1 is a retrieval layer: .* expected one of the dense layers \[0, 2\]"):
        pool.get_key_buffer(1)


def test_types_of_storage_and_computation_are_told_apart():
    """Slots, host pages and staging buffers are stored; dense layers, digests and queries are computed with."""
    config = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8)
    shape = KVShape(LayerTable.uniform(2), 2, 4, 16, (2, 16), KVFormat(torch.float16, torch.float32))
    pool = FreeKVPool(config, shape, 64, 2, 64, "cpu")
    (host, *_), (cache, *_), (digests, *_) = pool.store.host.layers, pool.store.cache.layers, pool.store.digests.layers
    assert {host.dtype, cache.keys.dtype, cache.values.dtype, pool.store.staging.buffers[0].dtype} == {torch.float16}
    assert {digests.dtype, cache.previous_queries.dtype} == {torch.float32}
    sizing = Sizing(config, shape, 64)
    assert pool.store.digests.num_bytes == 72 * sizing.digest_bytes_per_token
    assert pool.store.staging.num_bytes == sizing.staging_bytes - sizing.scratch_bytes and sizing.scratch_bytes == 64 * 2 * 2 * 16 * 4
