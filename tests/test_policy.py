"""The policies and what the options know of them agree; and the pool tells which one serves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from sglang_freekv.config import DIGESTS, POOLINGS, FreeKVConfig, Refusal
from sglang_freekv.digests import TwoBit
from sglang_freekv.kernels import CORRECTED, Box, Pooling
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.methods import METHODS
from sglang_freekv.policy import POLICIES


def test_every_method_has_a_policy_and_a_threshold_if_that_asks_for_one():
    assert list(METHODS) == list(POLICIES)
    assert DIGESTS == (*get_args(Box), "two-bit")
    assert POOLINGS == get_args(Pooling)
    for name, method in METHODS.items():
        tau, digest, pooling = method.tau, method.digest, method.pooling
        config = FreeKVConfig(name)
        policy = POLICIES[name](config)
        assert config.tau == tau and policy.tau == (math.inf if tau is None else tau) and policy.pooling == config.pooling == pooling
        assert policy.digests.budget == config.pages and policy.digests.page_size == config.page_size
        assert policy.digests.box == config.digest == digest
        assert all(POLICIES[name](FreeKVConfig(name, digest=box)).digests.box == box for box in get_args(Box))
        assert isinstance(POLICIES[name](FreeKVConfig(name, digest="two-bit")).digests, TwoBit)
        assert all(POLICIES[name](FreeKVConfig(name, pooling=other)).pooling == other for other in POOLINGS)


@pytest.mark.parametrize(
    "page_size, dtype, elements", [(8, torch.bfloat16, 384), (8, torch.float32, 320), (16, torch.float16, 512), (32, torch.bfloat16, 768)]
)
def test_a_digest_of_two_bits_is_two_corners_and_two_bits_for_each_token(page_size, dtype, elements):
    digests = TwoBit(FreeKVConfig(page_size=page_size).pages, page_size)
    assert digests.shape(128, dtype.itemsize) == (elements,)
    assert elements * dtype.itemsize == 2 * 128 * dtype.itemsize + 128 * page_size * 2 // 8


def test_two_bits_of_an_odd_head_are_refused():
    with pytest.raises(Refusal, match="two-bit: expected an even head_dim, but the model's is 81; use --freekv-digest cuboid-mean"):
        TwoBit(FreeKVConfig(page_size=8).pages, 8).shape(81, 2)


@pytest.mark.parametrize("name", METHODS)
def test_without_a_threshold_all_kv_heads_of_real_rows_are_corrected(name):
    policy = POLICIES[name](FreeKVConfig(name))
    queries, rows = torch.randn(3, 6, 16), torch.tensor([2, 0, 1])
    previous, counts = torch.zeros(4, 6, 16), torch.zeros(4, 3, dtype=torch.int64)
    previous[[2, 1]] = queries[[0, 2]]
    corrected = policy.corrected(0, queries, rows, previous, counts, 2)
    expected = METHODS[name].tau is None
    assert corrected.tolist() == [[expected] * 2, [False] * 2, [expected] * 2]
    assert counts[:, CORRECTED].tolist() == [0, 2 * expected, 2 * expected, 0]


@pytest.mark.parametrize("name", METHODS)
def test_the_pool_tells_the_method_and_its_threshold(name):
    config = FreeKVConfig(name, budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8, dense_layers=(0,))
    pool = FreeKVPool(config, KVShape(LayerTable.uniform(2, dense=1), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32)), 256, 2, 128, "cpu")
    facts, line = pool.describe(), pool.activation_line()
    method = METHODS[name]
    assert [facts[x] for x in ("method", "tau", "digest", "pooling")] == [name, method.tau, method.digest, method.pooling]
    assert line.startswith(f"KV retrieval is on: {name} on cpu, budget 64 tokens = sink 16 + selected 32 + window 16, pages of 8, ")
    tau = METHODS[name].tau
    assert ("no tau, every kv head is corrected," if tau is None else f"tau {tau:g},") in line
    assert f" {METHODS[name].digest} digests, {METHODS[name].pooling} pooling; host pool " in line
    assert math.prod(POLICIES[name](config).digests.shape(16, 4)) == pool.shape.digest_elements
    assert facts["hysteresis"] == 0 and "hysteresis" not in line
    pool.config = replace(config, hysteresis=1.4)
    assert pool.describe()["hysteresis"] == 1.4 and "; hysteresis 1.4" in pool.activation_line()
    assert facts["selection"] == "every-step" and "on turn" not in line
    if name == "freekv":
        pool.config = replace(config, selection="on-turn")
        assert pool.describe()["selection"] == "on-turn" and "; selection on turn" in pool.activation_line()
        return
    with pytest.raises(
        Refusal, match=f"--freekv-selection on-turn: expected every-step with --kv-retrieval {name}, which has its own rule"
    ):
        replace(config, selection="on-turn")
