"""What sizing counts where KV is stored as codes, by hand: a token of each kind of layer, frames, staging buffers and the scratch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kernels import plan, preselect
from sglang_freekv.kernels.candidates import Candidates, Heads, Tables
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import FRAME_TABLE_BYTES, KVShape, Sizing

R, D, W = LayerKind.RETRIEVAL, LayerKind.DENSE, LayerKind.WINDOW
HEADS, DIM, PAGE, CONTEXT = 2, 24, 8, 1024
CONFIG = FreeKVConfig(budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=PAGE)
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)
ONE_BYTE = KVFormat(torch.float8_e4m3fn, torch.bfloat16)  # codes of a type that needs no scales


def sizing(kv: KVFormat, context: int = CONTEXT) -> Sizing:
    return Sizing(CONFIG, KVShape(LayerTable((D, R, W, R, R)), HEADS, 6, DIM, (2, DIM), kv, window=32), context, chunk=128)


@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_codes_are_counted_where_they_are_stored(dtype):
    plain, coded = sizing(KVFormat.plain(dtype)), sizing(KVFormat.of("int8", dtype))
    computed, stored = 2 * HEADS * DIM * dtype.itemsize, 2 * HEADS * (DIM + 2)
    assert (plain.shape.retrieval_token_bytes, plain.shape.dense_token_bytes) == (computed, computed)
    assert (coded.shape.retrieval_token_bytes, coded.shape.dense_token_bytes) == (stored, computed)
    assert (plain.host_bytes_per_token, coded.host_bytes_per_token) == (3 * computed, 3 * stored)
    assert coded.frame_bytes == 3 * PAGE * stored + FRAME_TABLE_BYTES
    assert coded.staging_bytes == 2 * CONTEXT * stored + CONTEXT * computed and coded.scratch_bytes == CONTEXT * computed
    assert plain.staging_bytes == 2 * CONTEXT * computed and plain.scratch_bytes == 0


@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
def test_what_is_no_retrieval_layers_kv_is_as_without_codes(dtype):
    """Dense and window layers, digests, and the tables of a row with its previous queries."""
    plain, coded = sizing(KVFormat.plain(dtype)), sizing(KVFormat.int8(dtype))
    for name in ("device_bytes_per_token", "table_bytes", "row_window_bytes", "shared_window_bytes", "window_kv", "promised_frames"):
        assert getattr(plain, name) == getattr(coded, name)
    assert coded.window_kv.token_bytes == coded.shape.dense_token_bytes


def test_a_stored_type_without_scales_has_a_scratch_too():
    """To be coded and to have scales are two questions."""
    kv = sizing(ONE_BYTE)
    assert kv.shape.retrieval_token_bytes == 2 * HEADS * DIM and kv.scratch_bytes == CONTEXT * 2 * HEADS * DIM * 2


@pytest.mark.parametrize("dtype", COMPUTE, ids=str)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_floats_of_8_bits_are_those_of_all_layers_but_not_of_digests(name, dtype):
    plain, floats = sizing(KVFormat.plain(dtype)), sizing(KVFormat.of(name, dtype))
    stored, computed = 2 * HEADS * DIM, 2 * HEADS * DIM * dtype.itemsize
    assert (floats.shape.retrieval_token_bytes, floats.shape.dense_token_bytes, floats.window_kv.token_bytes) == (stored,) * 3
    assert floats.host_bytes_per_token == 3 * stored and floats.frame_bytes == 3 * PAGE * stored + FRAME_TABLE_BYTES
    assert floats.staging_bytes == 2 * CONTEXT * stored + CONTEXT * computed and floats.dense_bytes_per_token == stored
    assert floats.digest_bytes_per_token == plain.digest_bytes_per_token
    assert floats.table_bytes - floats.row_window_bytes == plain.table_bytes - plain.row_window_bytes


def test_codes_leave_more_tokens_to_the_same_host_and_more_frames_to_the_same_device():
    plain, coded = sizing(KVFormat.plain(torch.bfloat16)), sizing(KVFormat.int8(torch.bfloat16))
    host, device = 1 << 20, 1 << 24
    tokens, more = (each.tokens(host, device, 4) for each in (plain, coded))
    assert tokens == host // (3 * 192) // PAGE * PAGE and more == host // (3 * 104) // PAGE * PAGE
    assert coded.frames(24 << 20, 1 << 16, 4) > 1.7 * plain.frames(24 << 20, 1 << 16, 4)


@pytest.mark.parametrize("pages", [128, 4096, 9000])
def test_scratch_that_a_plan_allocates_is_counted(pages, monkeypatch):
    """With 9,000 pages three programs preselect. Norms of their parts are left out: they take less than a page of tokens."""
    rows, allocated = torch.tensor([1]), []
    empty = torch.empty
    for module, kernel in ((plan, "_plan_pages"), (preselect, "_preselect"), (preselect, "_norm_parts")):
        monkeypatch.setattr(module, kernel, mock.MagicMock())

    def counted(*shape, **options):
        made = empty(*shape, **options)
        if made.dtype == torch.int32:
            allocated.append(made.nbytes)
        return made

    width, budget = CONFIG.attended_pages, CONFIG.pages
    tables = Tables(*(torch.zeros(2, *sizes, dtype=torch.int32) for sizes in ((HEADS, width), (HEADS, width), (width,))))
    where = torch.zeros(1, 6, pages), rows, rows, torch.zeros(1, pages), torch.zeros(1, pages)
    reads, misses = Reads.allocate(1, HEADS, width, torch.device("cpu"), budget.total), Misses.allocate(8, "cpu")
    heads = Heads(*torch.zeros(2, 1, HEADS, dtype=torch.bool))
    monkeypatch.setattr(torch, "empty", counted)
    plan.plan_pages(Candidates(*where, budget, PAGE), heads, tables, reads, misses, misses, rows, ahead_first=True)
    one, other = (sizing(KVFormat.plain(torch.bfloat16), length * PAGE).table_bytes for length in (pages, 16))
    beside = (4 * 6 + 4 * PAGE) * (pages - 16)  # scores, and SGLang's row of token slots
    assert one - other - beside == sum(allocated) - 8 * HEADS * (16 + width)


@pytest.mark.parametrize(
    "rows, taken",
    [(None, "half"), (2, "half"), (600, "contexts"), (700, "what rows leave"), (4000, "half")],
)
def test_what_a_large_host_caches_leaves_half_of_the_device_to_resident_pages(rows, taken):
    """Tokens take more only for the longest contexts of the rows that were asked for, and no more than these rows leave."""
    plain, host, device = sizing(KVFormat.plain(torch.bfloat16)), 1 << 50, 1 << 28
    room, asked = device - plain.staging_bytes - plain.shared_window_bytes, rows or 0
    shares = {
        "half": room / 2,
        "contexts": asked * (CONTEXT + PAGE) * plain.device_bytes_per_token,
        "what rows leave": room - plain.padding_bytes - asked * plain.row_bytes,
    }
    page = PAGE * plain.device_bytes_per_token
    assert plain.tokens(host, device, rows) * plain.device_bytes_per_token == pytest.approx(shares[taken], abs=page)
    assert plain.frames(device, plain.tokens(host, device, 2), 2) > 20 * plain.promised_frames
