"""The policies and what the options know of them agree; and the pool tells which one serves."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from sglang_freekv.config import DIGESTS, METHODS, FreeKVConfig
from sglang_freekv.kernels import CORRECTED, Box, Pooling
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.policy import POLICIES


def test_every_method_has_a_policy_and_a_threshold_if_that_asks_for_one():
    assert list(METHODS) == list(POLICIES)
    assert DIGESTS == get_args(Box)
    for name, (tau, digest) in METHODS.items():
        config = FreeKVConfig(name)
        policy = POLICIES[name](config)
        assert getattr(policy, "tau", None) == config.tau == tau and policy.pooling in get_args(Pooling)
        assert policy.budget == config.pages and policy.page_size == config.page_size
        assert policy.box == config.digest == digest
        assert all(POLICIES[name](FreeKVConfig(name, digest=box)).box == box for box in DIGESTS)


@pytest.mark.parametrize("name", METHODS)
def test_without_a_threshold_all_kv_heads_of_real_rows_are_corrected(name):
    policy = POLICIES[name](FreeKVConfig(name))
    queries, rows = torch.randn(3, 6, 16), torch.tensor([2, 0, 1])
    previous, counts = torch.zeros(4, 6, 16), torch.zeros(4, 3, dtype=torch.int64)
    previous[[2, 1]] = queries[[0, 2]]
    turned = policy.needs_correction(queries, rows, previous, counts, 2)
    expected = METHODS[name].tau is None
    assert turned.tolist() == [[expected] * 2, [False] * 2, [expected] * 2]
    assert counts[:, CORRECTED].tolist() == [0, 2 * expected, 2 * expected, 0]


@pytest.mark.parametrize("name", METHODS)
def test_the_pool_tells_the_method_and_its_threshold(name):
    config = FreeKVConfig(name, budget_tokens=64, sink_tokens=16, window_tokens=16, page_size=8, dense_layers=(0,))
    pool = FreeKVPool(config, KVShape(2, 1, 2, 4, 16, 32, 4), 256, 2, 128, torch.float32, "cpu")
    facts, line = pool.describe(), pool.activation_line()
    assert (facts["method"], facts["tau"], facts["digest"]) == (name, *METHODS[name])
    assert line.startswith(f"KV retrieval is on: {name}, budget 64 tokens = sink 16 + selected 32 + window 16, pages of 8, ")
    assert ("tau 0.9," in line) == (name == "freekv") and ("no tau, every kv head is corrected," in line) == (name != "freekv")
    assert f" {METHODS[name].digest} digests; host pool " in line
    assert math.prod(POLICIES[name](config).digest_shape(16)) == pool.shape.digest_elements
