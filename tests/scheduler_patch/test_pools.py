"""Sizes of the pools: what cannot be built is refused by the name of what is short."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.config import GIB, FreeKVConfig, Refusal
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.scheduler_patch import pools

SHAPE = KVShape(LayerTable.uniform(31, dense=1), 8, 32, 128, (2, 128), KVFormat.plain(torch.bfloat16))


@pytest.fixture
def resolve(monkeypatch):
    """Sizes of Llama-3.1-8B's shape from GiB of host and device."""
    monkeypatch.setattr(pools, "_agree", lambda value: value)
    monkeypatch.setattr(pools, "_kv_shape", lambda configurator: SHAPE)

    def resolve(host=100.0, device=20.0, context=131072, kv_cache_dtype=torch.bfloat16, rows=None, resident=None, **more):
        args = SimpleNamespace(
            _freekv=replace(FreeKVConfig(), host_memory_gib=host, resident_memory_gib=resident, **more), max_running_requests=rows,
            mem_fraction_static=0.9, kv_cache_dtype="auto", chunked_prefill_size=None,
        )  # fmt: skip
        monkeypatch.setattr(pools, "_budgets", lambda *others: (int(host * GIB), int(device * GIB)))
        configurator = SimpleNamespace(
            server_args=args,
            kv_cache_dtype=kv_cache_dtype,
            model_config=SimpleNamespace(dtype=torch.bfloat16, context_len=context),
            _apply_token_constraints=lambda tokens: tokens,
            resolve_max_num_reqs=lambda tokens: rows or 4096,
        )
        return pools.resolve_memory_pool_config(None, configurator, 0), configurator.model_config.freekv_frames

    return resolve


def test_tokens_come_from_the_host_and_rows_from_the_device(resolve):
    sizes, frames = resolve()
    without, slots = resolve(resident=0)
    assert 0 < sizes.max_total_num_tokens == without.max_total_num_tokens <= 100 * GIB // (31 * 4096)
    assert 10 < without.max_running_requests < 100 and slots == 64 * (without.max_running_requests + 1)
    assert sizes.max_running_requests in (2 * without.max_running_requests, 2 * without.max_running_requests - 2)  # of which half are short
    assert 0.95 * slots < frames < 1.03 * slots  # all memory that the tables of more rows leave


@pytest.mark.parametrize("rows, asked, host, expected", [
    (8, None, 100.0, (10, 10.5)),  # 20 GiB less 1 of staging, 6.5 of digests and the dense layer, 2.2 of rows
    (8, 3, 100.0, (2.95, 3)), (8, 0, 100.0, (0, 0)), (8, None, 1.0, (0.95, 1)), (8, 0.001, 100.0, (0, 0)),
])  # fmt: skip
def test_what_tokens_and_rows_leave_is_for_resident_pages(resolve, rows, asked, host, expected):
    sizes, frames = resolve(rows=rows, resident=asked, host=host)
    assert sizes.max_running_requests == rows
    assert expected[0] <= (frames - 64 * (rows + 1)) * 32 * 31 * 4096 / GIB <= expected[1]


@pytest.mark.parametrize("asked", [None, 0.001])
def test_one_request_has_its_frames_on_the_smallest_device(resolve, asked):
    sizes, device = None, 1.4
    while sizes is None:
        try:
            sizes, frames = resolve(device=device, host=1.0, rows=1, resident=asked)
        except Refusal:
            device += 1 / 1024
    assert sizes.max_running_requests == 1 and frames >= 64 + 66  # slots twice, the last page and one in hand
    assert 1.41 < device < 1.7


def test_a_quantised_checkpoint_is_refused_whatever_told_so(resolve):
    told = (
        "--kv-cache-dtype auto: SGLang takes float8_e4m3fn for this checkpoint, expected bfloat16, .* use --kv-cache-dtype fp8_e4m3 or bf16"
    )
    with pytest.raises(Refusal, match=told):
        resolve(kv_cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("device, context", [(3, 1_010_000), (0.5, 131072), (0.0, 4096)])
def test_a_device_that_is_too_small_is_not_told_as_missing_host_memory(resolve, device, context):
    with pytest.raises(Refusal, match="--freekv-budget 2048: one request takes .* GiB of prefix staging; lower .* --context-length"):
        resolve(device=device, context=context)


def test_a_device_that_is_too_small_for_what_is_attended_to_in_full_is_told_so(resolve):
    with pytest.raises(Refusal, match="--freekv-dense-below 65536: one request takes .*; lower --freekv-dense-below or --context-length"):
        resolve(device=0.5, dense_below_tokens=65536)


def test_a_host_that_is_too_small_is_told_as_such(resolve):
    with pytest.raises(Refusal, match="--freekv-host-memory 0.001: it holds 0 tokens, expected at least 4 pages of 32"):
        resolve(host=0.001)
