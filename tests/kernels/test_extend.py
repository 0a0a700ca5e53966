"""Extend attention in place against staged extend attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.kernels import reference
from sglang_freekv.kernels.extend import FlashInferExtend, ReferenceExtend
from sglang_freekv.kernels.flash_attention import MOST_PAGE_SIZE, FlashAttentionExtend, is_computed
from sglang_freekv.refusal import Refusal

SINKS = pytest.mark.parametrize(
    "sinks", [None, 3 * torch.randn(6, generator=torch.Generator().manual_seed(0))], ids=["no sinks", "learned sinks"]
)


def framed(contexts: tuple[torch.Tensor, torch.Tensor], key_lens: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of each context, and keys and values there. What lies behind a context must not matter."""
    (_, heads, dim), width = contexts[0].shape, max(key_lens) + 1
    frames = torch.randperm(len(key_lens) * width).int().view(-1, width)
    pools = torch.full((2, frames.numel(), size, heads, dim), torch.nan)
    for pool, tokens in zip(pools, contexts):
        for b, context in enumerate(tokens.split(key_lens)):
            for token, row in enumerate(context):
                pool[frames[b, token // size], token % size] = row
    return frames, pools


@pytest.mark.parametrize("size", [1, 8, 24])
@SINKS
def test_an_extend_in_place_is_the_staged_one(size, sinks):
    torch.manual_seed(0)
    H, group, D, query_lens, key_lens = 2, 3, 16, [5, 1, 30, 24], [5, 70, 130, 48]
    queries, keys, values = torch.randn(60, H * group, D), *torch.randn(2, sum(key_lens), H, D)
    frames, pools = framed((keys, values), key_lens, size)
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
    wrapper = SimpleNamespace(forward=forward, forward_return_lse=forward_return_lse)
    extend.in_place, extend.ragged, extend.paged = in_place, *((None, wrapper) if in_place else (wrapper, None))
    found = extend(queries, keys, values, 0.25, sinks)
    assert calls == ["alone" if sinks is None else "with sums"]
    torch.testing.assert_close(found, plain(queries, keys, values, *lens, 0.25, sinks)[0], rtol=1e-5, atol=1e-5)


def one_by_flash_attention(queries, keys, values, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, num_splits, sinks, **longest):
    """Stands in for FlashAttention 3 over one context, behind which it would take in another's values."""
    lens = [ends.diff().tolist() for ends in (cu_seqlens_q, cu_seqlens_k)]
    assert causal and num_splits == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert longest == {"max_seqlen_q": max(lens[0]), "max_seqlen_k": max(lens[1])} and lens[1] == [len(keys)]
    return plain(queries, keys, values, *lens, softmax_scale, sinks)[0]


def in_pages_by_flash_attention(queries, keys, values, *, cache_seqlens, page_table, cu_seqlens_q, softmax_scale, sinks, **options):
    """Stands in for FlashAttention 3 over pages. Its longest context is as long as the page table is wide."""
    size, lens, query_lens = keys.shape[1], cache_seqlens.tolist(), cu_seqlens_q.diff().tolist()
    assert options == {"causal": True, "num_splits": 0, "max_seqlen_q": max(query_lens)} and size <= MOST_PAGE_SIZE
    assert cache_seqlens.dtype == page_table.dtype == torch.int32 and page_table.shape == (len(lens), -(-max(lens) // size))
    assert size > 1 or (0 <= page_table.min() and page_table.max() < len(keys))
    where = torch.cat([page.repeat_interleave(size)[:length].long() for page, length in zip(page_table, lens)])
    within = torch.cat([torch.arange(length) for length in lens]) % size
    return plain(queries, keys[where, within], values[where, within], query_lens, lens, softmax_scale, sinks)[0]


@SINKS
@pytest.mark.parametrize("size", [1, 8, 24, 64, 80, 128, 134, 67])
def test_flash_attention_is_told_where_the_contexts_lie(monkeypatch, size, sinks):
    """The same object is planned for staged contexts, then for contexts in frames, and back."""
    kernels = SimpleNamespace(flash_attn_varlen_func=one_by_flash_attention, flash_attn_with_kvcache=in_pages_by_flash_attention)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", kernels)
    torch.manual_seed(0)
    extend = FlashAttentionExtend(size, "cpu")
    for query_lens, key_lens in (([5, 1, 30, 24], [5, 70, 130, 48]), ([1], [1]), ([3, 3], [96, 24]), ([200], [300])):
        queries, keys, values = torch.randn(sum(query_lens), 6, 16), *torch.randn(2, sum(key_lens), 2, 16)
        expected = plain(queries, keys, values, query_lens, key_lens, 0.25, sinks)[0]
        frames, pools = framed((keys, values), key_lens, size)
        for _ in range(2):
            extend.plan(query_lens, key_lens)
            torch.testing.assert_close(extend(queries, keys, values, 0.25, sinks), expected)
            extend.plan(query_lens, key_lens, frames)
            torch.testing.assert_close(extend(queries, *pools, 0.25, sinks), expected)


@pytest.mark.parametrize("head_dim, dtype, computed", [
    (128, torch.bfloat16, True), (64, torch.float16, True), (256, torch.bfloat16, True), (80, torch.bfloat16, True),
    (264, torch.bfloat16, False), (100, torch.bfloat16, False), (128, torch.float32, False),
])  # fmt: skip
def test_flash_attention_has_heads_of_whole_vectors_in_two_bytes(head_dim, dtype, computed):
    assert is_computed(head_dim, dtype) == computed


def test_a_hopper_gpu_without_flash_attention_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    with pytest.raises(Refusal, match="expected FlashAttention 3 in sgl_kernel, .* Reinstall the sglang-kernel"):
        FlashAttentionExtend(8, "cuda")
