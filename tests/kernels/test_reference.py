"""The reference kernels: movers by the three-way check, plans by their properties, scores by what they bound."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from sglang_freekv import kernels
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import HITS, RECALLED, Candidates, Heads, Misses, Pooling, Reads, Tables
from sglang_freekv.kernels.reference import select_pages

H, D, S = 2, 8, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_recall_moves_what_was_asked_and_nothing_else_and_empties_the_list():
    host = torch.randn(9, H, 2, S, D)
    keys, values = torch.randn(10, S, H, D), torch.randn(10, S, H, D)
    before, source = (keys.clone(), values.clone()), host.clone()
    units = [(3, 0, 0), (7, 0, 2), (5, 1, 1), (1, 1, 6), (3, 1, 7), (8, 1, 8)]
    misses = Misses.allocate(20, "cpu")
    misses.extend(*torch.tensor(units).T)
    kernels.recall_pages(host, misses, keys, values)
    moved = torch.zeros(10, H, dtype=torch.bool)
    for page, head, slot in units:
        moved[slot, head] = True
        assert torch.equal(keys[slot, :, head], host[page, head, 0]) and torch.equal(values[slot, :, head], host[page, head, 1])
    untouched = ~moved[:, None, :, None].expand_as(keys)
    assert torch.equal(keys[untouched], before[0][untouched]) and torch.equal(values[untouched], before[1][untouched])
    assert torch.equal(host, source) and not misses.length[:2].any()


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


def test_fill_copies_pages_and_leaves_what_lies_beyond_the_last_token():
    source = torch.randn(2, 15, H, D)
    cache = torch.full((2, 9, S, H, D), torch.nan)
    slot_pages = torch.full((3, H, 3), 5, dtype=torch.int32)
    slot_pages[1] = torch.tensor([[0, -1, 1], [2, 1, -1]])  # a request of 7 tokens, and a slot for the page about to begin
    tables = Tables(slot_pages, slot_pages, torch.arange(9).view(3, 3))
    asked = torch.tensor([4, 0]), torch.tensor([1, 0]), torch.tensor([7, 7]), tables
    kernels.fill_pages(*source, *asked, keys=cache[0], values=cache[1])
    assert torch.equal(cache[0, 3, :, 0], source[0, 4:8, 0]) and torch.equal(cache[1, 5, :3, 0], source[1, 8:11, 0])
    assert torch.equal(cache[1, 4, :3, 1], source[1, 8:11, 1])
    assert cache[:, :3].isnan().all() and cache[:, 6:].isnan().all() and cache[:, 4, :, 0].isnan().all()
    assert cache[:, [3, 5], :, 1].isnan().all()


def _tables(rows: int, slots: int, attended: int) -> Tables:
    pages, listed = (torch.full((rows, H, width), -1, dtype=torch.int32) for width in (slots, attended))
    return Tables(pages, listed, torch.arange(rows * slots, dtype=torch.int32).view(rows, slots))


def _absent(*shape: int) -> torch.Tensor:
    """Frames of pages of which none is resident."""
    return torch.full(shape, -1, dtype=torch.int32)


@pytest.mark.parametrize("ahead_first", [True, False])
@pytest.mark.parametrize("slots", [6, 9])
@pytest.mark.parametrize("budget", [PageBudget(1, 3, 2), PageBudget(0, 5, 1), PageBudget(3, 1, 2)])
def test_plans_make_all_required_resident_and_move_only_what_is_missing(budget, slots, ahead_first):
    """Two requests from a few tokens on, long enough for slots to run out many times."""
    rows, table = torch.tensor([2, 1]), torch.randperm(80).view(2, 40)
    slot_pages, attended, _ = tables = _tables(4, slots, budget.total)
    seq_lens, counts = torch.tensor([5, 30]), torch.zeros(4, 3, dtype=torch.int64)
    misses_now, misses_ahead = (Misses.allocate(400, "cpu") for _ in range(2))
    reads = Reads.allocate(2, H, budget.total, torch.device("cpu"))
    kernels.seed_slots(Candidates(torch.randn(2, 2 * H, 40), rows, seq_lens, table, _absent(2, 40), budget, S), tables)
    twice = 0
    for _ in range(100):
        seq_lens, corrected = seq_lens + 1, torch.rand(2, H) < 0.4
        old, was, logits = slot_pages.clone(), attended.clone(), torch.randn(2, 2 * H, 40)
        where = Candidates(logits, rows, seq_lens, table, _absent(2, 40), budget, S), Heads(corrected, torch.empty_like(corrected)), tables
        kernels.plan_pages(*where, reads, misses_now, misses_ahead, counts, ahead_first=ahead_first)
        assert bool(misses_ahead.length[0]) <= ahead_first
        kernels.plan_rest(*where, misses_ahead, counts, ahead_first=ahead_first)
        now, later = ({tuple(unit) for unit in torch.stack(misses.columns(), 1).tolist()} for misses in (misses_now, misses_ahead))
        misses_now.clear()
        misses_ahead.clear()
        expected_now, expected_later = set(), set()

        def moved(b: int, h: int, before: list[int], after: list[int], tokens: int) -> set[tuple[int, int, int]]:
            """Units to recall from one table to the next, if that is right."""
            weights, _, required = (x[b, h] for x in select_pages(logits, torch.full((2,), tokens), budget, H, S))
            want = set(required.nonzero().squeeze(1).tolist())
            arrived = {slot for slot in range(slots) if after[slot] != before[slot]}
            assert {after[slot] for slot in arrived} == want - set(before)
            gone, spared = {before[slot] for slot in arrived} - {-1}, set(after) - want - {-1}
            assert not gone or -1 not in after
            if gone and spared:
                assert max(weights[page] for page in gone) <= min(weights[page] for page in spared)
            return {(int(table[b, after[s]]), h, row * slots + s) for s in arrived if after[s] < int(seq_lens[b]) // S}

        for b, row in enumerate(rows.tolist()):
            for h in range(H):
                n, before, after = int(seq_lens[b]), old[row, h].tolist(), slot_pages[row, h].tolist()
                read = {
                    slot - row * slots: page for slot, page in zip(reads.frames[b, h].tolist(), reads.pages[b, h].tolist()) if slot >= 0
                }
                _, _, required = select_pages(logits, torch.full((2,), n + 1), budget, H, S)
                listed = {after[slot] for slot in attended[row, h].tolist() if slot >= 0}
                assert listed == set(required[b, h].nonzero().squeeze(1).tolist())
                if not corrected[b, h]:
                    assert list(read) == [slot for slot in was[row, h].tolist() if slot >= 0]
                    assert list(read.values()) == [before[slot] for slot in read] and reads.present[b, h] == budget.total
                    expected_later |= moved(b, h, before, after, n + 1)
                    continue
                _, _, required = select_pages(logits, torch.full((2,), n), budget, H, S)
                assert sorted(read.values()) == required[b, h].nonzero().squeeze(1).tolist()
                assert [before[slot] == page for slot, page in read.items()] == [i < reads.present[b, h] for i in range(len(read))]
                between = [read.get(slot, page) for slot, page in enumerate(before)]
                expected_now |= moved(b, h, before, between, n)
                if n % S:
                    assert after == between
                else:
                    expected_later |= moved(b, h, between, after, n + 1)
                    twice += 1
        assert (now, later) == (expected_now, expected_later)
    assert twice and counts[[1, 2], RECALLED].all() and (slots == budget.total or counts[[1, 2], HITS].all())


def test_a_seed_fills_the_slots_that_are_left_with_the_next_best():
    budget = PageBudget(1, 2, 1)
    logits = torch.tensor([0.0, 3.0, 1.0, 5.0, 4.0, 2.0, 0.0, 0.0, 0.0, 0.0]).expand(1, H, 10)
    for slots, resident in ((4, [0, 3, 4, 6]), (6, [0, 1, 3, 4, 5, 6]), (8, [0, 1, 2, 3, 4, 5, 6, -1])):
        slot_pages, attended, _ = tables = _tables(2, slots, 4)
        where = torch.tensor([1]), torch.tensor([6 * S + 1]), torch.zeros(1, 10), _absent(1, 10)
        kernels.seed_slots(Candidates(logits, *where, budget, S), tables)
        assert slot_pages[1].tolist() == [resident] * H and (slot_pages[0] == -1).all()
        assert slot_pages[1, 0, attended[1, 0].long()].tolist() == [0, 3, 4, 6]


def _selected(logits: torch.Tensor, budget: PageBudget, tokens: int) -> list[list[int]]:
    """Pages that are required, of one request whose kv heads have one query head each."""
    required = select_pages(logits[None], torch.tensor([tokens]), budget, len(logits), S)[2]
    return [heads.nonzero().squeeze(1).tolist() for heads in required[0]]


def test_selection_takes_the_best_and_of_equals_the_earlier():
    logits = torch.tensor([[9.0, 0.2, 0.5, 0.2, 0.1, 9.0], [9.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    assert _selected(logits, PageBudget(1, 2, 1), 6 * S) == [[0, 1, 2, 5], [0, 1, 2, 5]]
    assert _selected(logits, PageBudget(1, 2, 1), 5 * S + 1) == [[0, 1, 2, 5], [0, 1, 2, 5]]
    assert _selected(logits, PageBudget(0, 3, 1), 5 * S) == [[0, 1, 2, 4], [0, 1, 2, 4]]
    assert _selected(logits, PageBudget(1, 2, 1), 3) == [[0], [0]]


@pytest.mark.parametrize("pooling, order", [("softmax-mean", [3, 4, 2, 1]), ("mean", [1, 2, 3, 4]), ("max", [4, 2, 3, 1])])
def test_a_group_ranks_pages_by_its_pooling(pooling, order):
    """Page 1 is fair to both query heads, 2 good for the first, 3 the best by far for the second, 4 the best for the first."""
    logits = torch.tensor([[0.0, 6.0, 8.9, -5.0, 9.0, 0.0], [0.0, 1.0, -4.0, 8.5, -6.0, 0.0]])
    found = select_pages(logits[None], torch.tensor([6 * S]), PageBudget(1, 2, 1), 1, S, pooling)[1]
    assert found[0, 0, :4].tolist() == order


def test_poolings_of_a_group_of_one_select_alike_and_weigh_as_they_say():
    logits, tokens, budget = torch.randn(2, 3 * H, 30), torch.tensor([30 * S, 17 * S]), PageBudget(2, 5, 3)
    alone = [select_pages(logits, tokens, budget, 3 * H, S, pooling)[2] for pooling in get_args(Pooling)]
    assert all(torch.equal(alone[0], required) for required in alone[1:])
    for pooling, pooled in (("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0))):
        weights = select_pages(logits, tokens, budget, H, S, pooling)[0]
        for b, end in ((0, 27), (1, 14)):
            assert torch.isinf(weights[b, :, :2]).all() and torch.isinf(weights[b, :, end:]).all()
            for h in range(H):
                torch.testing.assert_close(weights[b, h, 2:end], pooled(logits[b].view(H, 3, 30)[h])[2:end])


def test_a_query_head_that_overflowed_has_no_say():
    logits = torch.randn(1, 3, 20)
    for pooling in get_args(Pooling):
        for overflow in (torch.nan, torch.inf, -torch.inf):
            overflowed = torch.cat((logits, torch.full((1, 1, 20), overflow)), 1)
            found, expected = (select_pages(x, torch.tensor([20 * S]), PageBudget(1, 5, 2), 1, S, pooling)[2] for x in (overflowed, logits))
            assert torch.equal(found, expected)


def test_a_cuboid_is_as_wide_as_keys_are_from_its_centre_in_the_mean():
    keys = torch.randn(3 * S, H, D)
    digests = torch.zeros(2, 3, H, 2, D)
    for box, written in zip(("min-max", "cuboid-mean"), digests):
        kernels.digest_pages(keys, (torch.arange(3) * S)[:, None].expand(-1, H), torch.arange(3), written, S, box)
    for page in range(3):
        for h in range(H):
            for d in range(D):
                column = keys[page * S : (page + 1) * S, h, d].tolist()
                assert digests[0, page, h, :, d].tolist() == [max(column), min(column)]
                centre = (max(column) + min(column)) / 2
                radius = sum(abs(key - centre) for key in column) / S
                torch.testing.assert_close(digests[1, page, h, :, d], torch.tensor([centre + radius, centre - radius]))


@pytest.mark.parametrize("page_size", [8, 24, 32])
def test_two_bits_tell_at_which_level_each_key_is(page_size):
    keys = torch.randn(3 * page_size, H, D)
    keys[:6, 0, 0], keys[6:page_size, 0, 0] = torch.tensor([0.0, 6, 1, 3, 5, 4]), 2.0  # 1, 3 and 5 are in the middle between two
    digests = torch.zeros(3, H, 2 * D + D * page_size // 16)
    kernels.digest_two_bit(keys, (torch.arange(3) * page_size)[:, None].expand(-1, H), torch.arange(3), digests, page_size)
    words = digests[..., 2 * D :].contiguous().view(torch.int32).unflatten(2, (-1, D // 2)).tolist()
    found = [[[[words[p][h][s // 8][d % (D // 2)] >> (2 * (s % 8) + 16 * (d >= D // 2)) & 3
                for d in range(D)] for h in range(H)] for s in range(page_size)] for p in range(3)]  # fmt: skip
    assert [found[0][s][0][0] for s in range(7)] == [0, 3, 0, 1, 2, 2, 1]
    for page in range(3):
        for h in range(H):
            for d in range(D):
                column = keys[page * page_size : (page + 1) * page_size, h, d].tolist()
                upper, lower = digests[page, h, :D][d].item(), digests[page, h, D:][d].item()
                assert (upper, lower) == (max(column), min(column))
                levels = [lower + level * (upper - lower) / 3 for level in range(4)]
                for s, key in enumerate(column):
                    far = [abs(key - level) for level in levels]
                    assert far[found[page][s][h][d]] <= min(far) + 1e-6


def test_a_score_by_two_bits_is_the_mass_of_the_keys_that_they_stand_for():
    size, budget = 8, PageBudget(1, 2, 1)
    query, where = torch.randn(1, 3 * H, D), torch.arange(6)
    levels = torch.stack([torch.randperm(size) for _ in range(6 * H * D)]).view(6, H, D, size).mT % 4  # each of four twice
    keys = torch.randn(6, H, 1, D) + levels * torch.rand(6, H, 1, D)  # two bits tell all of such keys
    digests = torch.zeros(6, H, 2 * D + D * size // 16)
    kernels.digest_two_bit(keys.transpose(1, 2).flatten(0, 1), (where * size)[:, None].expand(-1, H), where, digests, size)
    scores = kernels.score_two_bit(query, digests, torch.tensor([1]), torch.tensor([6 * size - 1]), where[None], budget, size, scale=0.3)
    logits = torch.einsum("hgd,phsd->hgps", query[0].view(H, 3, D), keys) * 0.3
    torch.testing.assert_close(scores[0].view(H, 3, 6), logits.logsumexp(-1))
    weights = select_pages(scores, torch.tensor([6 * size]), budget, H, size)[0]
    expected = logits[:, :, 1:5].flatten(2).softmax(-1).unflatten(2, (4, size)).sum(-1).mean(1)
    torch.testing.assert_close(weights[0, :, 1:5].exp(), expected)


def _score(query: torch.Tensor, digests: torch.Tensor, budget: PageBudget, tokens: int) -> torch.Tensor:
    one = torch.tensor([1])
    table = torch.arange(len(digests))[None]
    return kernels.score_pages(query, digests, one, torch.tensor([tokens]), table, budget, S, scale=D**-0.5)


def test_a_score_bounds_the_attention_logits_of_its_page():
    keys, query = torch.randn(6 * S, H, D), torch.randn(1, 3 * H, D)
    digests = torch.zeros(6, H, 2, D)
    kernels.digest_pages(keys, (torch.arange(6) * S)[:, None].expand(-1, H), torch.arange(6), digests, S)
    budget = PageBudget(1, 2, 1)
    scores = _score(query, digests, budget, 6 * S - 1)
    weights = select_pages(scores, torch.tensor([6 * S]), budget, H, S)[0]
    assert torch.isinf(weights[..., [0, 5]]).all()
    torch.testing.assert_close(weights[..., 1:5].exp().sum(-1), torch.ones(1, H))
    for h in range(H):
        q, k = query[0].view(H, 3, D)[h], keys[:, h].view(6, S, D)
        bound = torch.maximum(q[:, None] * k.amax(1), q[:, None] * k.amin(1)).sum(-1)
        assert (bound[..., None] >= torch.einsum("gd,psd->gps", q, k) - 1e-5).all()
        torch.testing.assert_close(scores[0].view(H, 3, 6)[h], bound / D**0.5)
        torch.testing.assert_close(weights[0, h, 1:5].exp(), (bound[:, 1:5] / D**0.5).softmax(-1).mean(0))


def test_what_a_slot_held_before_never_reaches_attention():
    keys, values = torch.randn(6, S, H, D), torch.randn(6, S, H, D)
    keys[4, 2:], values[4, 2:], keys[5], values[5] = (torch.nan,) * 4
    slot_pages, attended, _ = tables = _tables(2, 3, 3)
    slot_pages[1], attended[1] = torch.tensor([0, 1, 7]), torch.tensor([0, 1, -1])
    query = torch.randn(2, 2 * H, D)
    reads = Reads.of(torch.tensor([1, 0]), tables, _absent(2, 3))
    out = kernels.attend_pages(query, keys, values, torch.tensor([S + 2, 1]), reads, 1.0)
    k, v = (x[3:].flatten(0, 1)[: S + 2] for x in (keys, values))
    expected = torch.cat([(query[0].view(H, 2, D)[h] @ k[:, h].T).softmax(-1) @ v[:, h] for h in range(H)])
    torch.testing.assert_close(out[0], expected)
    assert not out[1].any()


def test_far_pages_are_ranked_where_their_weights_underflow():
    pages = 100
    digests = -3.0 * torch.arange(pages).view(pages, 1, 1, 1).expand(pages, 1, 2, 1)  # every page 3 further than the last one
    budget = PageBudget(0, 60, 1)
    for sign, expected in ((1, list(range(60))), (-1, list(range(99, 39, -1)))):
        scores = _score(sign * torch.ones(1, 2, 1), digests, budget, (pages + 1) * S - 1)
        weights, order, _ = select_pages(scores, torch.tensor([(pages + 1) * S]), budget, 1, S)
        assert weights.isfinite().all() and order[0, 0, :60].tolist() == expected
