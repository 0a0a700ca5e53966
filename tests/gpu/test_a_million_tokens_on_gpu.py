"""A context of a million tokens at the heads of Llama-3.1-8B: whatever counts, or has an offset, is wide enough."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from benchmarks import kernel_inputs
from benchmarks.compute_trials import score_two_bit
from benchmarks.kernel_inputs import Case, Inputs, check_plans
from sglang_freekv import kernels
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import KV, Misses, Scales, preselect, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

TOKENS, HEADS, HEAD_DIM, PAGE = 1 << 20, 8, 128, 8
PAGES, LAST = TOKENS // PAGE, 512  # LAST pages are compared one by one
DTYPES = [torch.bfloat16, torch.int8]


def some_kv(dtype: torch.dtype) -> KV:
    """Token rows of random numbers, or of random codes and scales."""
    shape = (TOKENS, HEADS, HEAD_DIM)
    if dtype != torch.int8:
        return KV(*(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)))
    codes = (torch.randint(-127, 128, shape, dtype=dtype, device="cuda") for _ in range(2))
    return KV(*codes, Scales(*(torch.rand(shape[:2], device="cuda").half() for _ in range(2))))


class Stored(NamedTuple):
    """KV in token rows, the host page of each page of it, and the host pool that has all of them."""

    kv: KV
    starts: torch.Tensor
    host_pages: torch.Tensor
    pool: torch.Tensor
    scales: torch.Tensor | None

    def with_scales(self, kv: KV) -> dict:
        """Arguments by which a mover copies the scales of ``kv``, too."""
        return {} if self.scales is None else {"scales": kv.scales, "host_scales": self.scales}


@pytest.fixture(scope="module", params=DTYPES, ids=["bf16", "int8"])
def stored(request):
    torch.manual_seed(0)
    kv = some_kv(request.param)
    pool = torch.empty(PAGES + 1, HEADS, 2, PAGE, HEAD_DIM, dtype=request.param, pin_memory=True)
    scales = None if kv.scales is None else torch.empty(PAGES + 1, HEADS, 2, PAGE, dtype=torch.float16, pin_memory=True)
    starts, host_pages = torch.arange(PAGES, device="cuda") * PAGE, torch.randperm(PAGES, device="cuda") + 1
    found = Stored(kv, starts, host_pages, pool, scales)
    spread = starts[:, None].expand(-1, HEADS)
    kernels.offload_pages(kv.keys, kv.values, spread, host_pages, pool, **found.with_scales(kv))
    torch.cuda.synchronize()
    yield found


def frames_of(kv: KV) -> KV:
    """Frames of a page each, which no test has written: all bits of theirs are ones."""
    empty = [torch.full_like(each.unflatten(0, (PAGES, PAGE)).view(torch.uint8), 255).view(each.dtype) for each in kv.tensors]
    return KV(empty[0], empty[1], Scales(*empty[2:]) if kv.scales else None)


def assert_same(found: KV, expected: KV) -> None:
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_all_that_is_offloaded_is_staged(stored):
    staged = frames_of(stored.kv).token_rows
    backwards = stored.starts.flip(0)
    kernels.stage_pages(stored.pool, stored.host_pages, backwards, staged.keys, staged.values, **stored.with_scales(staged))
    turned = [each.unflatten(0, (PAGES, PAGE)).flip(0).flatten(0, 1) for each in staged.tensors]
    assert_same(KV(turned[0], turned[1], Scales(*turned[2:]) if turned[2:] else None), stored.kv)


def test_the_last_pages_are_recalled_to_the_last_frames(stored):
    frames, misses = frames_of(stored.kv), Misses.allocate(2 * LAST, "cuda")
    pages = torch.cat([torch.arange(PAGES - LAST, PAGES, device="cuda"), stored.host_pages.topk(LAST).indices])
    heads, into = torch.arange(2 * LAST, device="cuda") % HEADS, torch.arange(PAGES - 2 * LAST, PAGES, device="cuda")
    misses.extend(stored.host_pages[pages].int(), heads.int(), into.int())
    kernels.recall_pages(stored.pool, misses, frames.keys, frames.values, 16, **stored.with_scales(frames))
    for found, source in zip(frames.tensors, stored.kv.tensors, strict=True):
        assert torch.equal(found[into, :, heads], source.unflatten(0, (PAGES, PAGE))[pages, :, heads])
        others = (found.view(torch.uint8) != 255).flatten(1).any(1).nonzero().flatten()
        assert torch.equal(others, into), "another frame was written"


def test_checksums_and_decoded_keys_of_the_last_pages_are_the_references(stored):
    kv, last = stored.kv, slice(PAGES - LAST, PAGES)
    starts, host_pages = stored.starts[last, None].expand(-1, HEADS), stored.host_pages[last]
    ours, theirs = (torch.zeros(PAGES + 1, HEADS, dtype=torch.int32, device="cuda") for _ in range(2))
    for module, sums in ((kernels, ours), (reference, theirs)):
        module.checksum_pages(kv.keys, kv.values, starts, host_pages, sums, PAGE, scales=kv.scales)
    assert torch.equal(ours, theirs) and bool(ours[host_pages].any())
    if kv.scales is not None:
        given = kv, starts, host_pages, PAGE, torch.bfloat16
        assert torch.equal(kernels.unrotated_keys(*given), reference.unrotated_keys(*given))
        rows, out = torch.arange(TOKENS - LAST, TOKENS, device="cuda"), [some_rows() for _ in range(2)]
        for module, into in zip((kernels, reference), out):
            module.decode_tokens(kv, rows, into)
        assert_same(*out)


def some_rows() -> KV:
    return KV(*(torch.zeros(LAST, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)))


@pytest.mark.parametrize("programs", [preselect.PROGRAMS, 5 * HEADS, HEADS])
def test_every_page_is_scored_and_may_be_selected(programs, monkeypatch):
    """The first selection, and both plans of a step, where the best pages lie anywhere in the context: 32 parts of each kv head."""
    monkeypatch.setattr(preselect, "PROGRAMS", programs)
    monkeypatch.setattr(kernel_inputs, "CACHED_BYTES", 1)  # two layers
    case = Case("a million tokens", 32, HEADS, HEAD_DIM, TOKENS, 1, PAGE, PageBudget(16, 224, 16))
    inputs = Inputs(case, "cuda", torch.empty(0))
    score_two_bit(inputs)
    for layer in inputs.layers:
        logits = layer.logits[1]
        for ahead_first in (True, False):
            same = check_plans(inputs, layer, logits, kernels, ahead_first)
            assert same.float().mean() > 0.8  # others may differ where weights all but tie
        ours, theirs = (layer.tables._replace(**{name: table.clone() for name, table in layer.tables._asdict().items()}) for _ in range(2))
        kernels.seed_slots(inputs.candidates(logits), ours)
        reference.seed_slots(inputs.candidates(logits), theirs)
        pages, expected = (tables.slot_pages[inputs.rows] for tables in (ours, theirs))
        assert pages.max() >= PAGES - 16 and (pages == expected).float().mean() > 0.8
        chosen = pages.sort(-1).values
        assert bool(((chosen[..., 1:] > chosen[..., :-1]) | (chosen[..., 1:] < 0)).all()) and chosen[chosen > PAGES // 2].numel() > 100
