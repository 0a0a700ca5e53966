"""Full and sliding-window layers in turns: SGLang's allocator over our pool, the sizes of both, and attention on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from oracle import attend_causally
from sglang_freekv.config import GIB, FreeKVConfig, Refusal
from sglang_freekv.cpu_attention import attend
from sglang_freekv.kv_pool import FreeKVPool, full_allocator, pool_of
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.memory_pool.window_kv import WindowKV
from sglang_freekv.scheduler_patch import cpu
from sglang_freekv.windowed_pool import WindowedPool

PAGE, TOKENS, IN_WINDOWS = 8, 64, 32
CONFIG = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=PAGE)
W, D, R = LayerKind.WINDOW, LayerKind.DENSE, LayerKind.RETRIEVAL
SHAPE = KVShape(LayerTable((W, D, W, R)), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32), window=20)


@pytest.fixture
def allocator(monkeypatch):
    pool = WindowedPool(FreeKVPool(CONFIG, SHAPE, TOKENS, 2, 64, "cpu"), IN_WINDOWS)
    made = SWATokenToKVPoolAllocator(TOKENS, IN_WINDOWS, PAGE, torch.float32, "cpu", pool, need_sort=False)
    for each in (made.full_attn_allocator, made.swa_attn_allocator):
        each.alloc_extend = lambda *args, each=each, **kwargs: cpu.alloc_extend(None, each, *args, **kwargs)
    return made


def extend(allocator, before: int, after: int, last: int) -> torch.Tensor | None:
    lengths = torch.tensor([before]), torch.tensor([before]), torch.tensor([after]), torch.tensor([after])
    return allocator.alloc_extend(*lengths, torch.tensor([last]), after - before)


def test_host_pages_are_those_of_the_full_side(allocator):
    pool = pool_of(allocator.get_kvcache())
    full = full_allocator(allocator)
    assert full.size == TOKENS and allocator.size == IN_WINDOWS and full_allocator(full) is full
    slots = extend(allocator, 0, 24, -1)
    assert pool.held_pages(full).tolist() == (slots[::PAGE] // PAGE).tolist() and full.available_size() == TOKENS - 24
    allocator.free_swa(slots[:16])  # they have left the window
    assert allocator.swa_available_size() == IN_WINDOWS - 8 and len(pool.held_pages(full)) == 3
    more = extend(allocator, 24, 48, int(slots[-1]))
    assert len(pool.held_pages(full)) == 6 and allocator.swa_available_size() == 0
    assert extend(allocator, 48, 56, int(more[-1])) is None  # though the host has room
    allocator.free_swa(slots[16:])
    assert extend(allocator, 48, 56, int(more[-1])) is not None


def test_each_layer_has_its_kv_where_its_kind_says(allocator):
    pool, (keys, values) = allocator.get_kvcache(), torch.rand(2, 8, 2, 16)
    first = extend(allocator, 0, 8, -1)
    allocator.free_swa(first)
    full = extend(allocator, 8, 16, int(first[-1]))
    windows = pool.translate_loc_from_full_to_swa(full)
    assert windows.tolist() != full.tolist()  # else a mistaken index would pass
    where = KVWriteLoc(full, windows)
    for layer, slots in ((0, windows), (1, full), (2, windows)):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), where, keys + layer, values - layer)
        assert torch.equal(pool.get_key_buffer(layer)[slots], keys + layer)
        assert torch.equal(pool.get_value_buffer(layer)[slots], values - layer)
    assert pool.layers_mapping == {0: (0, True), 1: (1, False), 2: (1, True), 3: (3, False)}
    with pytest.raises(RuntimeError, match="layer 3 is a retrieval layer"):
        pool.set_kv_buffer(SimpleNamespace(layer_id=3), where, keys, values)
    in_windows = 2 * 2 * (IN_WINDOWS + PAGE) * 2 * 16 * 4
    assert sum(pool.get_kv_size_bytes()) == sum(pool_of(pool).get_kv_size_bytes()) + in_windows


def test_the_width_of_values_is_told_though_the_first_layer_is_on_the_host():
    shape = replace(SHAPE, layers=LayerTable((R, W)))
    pool = WindowedPool(FreeKVPool(CONFIG, shape, TOKENS, 2, 64, "cpu"), IN_WINDOWS)
    assert pool.get_value_buffer(pool.start_layer).shape[-1] == 16


def test_rows_and_tokens_pay_for_their_windows():
    shape = KVShape(LayerTable((W, D, W, R)), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32), window=20)
    plain = KVShape(LayerTable((D, R)), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32))
    with_windows, without = Sizing(CONFIG, shape, 1024, chunk=100), Sizing(CONFIG, plain, 1024)
    window_kv = with_windows.window_kv
    assert without.window_kv is None and window_kv == WindowKV(20, 2, 100, PAGE, shape.dense_token_bytes)
    assert window_kv.row_tokens == 5 * (24 + 8) + 128 + 8 and window_kv.shared_tokens == 2 * 104 + 8
    assert window_kv.tokens(3) == 3 * 296 + 216
    rows, tokens = 3, 4096
    paid = with_windows.row_bytes - without.row_bytes, with_windows.device_bytes_per_token - without.device_bytes_per_token
    assert paid == (window_kv.bytes_of(296), 8)
    room = with_windows._left(GIB, tokens) - rows * paid[0]
    assert room == without._left(GIB, tokens) - 8 * tokens - window_kv.bytes_of(window_kv.tokens(rows))


@pytest.mark.parametrize(("window", "ends"), [(20, 4), (128, 4), (1024, 3), (4096, 1), (32768, 1)])
def test_wide_windows_have_fewer_ends_of_prefixes(window, ends):
    window_kv = WindowKV(window, 2, 8192, PAGE, 64)
    end = -(-window // PAGE) * PAGE + PAGE
    assert window_kv.row_tokens == (1 + ends) * end + 128 + PAGE and ends * end <= max(4096, end)


def test_a_device_that_window_layers_fill_is_refused_with_what_helps():
    sizing = Sizing(CONFIG, SHAPE, 1024, chunk=8192)
    with pytest.raises(
        Refusal, match="GiB of window layers for prefills; lower --freekv-budget or --context-length, or --chunked-prefill-size"
    ):
        sizing.rows(sizing.shared_window_bytes + sizing.staging_bytes, tokens=0)


@pytest.mark.parametrize("window", [None, 7, 100], ids="window {}".format)
@pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "no sinks"])
@pytest.mark.parametrize("new", [1, 9, 40])
def test_attention_on_a_cpu(window, with_sinks, new):
    query, (keys, values) = torch.randn(new, 6, 16), torch.randn(2, 40, 2, 16)
    sinks = torch.randn(6) if with_sinks else None
    ours = attend(query, keys, values, 0.3, None if window is None else window - 1, sinks)
    theirs = attend_causally(*(x.transpose(0, 1) for x in (query, keys, values)), 0.3, window, sinks).transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
