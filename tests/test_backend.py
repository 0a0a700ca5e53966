"""Which models the attention backend takes: one attention in each layer, of one shape."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_freekv import backend
from sglang_freekv.backend import FreeKVAttnBackend, _attention_layers, _check_layers
from sglang_freekv.config import FreeKVConfig, Refusal
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.windowed_pool import WindowedPool

RETRIEVAL, DENSE, STATELESS = LayerKind.RETRIEVAL, LayerKind.DENSE, LayerKind.STATELESS
SHAPE = KVShape(LayerTable.uniform(3, dense=1), 2, 6, 16, (2, 16), KVFormat.plain(torch.float32))
POOL = SimpleNamespace(shape=SHAPE)


def attention(layer: int, heads: int = 6, kv_heads: int = 2, head_dim: int = 16, **others) -> RadixAttention:
    return RadixAttention(heads, head_dim, head_dim**-0.5, kv_heads, layer, **others)


def model_of(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), *layers)


def check(model: torch.nn.Module) -> None:
    _check_layers(list(_attention_layers(model)), POOL)


def test_a_model_with_one_attention_in_each_layer_is_served():
    check(model_of(*(attention(layer) for layer in (2, 0, 3, 1))))


HYBRID = SimpleNamespace(shape=replace(SHAPE, layers=LayerTable((STATELESS, RETRIEVAL, STATELESS, DENSE))))


def test_layers_without_kv_have_no_attention():
    _check_layers([attention(3), attention(1)], HYBRID)
    for layers, wrong in (((1,), "layer 3 has 0"), ((0, 1, 3), "layer 0 has 1")):
        with pytest.raises(Refusal, match=f"in each of the 2 layers with KV, but {wrong}; use --kv-retrieval none"):
            _check_layers(list(map(attention, layers)), HYBRID)


def test_attention_that_is_kept_beside_the_modules_is_found():
    model = model_of()
    model.attention_instances = {layer: attention(layer) for layer in range(4)}
    check(model)
    model.attention_instances[2] = attention(2, logit_cap=30.0)
    with pytest.raises(Refusal, match="layer 2 uses logit soft-capping"):
        check(model)


@pytest.mark.parametrize(
    "layers, wrong",
    [
        ((0, 2, 3), "layer 1 has 0"),
        ((0, 1, 2, 3, 4), "layer 4 has 1"),
        ((0, 1, 1, 2, 3), "layer 1 has 2"),
        ((), "layer 0 has 0"),
    ],
)
def test_a_layer_without_attention_is_refused_for_its_neighbour_would_get_another_s_prefix(layers, wrong):
    with pytest.raises(Refusal, match=f"in each of the 4 layers with KV, but {wrong}; use --kv-retrieval none"):
        check(model_of(*map(attention, layers)))


@pytest.mark.parametrize("changes", [{"heads": 4}, {"kv_heads": 1}, {"head_dim": 32}])
def test_layers_of_other_shapes_are_refused(changes):
    odd = attention(3, **changes)
    with pytest.raises(Refusal, match=r"layer 3 uses \d query heads, \d kv heads and a head_dim of \d+ where others have \(6, 2, 16\)"):
        check(model_of(*(attention(layer) for layer in range(3)), odd))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"is_cross_attention": True}, "cross-attention"),
        ({"sliding_window_size": 128}, "sliding-window attention"),
        ({"logit_cap": 50.0}, "logit soft-capping"),
        ({"v_head_dim": 8}, "keys and values of different width"),
    ],
)
def test_semantics_that_the_engine_does_not_have_are_refused(changes, named):
    with pytest.raises(Refusal, match=f"layer 0 uses {named}"):
        check(model_of(attention(0, **changes), *map(attention, range(1, 4))))


@pytest.mark.parametrize("device, compiled, sinks, hopper, kv, stock", [
    ("cuda", [("engine", "table", 5, 16, None)], False, True, "bfloat16", "fa3"),
    ("cuda", [("engine", "table", 5, 16, None)], False, True, "float8_e4m3fn", "flashinfer"),
    ("cuda", [("engine", "table", 5, 16, None)], False, False, "bfloat16", "flashinfer"),
    ("cuda", [("engine", "table", 5, 16, (6,))], True, True, "bfloat16", "fa3"),
    ("cuda", [("engine", "table", 5, 16, (6,))], True, True, "float8_e4m3fn", "fa3"),
    ("cuda", [("engine", "table", 5, 16, (6,))], True, True, "float8_e5m2", "triton"),
    ("cuda", [("engine", "table", 5, 16, (6,))], True, False, "bfloat16", "triton"), ("cpu", [], False, False, "float32", "torch_native"),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda pool: pool, lambda pool: SimpleNamespace(full_kv_pool=pool)], ids=["alone", "wrapped"])
def test_the_kernels_of_a_gpu_are_compiled_when_the_backend_is_made(monkeypatch, device, compiled, sinks, hopper, kv, stock, wrap):
    pool = object.__new__(FreeKVPool)
    pool.__dict__ |= vars(POOL) | {"page_size": 32, "num_rows": 5, "retrieval": "engine", "planner": None, "retrieval_index": {1: 0}}
    pool.config = FreeKVConfig()
    pool.store = SimpleNamespace(frames=SimpleNamespace(page_size=32, num_frames=200, num_slots=64, is_resident=True))
    runner = SimpleNamespace(
        device=device, kv_cache_dtype=getattr(torch, kv), page_size=32, token_to_kv_pool=wrap(pool), req_to_token_pool=SimpleNamespace(req_to_token="table"), capture_tail_hooks=[],
        model_config=SimpleNamespace(context_len=320, has_attention_sinks=sinks), model=model_of(*map(attention, range(4))),
    )  # fmt: skip
    asked: list[tuple] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))  # there is no GPU

    def compile_all(engine, residency, *sizes, learned_sinks) -> None:
        asked.append((engine, residency.req_to_token, *sizes, None if learned_sinks is None else tuple(learned_sinks.shape)))

    monkeypatch.setattr(backend, "compile_all", compile_all)
    monkeypatch.setattr(backend, "ATTENTION_BACKENDS", {name: lambda runner, name=name: name for name in backend.ATTENTION_BACKENDS})
    monkeypatch.setattr(backend, "is_hopper_with_cuda_12_3", lambda: hopper)
    made = FreeKVAttnBackend(runner)
    assert asked == compiled and pool.residency is made.residency and made.dense == stock


@pytest.mark.parametrize("hopper, kept, page, windows, others", [
    (True, torch.bfloat16, 32, "fa3", "fa3"), (False, torch.bfloat16, 32, "triton", "flashinfer"), (True, torch.bfloat16, 24, "triton", "flashinfer"),
    (True, torch.float8_e4m3fn, 8, "fa3", "flashinfer"), (True, torch.float8_e5m2, 8, "triton", "flashinfer"),
])  # fmt: skip
def test_dense_and_window_layers_are_computed_by_what_serves_them_right(monkeypatch, hopper, kept, page, windows, others):
    """SGLang's FlashInfer lets the window layers of a prompt without a prefix attend to all of it. Its FlashAttention 3 rounds queries with
    e4m3, does not read e5m2, and is captured with powers of two alone as page sizes."""
    monkeypatch.setattr(backend, "ATTENTION_BACKENDS", {name: lambda runner, name=name: name for name in backend.ATTENTION_BACKENDS})
    monkeypatch.setattr(backend, "is_hopper_with_cuda_12_3", lambda: hopper)
    settings = SimpleNamespace(has_attention_sinks=False)
    pool = object.__new__(WindowedPool)
    runner = SimpleNamespace(device="cuda", token_to_kv_pool=pool, model_config=settings, kv_cache_dtype=kept, page_size=page)
    assert backend._stock_backend(runner) == windows
    runner.token_to_kv_pool = object.__new__(FreeKVPool)
    assert backend._stock_backend(runner) == others
    settings.has_attention_sinks = True
    assert backend._stock_backend(runner) == windows


@pytest.mark.parametrize("kept, expected", [("auto", (1.0, 1.0)), ("int8", (1.0, 1.0)), ("fp8_e4m3", (0.5, 3.0))])
@pytest.mark.parametrize("forward", ["forward_extend", "forward_decode"])
def test_dense_layers_have_a_checkpoints_scales_with_its_kv_alone(forward, kept, expected):
    """SGLang's FlashInfer and Triton multiply by them whatever KV is, and its pools divide what they store in 8 bits alone."""
    found: list = []

    def dense(q, k, v, layer, batch, save_kv_cache):
        found.append((layer.k_scale_float, layer.v_scale_float))
        return q

    made, layer = attending(None, dense), attention(0)
    made.token_to_kv_pool.config = replace(FreeKVConfig(), kv_dtype=kept)
    for _ in range(2):  # weights are loaded again between
        layer.k_scale_float, layer.v_scale_float = 0.5, 3.0
        getattr(made, forward)(torch.rand(5, 96), torch.rand(5, 32), torch.rand(5, 32), layer, None)
    bare = attention(0)
    getattr(made, forward)(torch.rand(5, 96), torch.rand(5, 32), torch.rand(5, 32), bare, None)
    assert found == [expected, expected, (None, None)]


@pytest.mark.parametrize("scheduled", [False, True], ids=["an extend that SGLang captures", "one that it replays"])
def test_between_captured_parts_attention_is_that_of_the_scheduled_batch(monkeypatch, scheduled):
    """SGLang calls attention between the parts when it captures them, too. Then nothing may be stored, and no tables begin a pass."""
    made, prepared = object.__new__(FreeKVAttnBackend), []
    made.residency = SimpleNamespace(batch=[(1, 8)] if scheduled else None)
    made.dense = SimpleNamespace(init_forward_metadata=lambda batch: prepared.append("dense"), forward_extend=None)
    made.token_to_kv_pool, made.batch = SimpleNamespace(retrieval_index={1: 0}, config=FreeKVConfig()), "the batch before"
    made.retrieval = SimpleNamespace(extend=lambda index, queries, *others, **options: queries + 1)

    def prepare(forward_batch) -> None:
        prepared.append("engine")
        made.batch = "this batch"

    monkeypatch.setattr(made, "_prepare", prepare)
    monkeypatch.setattr(backend, "is_in_breakable_cuda_graph", lambda: True)
    made.init_forward_metadata(SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False)))
    assert prepared == (["engine"] if scheduled else []) + ["dense"] and (made.batch is None) != scheduled
    queries, kv = torch.rand(5, 96), torch.rand(5, 32)
    output = made.forward_extend(queries, kv, kv, attention(1), None)
    assert torch.equal(output, queries + 1 if scheduled else torch.zeros(5, 96))


@pytest.mark.parametrize("breakable", [False, True])
def test_layers_are_closed_together_only_where_prefills_are_captured(monkeypatch, breakable):
    made, asked = object.__new__(FreeKVAttnBackend), []
    made.req_to_token_pool, made.context_len = SimpleNamespace(req_to_token=torch.zeros(1)), 320
    made.token_to_kv_pool, made.scales = SimpleNamespace(num_rows=5, page_size=32), [0.5]
    made.dense = SimpleNamespace(init_cuda_graph_state=lambda *sizes: None)
    made.retrieval = SimpleNamespace(close_together=lambda *arguments: asked.append(arguments[:3]))
    monkeypatch.setattr(backend, "check_cuda_graph_backend", lambda phase, kind: breakable and (phase, kind) == ("prefill", "breakable"))
    made.init_cuda_graph_state(4, 4)
    assert asked == ([([0.5], 5, 16)] if breakable else [])


def attending(retrieval: object, dense: object, index: int | None = 0) -> FreeKVAttnBackend:
    made = object.__new__(FreeKVAttnBackend)
    layers = {} if index is None else {1: index}
    made.token_to_kv_pool, made.batch = SimpleNamespace(retrieval_index=layers, config=FreeKVConfig()), "this batch"
    made.retrieval, made.dense = (
        SimpleNamespace(extend=retrieval, decode=retrieval),
        SimpleNamespace(forward_extend=dense, forward_decode=dense),
    )
    return made


SCALES = {"of a checkpoint": (0.3, 0.07), "of keys alone": (2.5, 1.0), "of values alone": (1.0, 0.5)}


@pytest.mark.parametrize("forward", ["forward_extend", "forward_decode"])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_scales_of_a_checkpoint_leave_logits_and_outputs_as_they_are(forward, scales):
    """Keys and values are stored over them, and SGLang's own tensors, which other layers may share, stay as they were."""
    given: list = []

    def retrieve(index, queries, keys, values, batch, scale, *, learned_sinks):
        given.extend((queries, keys, values, scale))
        return queries

    made, layer = attending(retrieve, None), attention(1)
    made.token_to_kv_pool.config = replace(FreeKVConfig(), kv_dtype="fp8_e4m3")
    layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(scale), requires_grad=False) for scale in scales)
    layer.k_scale_float, layer.v_scale_float = scales
    q, k, v = torch.rand(5, 96), torch.rand(5, 32), torch.rand(5, 32)
    kept = q.clone(), k.clone(), v.clone()
    output = getattr(made, forward)(q, k, v, layer, None)
    queries, keys, values, factor = given
    assert all(map(torch.equal, (q, k, v), kept)) and torch.equal(queries.flatten(1), q)
    assert torch.equal(keys.flatten(1), k / layer.k_scale) and torch.equal(values.flatten(1), v / layer.v_scale)
    assert factor == layer.scaling * scales[0] and torch.equal(output, q * scales[1])
    made.token_to_kv_pool.config = FreeKVConfig()  # SGLang divides no KV that is stored as it is
    assert (
        torch.equal(getattr(made, forward)(q, k, v, layer, None), q) and given[7] == layer.scaling and torch.equal(given[5].flatten(1), k)
    )


def test_layers_that_are_seeded_together_have_their_scales(monkeypatch):
    """The queries of the last tokens select by the logits of the model, in each layer by its own scale."""
    pool = object.__new__(FreeKVPool)
    pool.__dict__ |= vars(POOL) | {
        "page_size": 32,
        "num_rows": 5,
        "retrieval": "engine",
        "planner": None,
        "retrieval_index": {1: 0, 2: 1, 3: 2},
    }
    pool.config, pool.store = replace(FreeKVConfig(), kv_dtype="fp8_e5m2"), SimpleNamespace(frames=SimpleNamespace(num_slots=64))
    layers = [attention(layer) for layer in range(4)]
    layers[2].k_scale_float, layers[2].v_scale_float = 3.0, 5.0
    runner = SimpleNamespace(
        device="cpu", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token="table"), capture_tail_hooks=[],
        model_config=SimpleNamespace(context_len=320, has_attention_sinks=False), model=model_of(*layers),
    )  # fmt: skip
    monkeypatch.setattr(backend, "Residency", lambda *arguments: None)
    monkeypatch.setattr(backend, "_stock_backend", lambda runner: None)
    assert FreeKVAttnBackend(runner).scales == [0.25, 0.75, 0.25]


@pytest.mark.parametrize("forward", ["forward_extend", "forward_decode"])
@pytest.mark.parametrize("sinks", [None, torch.rand(6)], ids=["no sinks", "learned sinks"])
def test_sinks_reach_the_engine(forward, sinks):
    given: list = []

    def retrieve(index, queries, keys, values, batch, scale, *, learned_sinks):
        given.append(learned_sinks)
        return queries

    made, kv = attending(retrieve, None), torch.rand(5, 32)
    getattr(made, forward)(torch.rand(5, 96), kv, kv, attention(1), None, sinks=sinks)
    assert len(given) == 1 and given[0] is sinks


@pytest.mark.parametrize("forward", ["forward_extend", "forward_decode"])
def test_beside_linear_attention_full_layers_are_ours(forward):
    """SGLang wraps our backend where some layers have linear attention, and hands it the full ones by the model's numbers."""

    def retrieve(index, queries, keys, values, batch, scale, *, learned_sinks):
        return queries + index

    def linear(*, layer, mixed_qkv, **others):
        return mixed_qkv - layer.layer_id

    ours, kv, queries = attending(retrieve, None, 7), torch.rand(5, 32), torch.rand(5, 96)
    ours.req_to_token_pool = "rows"
    theirs = SimpleNamespace(
        forward_extend=linear, forward_decode=linear, needs_cpu_seq_lens=False, supports_prefill_graph_extend=lambda: False
    )
    both = HybridLinearAttnBackend(ours, theirs, [1])
    assert torch.equal(getattr(both, forward)(attention(1), None, True, queries, kv, kv), queries + 7)
    assert torch.equal(getattr(both, forward)(SimpleNamespace(layer_id=2), None, mixed_qkv=queries), queries - 2)


def stock(q, k, v, layer, forward_batch, save_kv_cache=True):
    return q


def stock_with_sinks(q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
    return q if sinks is None else q + sinks.sum()


def test_a_dense_layer_has_sinks_where_its_attention_takes_them():
    queries, kv, sinks = torch.rand(5, 96), torch.rand(5, 32), torch.rand(6)
    for dense, option, expected in (
        (stock_with_sinks, sinks, queries + sinks.sum()),
        (stock_with_sinks, None, queries),
        (stock, None, queries),
    ):
        assert torch.equal(attending(None, dense, None).forward_decode(queries, kv, kv, attention(1), None, sinks=option), expected)


@pytest.mark.parametrize("index, options, named", [
    (0, {"rel_bias": torch.rand(5)}, "layer 1 calls its attention with rel_bias, expected options among sinks; .* use --kv-retrieval none"),
    (0, {"sinks": torch.rand(6), "score_mod": "any"}, "with score_mod, expected"),
    (None, {"sinks": torch.rand(6)}, "layer 1 calls its attention with sinks, expected options among save_kv_cache; "),
])  # fmt: skip
def test_an_option_that_nobody_heeds_is_refused(index, options, named):
    kv = torch.rand(5, 32)
    with pytest.raises(RuntimeError, match=named):
        attending(None, stock, index).forward_extend(torch.rand(5, 96), kv, kv, attention(1), None, **options)


STOCK = {"flashinfer": "FlashInferAttnBackend", "torch_native": "TorchNativeAttnBackend", "triton": "TritonAttnBackend"}


@pytest.mark.parametrize("name", STOCK)
def test_stock_attention_that_is_chosen_for_sinks_takes_them(name):
    """The others do not, so dense layers with sinks would be refused there."""
    stock_backend = getattr(importlib.import_module(f"sglang.srt.layers.attention.{name}_backend"), STOCK[name])
    for forward in (stock_backend.forward_extend, stock_backend.forward_decode):
        assert ("sinks" in backend._options_of(forward)) == (name == "triton")
        assert "save_kv_cache" in backend._options_of(forward)
