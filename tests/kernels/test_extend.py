"""Extend attention in place against staged extend attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.kernels import reference
from sglang_freekv.kernels.extend import FlashInferExtend, ReferenceExtend

SINKS = pytest.mark.parametrize(
    "sinks", [None, 3 * torch.randn(6, generator=torch.Generator().manual_seed(0))], ids=["no sinks", "learned sinks"]
)


@pytest.mark.parametrize("size", [1, 8, 24])
@SINKS
def test_an_extend_in_place_is_the_staged_one(size, sinks):
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
    assert torch.equal(in_place(queries, *pools, 0.25, sinks), staged(queries, keys, values, 0.25, sinks))


def plain(queries, keys, values, query_lens, key_lens, scale, sinks) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention token by token in double precision, and the logarithm to base 2 of each query's sum of exponentials."""
    outputs, weights, group = [], [], queries.shape[1] // keys.shape[1]
    for q, k, v in zip(queries.split(query_lens), keys.split(key_lens), values.split(key_lens)):
        for token, query in enumerate(q.double()):
            seen = len(k) - len(q) + token + 1
            past, held = (x[:seen].double().repeat_interleave(group, 1) for x in (k, v))
            parts = ((query * past).sum(-1) * scale).exp()  # [seen, Hq]
            total = parts.sum(0) + (0 if sinks is None else sinks.double().exp())
            outputs.append((parts[..., None] * held).sum(0) / total[:, None])
            weights.append(parts.sum(0).log2())
    return torch.stack(outputs).float(), torch.stack(weights).float()


@SINKS
@pytest.mark.parametrize("query_lens, key_lens", [([5, 1, 30, 24], [5, 70, 130, 48]), ([1], [1])])
def test_an_extend_is_a_softmax_with_sinks(query_lens, key_lens, sinks):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(sum(query_lens), 6, 16), *torch.randn(2, sum(key_lens), 2, 16)
    lens = query_lens, key_lens
    found = reference.extend_attention(queries, keys, values, *lens, 0.25, learned_sinks=sinks)
    torch.testing.assert_close(found, plain(queries, keys, values, *lens, 0.25, sinks)[0], rtol=1e-5, atol=1e-5)


@SINKS
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
def test_sinks_are_added_to_what_flashinfer_answers(in_place, sinks):
    """FlashInfer has no sinks here. Its sum of exponentials comes by another function, which is called for sinks only."""
    torch.manual_seed(0)
    lens, calls = ([5, 1], [9, 3]), []
    queries, keys, values = torch.randn(6, 6, 16), *torch.randn(2, 12, 2, 16)

    def forward_return_lse(q, *context, causal, sm_scale):
        calls.append("with sums")
        k, v = context[0] if in_place else context
        return plain(q, k, v, *lens, sm_scale, None)

    def forward(q, *context, **options):
        answer = forward_return_lse(q, *context, **options)
        calls[:] = ["alone"]
        return answer[0]

    extend = object.__new__(FlashInferExtend)
    wrapper = {"fa2": SimpleNamespace(forward=forward, forward_return_lse=forward_return_lse)}
    extend.backend, extend.in_place, extend.ragged, extend.paged = "fa2", in_place, *((None, wrapper) if in_place else (wrapper, None))
    found = extend(queries, keys, values, 0.25, sinks)
    assert calls == ["alone" if sinks is None else "with sums"]
    torch.testing.assert_close(found, plain(queries, keys, values, *lens, 0.25, sinks)[0], rtol=1e-5, atol=1e-5)
