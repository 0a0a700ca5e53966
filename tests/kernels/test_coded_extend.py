"""Extend attention over codes against extend attention over what they stand for."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels import reference
from sglang_freekv.kernels.coded_extend import CodedExtend
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.kernels.kv import KV, Scales

H, GROUP, D = 2, 3, 16
BATCHES = {"four requests": ([5, 1, 30, 24], [5, 70, 130, 48]), "one token": ([1], [1])}


def codes_of(tokens: int) -> KV:
    codes = torch.randint(-127, 128, (2, tokens, H, D), dtype=torch.int8)
    return KV(*codes, Scales(*(torch.rand(2, tokens, H) / 50).half()))


def decoded(stored: KV, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = ((codes.float() * each[..., None].float()).to(dtype) for codes, each in zip(stored[:2], stored.scales))
    return keys, values


class Noting(ReferenceExtend):
    """Notes what it is asked for, and whether it is told to gather frames."""

    def __call__(self, queries, keys, values, *more):
        assert self.frames is None and len(keys) == len(values) == sum(self.key_lens)
        self.seen = keys, values
        return super().__call__(queries, keys, values, *more)


@pytest.fixture
def noting() -> Noting:
    torch.manual_seed(0)
    return Noting()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [None, 3 * torch.ones(H * GROUP)], ids=["no sinks", "learned sinks"])
@pytest.mark.parametrize("query_lens, key_lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("size", [None, 1, 8, 24], ids=["staged", "pages of 1", "pages of 8", "pages of 24"])
def test_an_extend_over_codes_is_one_over_their_numbers(noting, size, query_lens, key_lens, sinks, dtype):
    """Of a batch before, whose contexts were longer, nothing is left in the way."""
    tokens = sum(key_lens)
    stored, queries = codes_of(tokens), torch.randn(sum(query_lens), H * GROUP, D).to(dtype)
    extend = CodedExtend(noting, (tokens + 7, H, D), dtype, size or 8, "cpu")
    extend.plan([3], [tokens + 7])
    extend(torch.randn(3, H * GROUP, D).to(dtype), *(longer := codes_of(tokens + 7))[:2], 0.25, scales=longer.scales)
    if size is None:
        extend.plan(query_lens, key_lens)
        output = extend(queries, stored.keys, stored.values, 0.25, sinks, scales=stored.scales)
    else:
        frames, pools = in_frames(stored, key_lens, size)
        extend.plan(query_lens, key_lens, frames)
        output = extend(queries, pools.keys, pools.values, 0.25, sinks, scales=pools.scales)
    expected = decoded(stored, dtype)
    assert all(torch.equal(seen, numbers) for seen, numbers in zip(noting.seen, expected)) and output.dtype == dtype
    assert torch.equal(output, reference.extend_attention(queries, *expected, query_lens, key_lens, 0.25, learned_sinks=sinks))


def in_frames(stored: KV, key_lens: list[int], size: int) -> tuple[torch.Tensor, KV]:
    """Frames ``[B, P]`` of contexts that lie end to end, and the device cache. Behind a context are codes of others, and NaN."""
    pages = max(key_lens) // size + 2
    number = len(key_lens) * pages
    frames = torch.randperm(number).int().view(len(key_lens), pages)
    pools = codes_of(number * size)
    for each in pools.scales:
        each.fill_(torch.nan)
    begin = 0
    for b, length in enumerate(key_lens):
        for token in range(length):
            row = int(frames[b, token // size]) * size + token % size
            for pool, one in zip((*pools[:2], *pools.scales), (*stored[:2], *stored.scales)):
                pool[row] = one[begin + token]
        begin += length
    scales = Scales(*(each.unflatten(0, (number, size)) for each in pools.scales))
    return frames, KV(*(codes.unflatten(0, (number, size)) for codes in pools[:2]), scales)


def test_a_scale_that_is_no_number_shows(noting):
    stored, queries = codes_of(9), torch.randn(9, H * GROUP, D)
    stored.scales.values[4, 1] = torch.nan
    extend = CodedExtend(noting, (9, H, D), torch.float32, 8, "cpu")
    extend.plan([9], [9])
    lost = extend(queries, *stored[:2], 0.25, scales=stored.scales).isnan().any(-1)
    assert lost[4:, GROUP:].all() and not lost[:, :GROUP].any()


def test_contexts_that_do_not_fit_the_scratch_are_an_error(noting):
    extend = CodedExtend(noting, (20, H, D), torch.bfloat16, 8, "cpu")
    assert extend.num_bytes == 2 * 20 * H * D * 2
    extend.plan([1, 1], [12, 8])
    with pytest.raises(RuntimeError, match="21 tokens of context, expected at most the 20 of the scratch"):
        extend.plan([1, 1], [12, 9])
