"""The KV pool as SGLang has it: itself, or within a pool for layers of several kinds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_freekv import kv_pool
from sglang_freekv.config import GIB, FreeKVConfig
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.kv_pool import FreeKVPool, pool_of
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.scheduler_patch.pools import beside_states

S, D, R = LayerKind.STATELESS, LayerKind.DENSE, LayerKind.RETRIEVAL


def make_pool(*kinds: LayerKind, kv_dtype: str = "auto") -> FreeKVPool:
    config = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8, kv_dtype=kv_dtype)
    return FreeKVPool(config, KVShape(LayerTable(kinds), 2, 4, 16, (2, 16), KVFormat.of(kv_dtype, torch.float32)), 64, 2, 64, "cpu")


def test_a_pool_is_found_within_the_one_that_wraps_it():
    pool = object.__new__(FreeKVPool)
    assert pool_of(pool) is pool and pool_of(SimpleNamespace(full_kv_pool=pool)) is pool


def test_layers_keep_their_numbers_beside_linear_ones():
    pool = make_pool(S, D, S, R)
    wrapped = beside_states(pool, [1, 3], "states")
    assert pool_of(wrapped) is pool and wrapped.mamba_pool == "states" and wrapped.get_kv_size_bytes() == pool.get_kv_size_bytes()
    assert len(pool.store.host.layers) == 1 and pool.retrieval_index == {3: 0}
    keys, values = torch.rand(2, 3, 2, 16)
    wrapped.set_kv_buffer(SimpleNamespace(layer_id=1), torch.tensor([8, 9, 10]), keys, values)
    assert torch.equal(wrapped.get_key_buffer(1)[8:11], keys) and torch.equal(wrapped.get_value_buffer(1)[8:11], values)
    with pytest.raises(RuntimeError, match=r"layer 3 is a retrieval layer: .* expected one of the dense layers \[1\]"):
        wrapped.set_kv_buffer(SimpleNamespace(layer_id=3), torch.tensor([8, 9, 10]), keys, values)
    with pytest.raises(ValueError, match="layer_id=2 not in full attention layers"):
        wrapped.get_key_buffer(2)


@pytest.mark.parametrize("kv_dtype, stored, token", [("auto", "float32", 2 * 2 * 16 * 4), ("int8", "int8", 2 * 2 * (16 + 2)),
    ("fp8_e4m3", "float8_e4m3fn", 2 * 2 * 16), ("fp8_e5m2", "float8_e5m2", 2 * 2 * 16)])  # fmt: skip
def test_how_kv_is_stored_is_told(kv_dtype, stored, token):
    pool = make_pool(D, R, R, kv_dtype=kv_dtype)
    facts = pool.describe()
    assert (facts["kv_dtype"], facts["stored_dtype"], facts["host_token_bytes"]) == (kv_dtype, stored, 2 * token)
    assert facts["staging_bytes"] == pool.store.staging.num_bytes + pool.scratch_bytes
    told = {"auto": "", "int8": "; KV in int8 with scales"}.get(kv_dtype, f"; KV in {kv_dtype}")
    assert pool.activation_line().endswith(f"dense layers [0] {facts['dense_bytes'] / GIB:.2f} GiB{told}")


@pytest.mark.parametrize("kv_dtype, dense", [("int8", torch.float32), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_dense_layers_have_the_type_of_sglang_s_flag(kv_dtype, dense):
    pool, layer = make_pool(D, R, R, kv_dtype=kv_dtype), SimpleNamespace(layer_id=0)
    assert pool.dtype == pool.get_key_buffer(0).dtype == pool.get_value_buffer(0).dtype == dense
    keys, values = torch.randn(2, 3, 2, 16)
    pool.set_kv_buffer(layer, torch.tensor([9, 8, 20]), keys.clone(), values.clone())
    assert torch.equal(pool.get_key_buffer(0)[[9, 8, 20]].float(), keys.to(dense).float())
    assert torch.equal(pool.get_value_buffer(0)[[9, 8, 20]].float(), values.to(dense).float())
    assert pool.store.host.layers[0].dtype == pool.shape.format.storage and pool.scratch_bytes == 2 * 64 * 2 * 16 * 4


@pytest.mark.parametrize("device, hopper, dtype, head_dim, size, chosen", [
    ("cuda", True, torch.bfloat16, 128, 8, "FlashAttention 3"), ("cuda:1", True, torch.float16, 64, 64, "FlashAttention 3"),
    ("cuda", False, torch.bfloat16, 128, 8, "FlashInfer"), ("cuda", True, torch.bfloat16, 100, 8, "FlashInfer"),
    ("cuda", True, torch.float32, 128, 8, "FlashInfer"), ("cuda", True, torch.bfloat16, 128, 256, "FlashAttention 3"),
])  # fmt: skip
def test_extends_have_the_attention_of_stock_sglang_on_hopper(monkeypatch, device, hopper, dtype, head_dim, size, chosen):
    pool = object.__new__(FreeKVPool)
    pool.device, pool.page_size, pool.head_num, pool.head_dim = device, size, 2, head_dim
    pool.shape = SimpleNamespace(query_heads=4, format=KVFormat.of("auto", dtype))
    monkeypatch.setattr(kv_pool, "is_hopper_with_cuda_12_3", lambda: hopper)
    monkeypatch.setattr(kv_pool, "FlashAttentionExtend", lambda *given: ("FlashAttention 3", *given))
    monkeypatch.setattr(kv_pool, "FlashInferExtend", lambda *given: ("FlashInfer", *given))
    given = {"FlashAttention 3": (size, device), "FlashInfer": (4, 2, head_dim, dtype, size, device, kv_pool.EXTEND_WORKSPACE_BYTES)}
    assert pool._extend_attention() == (chosen, *given[chosen])


def test_extends_on_a_cpu_have_the_reference():
    assert isinstance(make_pool(D, R).retrieval.extend_attention, ReferenceExtend)
