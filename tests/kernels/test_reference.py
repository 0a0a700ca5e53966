"""The reference kernels: movers by the three-way check, the plan of slots by its properties."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv import kernels

H, D, S = 2, 8, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_recall_moves_what_was_asked_and_nothing_else():
    host = torch.randn(9, H, 2, S, D)
    keys, values = torch.randn(10, S, H, D), torch.randn(10, S, H, D)
    before, source = (keys.clone(), values.clone()), host.clone()
    host_pages = torch.tensor([[[3, -1, 7], [-1, 5, -1]], [[-1, -1, -1], [1, 3, 8]]])
    slots = torch.tensor([[[0, 1, 2], [0, 1, 2]], [[6, 7, 8], [6, 7, 8]]])
    kernels.recall_pages(host, host_pages, slots, keys, values)
    moved = torch.zeros(10, H, dtype=torch.bool)
    for b, h, c in (host_pages >= 0).nonzero().tolist():
        slot, page = slots[b, h, c], host_pages[b, h, c]
        moved[slot, h] = True
        assert torch.equal(keys[slot, :, h], host[page, h, 0]) and torch.equal(values[slot, :, h], host[page, h, 1])
    untouched = ~moved[:, None, :, None].expand_as(keys)
    assert torch.equal(keys[untouched], before[0][untouched]) and torch.equal(values[untouched], before[1][untouched])
    assert torch.equal(host, source)


def test_offload_then_stage_is_the_identity():
    tokens = 5 * S + 3
    keys, values = torch.randn(tokens, H, D), torch.randn(tokens, H, D)
    starts = torch.tensor([0, 2 * S, S, 4 * S, 3 * S])
    host_pages = torch.tensor([4, 2, -1, 6, 1])
    host = torch.zeros(8, H, 2, S, D)
    kernels.offload_pages(keys, values, starts[:, None].expand(-1, H), host_pages, host)
    assert not host[[0, 3, 5, 7]].any()
    staged = torch.full((2, 4 * S, H, D), torch.nan)
    kernels.stage_pages(host, host_pages[host_pages >= 0], torch.arange(4) * S, *staged)
    rows = (starts[host_pages >= 0][:, None] + torch.arange(S)).flatten()
    assert torch.equal(staged[0], keys[rows]) and torch.equal(staged[1], values[rows])


def test_fill_copies_pages_and_masks_what_lies_beyond_the_last_token():
    source = torch.randn(2, 11, H, D)
    cache = torch.full((2, 6, S, H, D), torch.nan)
    starts = torch.tensor([[[0, -1, 8], [4, 8, -1]]])
    kernels.fill_pages(*source, starts, torch.tensor([[[0, 1, 2], [0, 1, 2]]]), *cache)
    assert torch.equal(cache[0, 0, :, 0], source[0, 0:4, 0]) and torch.equal(cache[1, 0, :, 1], source[1, 4:8, 1])
    assert torch.equal(cache[0, 2, :3, 0], source[0, 8:11, 0]) and torch.equal(cache[1, 1, :3, 1], source[1, 8:11, 1])
    assert cache[:, 3:].isnan().all() and cache[:, 1, :, 0].isnan().all() and cache[:, 2, :, 1].isnan().all()


@pytest.mark.parametrize("capacity, needed, resident", [(6, 6, 6), (6, 3, 6), (8, 8, 0), (1, 1, 1), (37, 20, 11)])
def test_a_plan_makes_all_required_resident_and_moves_only_what_is_missing(capacity, needed, resident):
    B, heads = 5, 3
    draw = torch.stack([torch.randperm(60) for _ in range(B * heads)]).view(B, heads, 60).to(torch.int32)
    table = torch.full((B, heads, capacity), -1, dtype=torch.int32)
    table[..., :resident] = draw[..., :resident]
    table = table.gather(-1, torch.stack([torch.randperm(capacity) for _ in range(B * heads)]).view(B, heads, capacity))
    required = torch.full((B, heads, needed + 2), -1, dtype=torch.int32)
    required[..., 1 : needed + 1] = draw[..., resident // 2 : resident // 2 + needed]
    planned, incoming = kernels.plan_slots(table, required)
    for b in range(B):
        for h in range(heads):
            want = set(required[b, h].tolist()) - {-1}
            old, new, came = (tensor[b, h].tolist() for tensor in (table, planned, incoming))
            assert sorted(page for page in new if page >= 0) == sorted(want)
            assert {page for page in came if page >= 0} == want - set(old)
            assert all(now == before for now, before, arrived in zip(new, old, came) if arrived < 0 and before in want)


def test_selection_takes_the_best_and_of_equals_the_earlier():
    inf = float("inf")
    scores = torch.tensor([[[-inf, 0.2, 0.5, 0.2, 0.1, -inf], [-inf, 0.0, 0.0, 0.0, 0.0, -inf], [-inf] * 6]])
    assert kernels.select_pages(scores, 3).tolist() == [[[2, 1, 3], [1, 2, 3], [-1, -1, -1]]]
    assert kernels.select_pages(scores[..., :2], 3).tolist() == [[[1, -1, -1], [1, -1, -1], [-1, -1, -1]]]


def test_a_score_bounds_the_attention_logits_of_its_page():
    keys, query = torch.randn(6 * S, H, D), torch.randn(1, 3 * H, D)
    digests = torch.zeros(6, H, 2, D)
    kernels.digest_pages(keys, (torch.arange(6) * S)[:, None].expand(-1, H), torch.arange(6), digests, S)
    scores = kernels.score_pages(query, digests, torch.arange(6)[None], 1, torch.tensor([5]))
    assert torch.isinf(scores[..., [0, 5]]).all()
    torch.testing.assert_close(scores[..., 1:5].exp().sum(-1), torch.ones(1, H))
    for h in range(H):
        q, k = query[0].view(H, 3, D)[h], keys[:, h].view(6, S, D)
        bound = torch.maximum(q[:, None] * k.amax(1), q[:, None] * k.amin(1)).sum(-1)
        assert (bound[..., None] >= torch.einsum("gd,psd->gps", q, k) - 1e-5).all()
        torch.testing.assert_close(scores[0, h, 1:5].exp(), (bound[:, 1:5] / D**0.5).softmax(-1).mean(0))


def test_what_a_slot_held_before_never_reaches_attention():
    keys, values = torch.randn(3, S, H, D), torch.randn(3, S, H, D)
    keys[1, 2:], values[1, 2:], keys[2], values[2] = (torch.nan,) * 4
    pages = torch.tensor([[[0, 1, -1]] * H], dtype=torch.int32)
    query = torch.randn(1, 2 * H, D)
    out = kernels.attend_pages(query, keys, values, torch.tensor([[0, 1, 2]]), pages, torch.tensor([S + 2]), 1.0)
    k, v = (x.flatten(0, 1)[: S + 2] for x in (keys, values))
    expected = torch.cat([(query[0].view(H, 2, D)[h] @ k[:, h].T).softmax(-1) @ v[:, h] for h in range(H)])
    torch.testing.assert_close(out[0], expected)


def test_far_pages_are_ranked_where_their_weights_underflow():
    pages = 100
    digests = -3.0 * torch.arange(pages).view(pages, 1, 1, 1).expand(pages, 1, 2, 1)  # every page 3 further than the last one
    scores = kernels.score_pages(torch.ones(1, 2, 1), digests, torch.arange(pages)[None], 0, torch.tensor([pages]))
    assert kernels.select_pages(scores, 60).tolist() == [[list(range(60))]]
    scores = kernels.score_pages(-torch.ones(1, 2, 1), digests, torch.arange(pages)[None], 0, torch.tensor([pages]))
    assert kernels.select_pages(scores, 60).tolist() == [[list(range(99, 39, -1))]]
