"""Pools of coded KV: what they take, and that scales go wherever their codes go and are watched as these are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_freekv import kernels
from sglang_freekv.batch import StagedPages
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import digests_of
from sglang_freekv.kernels import Misses
from sglang_freekv.kernels.kv import KV, Scales
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.canary import Fault, FaultReader
from sglang_freekv.memory_pool.digest_pool import keys_to_digest
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.staging import Staging
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import InlineStream

LAYERS, H, S, D, PAGES, ROWS, STAGED = 3, 2, 4, 16, 12, 2, 24
CONFIG = FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=S, dense_layers=(), canary="full", digest="min-max")
PREFIX = torch.tensor([7, 2, 11, 5])  # host pages
POLICY = SimpleNamespace(digests=digests_of(CONFIG))


def build(format: KVFormat) -> Store:
    shape = KVShape(LayerTable.uniform(LAYERS), H, 2 * H, D, (2, D), format)
    return Store.build(CONFIG, shape, PAGES * S, ROWS, STAGED, "cpu", InlineStream())


def draw(tokens: int) -> KV:
    keys, values = torch.randint(-127, 128, (2, tokens, H, D), dtype=torch.int8)
    return KV(keys, values, Scales(*torch.rand(2, tokens, H).half()))


@pytest.fixture
def written() -> list[KV]:
    """What is in host pages ``PREFIX`` of each layer."""
    torch.manual_seed(0)
    return [draw(len(PREFIX) * S) for _ in range(LAYERS)]


@pytest.fixture
def store(written, monkeypatch) -> Store:
    """A store of int8 whose host pages ``PREFIX`` are written, sealed and digested. Keys are rotated back by doing nothing."""

    def decoded(kv: KV, starts: torch.Tensor, host_pages: torch.Tensor, page_size: int, dtype: torch.dtype) -> torch.Tensor:
        token, heads = starts[:, None] + torch.arange(page_size)[:, None], torch.arange(starts.shape[1])
        return (kv.keys[token, heads].to(dtype) * kv.scales.keys[token, heads, None].to(dtype)).flatten(0, 1)

    monkeypatch.setattr(kernels, "unrotated_keys", decoded, raising=False)
    store, starts = build(KVFormat.int8(torch.float32)), (torch.arange(len(PREFIX)) * S)[:, None].expand(-1, H)
    for layer, (pool, kv) in enumerate(zip(store.host.layers, written)):
        kernels.offload_pages(kv.keys, kv.values, starts, PREFIX, pool, **store.host.scales_with(layer, kv.scales))
        store.canary.seal(layer, kv, starts, PREFIX)
        POLICY.digests.write(*keys_to_digest(kv, starts, PREFIX, S, torch.float32), PREFIX, store.digests.layers[layer])
    return store


def prefix(starts: torch.Tensor):
    """``PREFIX`` to token rows ``starts``, as a batch looks it up."""

    class Prefixes(list):
        def look_up(self) -> StagedPages:
            return StagedPages(PREFIX, starts)

    return Prefixes(PREFIX)


def assert_same(found: KV, expected: KV, starts: torch.Tensor) -> None:
    """Token rows that begin at ``starts`` are the pages of ``expected``."""
    rows = (starts[:, None] + torch.arange(S)).flatten()
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(ours[rows], theirs)


def faults(store: Store) -> list[Fault]:
    return FaultReader().read(store.canary.faults)


def damage(store: Store, kind: int = 0) -> tuple[int, int, int]:
    """One bit of one scale in host memory; returns layer, host page and kv head."""
    store.host.scales[1][11, 1, kind, S - 1 :].view(torch.int16).bitwise_xor_(1)
    return 1, 11, 1


def test_bytes_of_codes_and_scales():
    coded, plain = build(KVFormat.int8(torch.float32)), build(KVFormat.plain(torch.float32))
    vector, element = D + 2, 4 * D
    for store, vector_bytes in ((coded, vector), (plain, element)):
        unit = 2 * S * vector_bytes
        assert store.host.unit_bytes == unit and store.host.num_bytes == LAYERS * (PAGES + 1) * H * unit
        assert store.cache.frame_bytes == LAYERS * H * unit
        assert store.staging.num_bytes == 2 * STAGED * H * 2 * vector_bytes
    frames = coded.cache.num_frames
    assert frames == plain.cache.num_frames
    assert plain.cache.num_bytes - coded.cache.num_bytes == frames * LAYERS * H * 2 * S * (element - vector)
    assert coded.digests.num_bytes == plain.digests.num_bytes and coded.digests.layers[0].dtype == torch.float32


def test_a_staging_buffer_of_any_length_is_aligned_as_frames_are(store):
    """A kernel is compiled anew for a tensor that is not, and what a start compiles reads staging buffers in one place, frames in another."""
    staging = Staging(store.host, 13, (1, 16), KVFormat.int8(torch.bfloat16), "cpu", InlineStream())
    staging.context_tokens = 13
    for layer in range(2):
        kv = staging.token_rows(layer)
        assert {len(each) for each in kv.tensors} == {13} and not any(each.data_ptr() % 16 for each in kv.tensors)
        assert kv.scales.keys.stride() == kv.scales.values.stride() == (1, 1)


def test_types_and_shapes_of_each_pool():
    store, plain = build(KVFormat.int8(torch.bfloat16)), build(KVFormat.plain(torch.bfloat16))
    cache, staged = store.cache.layers[2], store.staging.token_rows(1)
    assert [(each.shape, each.dtype) for each in store.host.scales] == [((PAGES + 1, H, 2, S), torch.float16)] * LAYERS
    assert all(each.is_contiguous() and not each.any() for each in store.host.scales)
    assert {each.dtype for each in (store.host.layers[0], *cache.kv[:2], *staged[:2])} == {torch.int8}
    assert {each.dtype for each in (*cache.kv.scales, *staged.scales)} == {torch.float16} and cache.previous_queries.dtype == torch.bfloat16
    assert (
        cache.kv.scales.keys.shape == (store.cache.num_frames, S, H)
        and cache.token_rows.scales.values.shape == cache.token_rows.keys.shape[:2]
    )
    assert plain.cache.layers[2].token_rows.scales is None is plain.staging.token_rows(1).scales and plain.host.scales == []
    assert plain.host.scales_with(0, plain.cache.layers[0].kv.scales) == {}
    given = store.host.scales_with(2, cache.kv.scales)
    assert given["scales"] is cache.kv.scales and given["host_scales"] is store.host.scales[2]


def test_staged_prefixes_have_their_scales(store, written):
    starts = torch.tensor([8, 0, 16, 4])
    store.staging.begin(20, prefix(starts))
    for layer in range(LAYERS):
        context = store.staging.context(layer)
        assert [each.shape for each in context.tensors] == [(20, H, D)] * 2 + [(20, H)] * 2
        assert_same(context, written[layer], starts)
    assert faults(store) == []


def test_prefixes_in_frames_have_their_scales(store, written):
    starts = torch.tensor([20, 3, 8, 11]) * S
    store.in_place.stream_prefixes(prefix(starts))
    for layer in range(LAYERS):
        assert_same(store.in_place.context(layer), written[layer], starts)
    assert faults(store) == []


def test_pages_that_are_refilled_have_their_scales(store, written):
    page_table, given = torch.cat((torch.tensor([1, 3]), PREFIX))[None], torch.tensor([[-1, -1, 9, 21, 4, 2]])
    store.in_place.refill(page_table, given)
    for layer in range(LAYERS):
        assert_same(store.cache.layers[layer].token_rows, written[layer], given[0, 2:] * S)
    assert faults(store) == []
    assert damage(store) and not faults(store)
    store.in_place.refill(page_table, given)
    assert [fault.unit for fault in faults(store)] == [(1, 11, 1)]


@pytest.mark.parametrize("kind", [0, 1], ids=["of a key", "of a value"])
def test_a_changed_scale_is_told_when_it_is_staged(store, kind):
    store.staging.sweep(PREFIX)
    assert faults(store) == []
    unit = damage(store, kind)
    store.staging.begin(16, prefix(torch.arange(len(PREFIX)) * S))
    for layer in range(LAYERS):
        store.staging.context(layer)
    assert [fault.unit for fault in faults(store)] == [unit]
    store.staging.sweep(PREFIX)
    assert [fault.unit for fault in faults(store)] == [unit] * 2


def test_a_changed_scale_is_told_when_it_is_recalled(store, written):
    kv = store.cache.layers[1].kv
    for is_damaged in (False, True):
        expected = [damage(store)] if is_damaged else []
        misses = Misses.allocate(4, "cpu")
        misses.extend(torch.tensor([7, 11, 11]), torch.tensor([1, 1, 0]), torch.tensor([3, 4, 5]))
        kernels.recall_pages(store.host.layers[1], misses, kv.keys, kv.values, **store.host.scales_with(1, kv.scales))
        store.canary.verify_recalled(1, misses, kv)
        assert torch.equal(kv.scales.keys[4, :, 1], written[1].scales.keys[2 * S : 3 * S, 1]) == (not is_damaged)
        assert [fault.unit for fault in faults(store)] == expected


def test_a_scale_in_the_padding_page_is_found(store):
    store.host.check_integrity()
    store.host.scales[2][0, 1, 1, S - 1] = 0.5
    with pytest.raises(RuntimeError, match="host pool, retrieval layer 2: padding page 0 was written"):
        store.host.check_integrity()


def test_digests_are_those_of_decoded_keys(store, written):
    store.check_integrity(PREFIX, POLICY)
    keys = written[0].keys.float() * written[0].scales.keys.float()[..., None]
    assert torch.equal(store.digests.layers[0][7].amax(1), keys[:S].amax(0))
    store.host.scales[1][11, 0, 1] *= 2  # of values, which no digest knows
    store.check_integrity(PREFIX, POLICY)
    store.host.scales[1][11, 0, 0] *= 2
    with pytest.raises(RuntimeError, match=r"retrieval layer 1: 1 of 4 pages examined .* first \[11\]"):
        store.check_integrity(PREFIX, POLICY)


def test_plain_keys_are_digested_where_they_lie():
    kv, starts = KV(torch.rand(20, H, D), torch.rand(20, H, D)), torch.tensor([[4, 5]])
    keys, where = keys_to_digest(kv, starts, torch.tensor([3]), S, torch.float32)
    assert keys is kv.keys and where is starts
