"""Extend attention in place against staged extend attention."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels.extend import ReferenceExtend


@pytest.mark.parametrize("size", [1, 8, 24])
def test_an_extend_in_place_is_the_staged_one(size):
    torch.manual_seed(0)
    H, group, D, query_lens, key_lens = 2, 3, 16, [5, 1, 30, 24], [5, 70, 130, 48]
    queries, keys, values = torch.randn(60, H * group, D), *torch.randn(2, sum(key_lens), H, D)
    frames = torch.randperm(4 * 131).int().view(4, 131)
    pools = torch.full((2, 4 * 131, size, H, D), torch.nan)  # what lies behind a context must not matter
    for b, contexts in enumerate(zip(keys.split(key_lens), values.split(key_lens))):
        for pool, context in zip(pools, contexts):
            for token, row in enumerate(context):
                pool[frames[b, token // size], token % size] = row
    staged, in_place = ReferenceExtend(), ReferenceExtend()
    staged.plan(query_lens, key_lens)
    in_place.plan(query_lens, key_lens, frames)
    assert torch.equal(in_place(queries, *pools, 0.25), staged(queries, keys, values, 0.25))
