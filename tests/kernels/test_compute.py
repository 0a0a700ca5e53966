"""Correction, score and attention as compiled kernels: the reference's results, and nothing else read or written."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from attention_cases import DEVICE, LOW, SPLITS, attention_case, poison, softmax_with_sinks, some_rows, wide  # noqa: F401, a fixture
from covering import covering
from interpreted import interpreted
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import attend, correction, learned_sinks, merge, reference, score, two_bit_score
from sglang_freekv.kernels.candidates import Tables, Turn
from sglang_freekv.kernels.two_bit_score import minus_one as two_bit_minus_one
from sglang_freekv.kernels.two_bit_score import numbers_of as two_bit_numbers

KINDS = [(torch.float32, torch.int64), *LOW]
SHAPES = pytest.mark.parametrize("H, G, D", [(2, 1, 16), (2, 3, 24), (1, 4, 16), (2, 7, 16), (1, 17, 24)])
TWO_BIT_SHAPES = [(2, 1, 16), (2, 3, 24), (1, 4, 16), (2, 7, 16), (1, 17, 24), (1, 2, 90)]
TWO_BIT_PAGES = {"8": (8, None), "16": (16, 60), "24": (24, 1), "32": (32, 10)}  # tokens of a page, and programs
NUMBERS = {"float32": (torch.float32, torch.int64), "float16": (torch.float16, torch.int32)}
if DEVICE == "cuda":  # too much for the interpreter, or what it computes wrongly
    TWO_BIT_SHAPES += [(2, 4, 128), (1, 8, 256), (2, 3, 64)]
    NUMBERS["bfloat16"] = (torch.bfloat16, torch.int32)
TWO_BIT_SHAPES = {"{}x{}x{}".format(*shape): shape for shape in TWO_BIT_SHAPES}
SHARPER = 1.3  # than at 1 over the root of D are the scores, as some models have it


def correct_both(queries, rows, previous, tau, num_kv_heads):
    """Flags, previous queries and counts after the kernel; they are the reference's."""
    counts = torch.randint(100, (len(previous), 3), device=DEVICE)
    got = [previous.clone(), counts.clone()]
    expected = [previous.clone(), counts.clone()]
    corrected = correction.needs_correction(queries, rows, got[0], tau, got[1], num_kv_heads)
    assert corrected.dtype == torch.bool
    assert torch.equal(corrected, reference.needs_correction(queries, rows, expected[0], tau, expected[1], num_kv_heads))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    return corrected, got[0], got[1] - counts


@SHAPES
@pytest.mark.parametrize("dtype, index", [(torch.float32, torch.int64), (torch.bfloat16, torch.int32), (torch.float16, torch.int64)])
def test_correction_flags_remembers_and_counts(H, G, D, dtype, index):
    rows = some_rows(9, 14, index)
    queries = torch.randn(9, H * G, D, device=DEVICE, dtype=dtype)
    before = torch.randn(14, H * G, D, device=DEVICE, dtype=dtype)
    distance = torch.tensor([0.5, 2], device=DEVICE).repeat(5)[:9]  # cosines about 0.9 and 0.45
    before[rows] = (queries + distance[:, None, None] * torch.randn_like(queries)).to(dtype)
    before[0] = torch.randn_like(before[0])
    corrected, previous, added = correct_both(wide(queries), rows, before, 0.7, H)
    assert 0 < corrected.sum() < 7 * H and not corrected[rows == 0].any()
    others = torch.ones(14, dtype=torch.bool, device=DEVICE).index_fill(0, rows[rows > 0].long(), False)
    assert torch.equal(previous[others], before[others]) and torch.equal(previous[rows[rows > 0]], queries[rows > 0])
    assert added[:, reference.CORRECTED].sum() == corrected.sum() and not added[:, : reference.CORRECTED].any()


@pytest.mark.parametrize("tau, expected", [(1.1, True), (2, True), (-1.1, False), (0.9, False), (float("inf"), True)])
def test_a_query_that_stays_is_corrected_only_where_tau_says_always(tau, expected):
    queries = torch.randn(3, 6, 16, device=DEVICE)
    corrected, _, _ = correct_both(queries, torch.tensor([2, 4, 1], device=DEVICE), queries[[0, 2, 0, 0, 1]].clone(), tau, 2)
    assert (corrected == expected).all()


@pytest.mark.parametrize("tau, expected", [(0.01, True), (-0.01, False)])
def test_a_query_of_zeros_has_cosine_zero(tau, expected):
    queries, previous = torch.zeros(2, 4, 16, device=DEVICE), torch.randn(3, 4, 16, device=DEVICE)
    previous[2] = 0
    corrected, _, _ = correct_both(queries, torch.tensor([1, 2], device=DEVICE), previous, tau, 2)
    assert (corrected == expected).all()


def test_tiny_queries_are_clamped_as_torch_clamps_them():
    queries = torch.full((1, 2, 16), 1e-9, device=DEVICE)  # of norm 4e-9 < 1e-8: cosine 0.4 ** 2
    previous = queries.expand(2, -1, -1).clone()
    for tau, expected in ((0.161, True), (0.159, False)):
        corrected, _, _ = correct_both(queries, torch.tensor([1], device=DEVICE), previous, tau, 2)
        assert (corrected == expected).all()


def turn_of(rows, H, index, *, size=4, attended=7, budget=7) -> Turn:
    """Contexts of which some begin a page next; some entries are of absent pages. Lists and frames of rows that are not there say the same."""
    batch, pages, num_rows = len(rows), 13, 14
    seq_lens = torch.randint(1, size * pages, (batch,), device=DEVICE)
    seq_lens[::3] = seq_lens[::3] // size * size + size
    frames = torch.where(torch.rand(batch, pages) < 0.06, -1, 40).to(DEVICE, torch.int32)
    listed = torch.randint(-1 - pages, 5, (num_rows, H, attended), device=DEVICE, dtype=torch.int32)
    slots = (torch.arange(num_rows * H * 5, device=DEVICE, dtype=torch.int32) % pages).view(num_rows, H, 5)
    tables = Tables(slots, listed, torch.arange(num_rows * 5, device=DEVICE, dtype=torch.int32).view(num_rows, 5))
    parts = PageBudget(1, budget - 3, 2)
    return Turn(seq_lens.to(index), frames, parts, size, tables, torch.empty(batch, H, dtype=torch.bool, device=DEVICE))


@pytest.mark.parametrize("H, G, D, size, attended, budget", [(2, 3, 24, 4, 7, 7), (1, 4, 16, 5, 9, 6), (3, 1, 16, 1, 8, 8)])
@pytest.mark.parametrize("index, tau", [(torch.int64, 0.7), (torch.int32, 0.7), (torch.int64, 2), (torch.int64, -2)])
def test_a_query_is_remembered_by_the_kv_heads_that_select(H, G, D, size, attended, budget, index, tau):
    rows = some_rows(9, 14, index)
    queries, before = torch.randn(9, H * G, D, device=DEVICE), torch.randn(14, H * G, D, device=DEVICE)
    distance = torch.tensor([0.5, 2], device=DEVICE).repeat(5)[:9]
    before[rows] = queries + distance[:, None, None] * torch.randn_like(queries)
    queries[2, 0], before[rows[4]] = torch.nan, torch.nan  # cosines that are no numbers
    turn = turn_of(rows, H, index, size=size, attended=attended, budget=budget)
    theirs, counts = turn._replace(selects=torch.empty_like(turn.selects)), torch.zeros(2, 14, 3, dtype=torch.int64, device=DEVICE)
    got, expected = before.clone(), before.clone()
    corrected = correction.needs_correction(wide(queries), rows, got, tau, counts[0], H, turn=turn)
    assert torch.equal(corrected, reference.needs_correction(queries, rows, expected, tau, counts[1], H, turn=theirs))
    assert torch.equal(turn.selects, theirs.selects) and torch.equal(*counts)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    for b, row in enumerate(rows.tolist()):
        n = int(turn.seq_lens[b])
        due = row > 0 and (n % size == 0 or (attended > budget and n <= attended * size))
        for h in range(H):
            entries = [-2 - entry for entry in turn.tables.attended[row, h].tolist() if entry < -1]
            lost = row > 0 and any(turn.frames[b, page] < 0 for page in entries)
            own = slice(h * G, h * G + G)
            assert bool(turn.selects[b, h]) == (due or lost or bool(corrected[b, h]))
            kept = before[row, own] if not (due or corrected[b, h]) else queries[b, own]
            torch.testing.assert_close(got[row, own], kept, rtol=0, atol=0, equal_nan=True)
    assert turn.selects.any() and not turn.selects[rows == 0].any()


@SHAPES
@pytest.mark.parametrize("programs", [1, 60, score.PROGRAMS])
def test_scores_bound_the_logits_of_candidates_and_touch_no_other(H, G, D, programs, monkeypatch):
    monkeypatch.setattr(score, "PROGRAMS", programs)
    check_scores(H, G, D, torch.float32, torch.int64, PageBudget(3, 4, 2))


@pytest.mark.parametrize("dtype, index", KINDS)
@pytest.mark.parametrize("budget", [PageBudget(0, 2, 1), PageBudget(70, 4, 5), PageBudget(3, 4, 2)], ids=str)
def test_scores_keep_to_the_candidates_of_any_budget(dtype, index, budget):
    check_scores(2, 3, 24, dtype, index, budget)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("H, G", [(2, 3), (3, 1)])
def test_only_kv_heads_that_select_are_scored(H, G, share):
    selects = torch.rand(9, H, device=DEVICE) < share
    check_scores(H, G, 24, torch.float32, torch.int64, PageBudget(3, 4, 2), selects)
    check_two_bit_scores(H, G, 24, 8, torch.float32, torch.int64, selects=selects)


def check_scores(H, G, D, dtype, index, budget, selects=None):
    S, P, pool = 5, 150, 200
    pages = torch.tensor([150, 150, 1, 9, budget.sink + budget.window, 149, 77, 130, 150], device=DEVICE).clamp(max=P)
    seq_lens = ((pages - 1) * S + torch.tensor([1, S, 1, 2, S, 1, 3, 1, 4], device=DEVICE) - 1).clamp(min=1)
    rows = some_rows(len(pages), 30, index)
    num_pages = (seq_lens + S) // S
    page = torch.arange(P, device=DEVICE)
    candidate = (page >= budget.sink) & (page < (num_pages - budget.window)[:, None]) & (rows > 0)[:, None]
    page_table = torch.stack([torch.randperm(pool - 1, device=DEVICE)[:P] + 1 for _ in pages])
    page_table = page_table.where(page < num_pages[:, None], -1)
    digests = torch.full((pool, H, 2, D), float("nan"), device=DEVICE, dtype=dtype)
    used = page_table[candidate]
    digests[used] = torch.randn(len(used), H, 2, D, device=DEVICE, dtype=dtype)
    queries = torch.randn(len(pages), H * G, D, device=DEVICE, dtype=dtype)

    arguments = (digests, rows, seq_lens.to(index), page_table.to(index), budget, S)
    logits = score.score_pages(wide(queries), *arguments, scale=SHARPER * D**-0.5, selects=selects)
    expected = reference.score_pages(queries, *arguments, scale=SHARPER * D**-0.5, selects=selects)
    written = candidate[:, None].expand(-1, H * G, -1)
    if selects is not None:
        written = written & selects.repeat_interleave(G, 1)[..., None]
    assert logits.shape == expected.shape and logits.dtype == torch.float32 and (written.any() or not selects.any())
    torch.testing.assert_close(logits[written], expected[written], rtol=1e-5, atol=2e-5)
    assert logits[~written].isnan().all()


@pytest.mark.parametrize("shape, numbers, pages", covering(TWO_BIT_SHAPES, NUMBERS, TWO_BIT_PAGES))
def test_scores_by_two_bits_are_of_candidates_and_touch_no_other(shape, numbers, pages, monkeypatch):
    S, programs = pages
    if programs is not None:
        monkeypatch.setattr(two_bit_score, "PROGRAMS", dict.fromkeys(two_bit_score.PROGRAMS, programs))
    check_two_bit_scores(*shape, S, *numbers)


with interpreted():

    @triton.jit
    def _unpack(p_words, p_zeros, p_numbers, TOKEN: tl.constexpr, N: tl.constexpr):
        b_words = tl.load(p_words + tl.arange(0, N))[None, :]
        dtype = p_numbers.dtype.element_ty
        b_numbers = two_bit_numbers(b_words, TOKEN, two_bit_minus_one(tl.load(p_zeros + tl.arange(0, 1))[:, None], dtype), dtype)
        tl.store(p_numbers + tl.arange(0, 2 * N), tl.reshape(b_numbers, (2 * N,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_code_is_in_a_mantissa(dtype):
    words = torch.randint(-(1 << 31), 1 << 31, (64,), dtype=torch.int64).to(torch.int32).to(DEVICE)
    for token in range(8):
        found = torch.zeros(128, dtype=dtype, device=DEVICE)
        _unpack[(1,)](words, torch.zeros(1, dtype=torch.int64, device=DEVICE), found, TOKEN=token, N=64)
        weight = 32 >> 2 * (token % 3) if dtype == torch.bfloat16 else 1
        codes = torch.stack([words >> (2 * token) & 3, words >> (2 * token + 16) & 3], 1).flatten()
        assert codes.unique().tolist() == [0, 1, 2, 3] and torch.equal(found.double(), -1 - codes / (4 * weight))


@pytest.mark.parametrize("S", [8, 32])
def test_scores_by_two_bits_of_large_queries_are_finite(S):
    check_two_bit_scores(2, 3, 24, S, torch.float32, torch.int64, size=500.0)


def check_two_bit_scores(H, G, D, S, dtype, index, size=1.0, selects=None):
    P, pool, budget = 60, 80, PageBudget(3, 4, 2)
    pages = torch.tensor([60, 33, 1, 9, budget.sink + budget.window, 59, 47, 16, 60], device=DEVICE)
    seq_lens = ((pages - 1) * S + torch.tensor([1, S, 1, 2, S, 1, 3, 1, 4], device=DEVICE) - 1).clamp(min=1)
    rows = some_rows(len(pages), 30, index)
    page = torch.arange(P, device=DEVICE)
    num_pages = (seq_lens + S) // S
    candidate = (page >= budget.sink) & (page < (num_pages - budget.window)[:, None]) & (rows > 0)[:, None]
    page_table = torch.stack([torch.randperm(pool - 1, device=DEVICE)[:P] + 1 for _ in pages])
    page_table = page_table.where(page < num_pages[:, None], -1)
    digests = torch.full((pool, H, 2 * D + D * S // 4 // dtype.itemsize), float("nan"), device=DEVICE, dtype=dtype)
    used = page_table[candidate].unique()
    keys = torch.randn(len(used) * S, H, D, device=DEVICE, dtype=dtype)
    keys[:S, 0, 0], keys[S : 2 * S, -1, -1] = float("inf") if size == 1 else 0.5, 0.5  # a page that is none, and equal keys
    reference.digest_two_bit(keys, (torch.arange(len(used), device=DEVICE) * S)[:, None].expand(-1, H), used, digests, S)
    queries = torch.randn(len(pages), H * G, D, device=DEVICE, dtype=dtype) * size

    arguments = (digests, rows, seq_lens.to(index), page_table.to(index), budget, S)
    logits = two_bit_score.score_two_bit(wide(queries), *arguments, scale=SHARPER * D**-0.5, selects=selects)
    expected = reference.score_two_bit(queries, *arguments, scale=SHARPER * D**-0.5, selects=selects)
    written = candidate[:, None].expand(-1, H * G, -1)
    if selects is not None:
        written = written & selects.repeat_interleave(G, 1)[..., None]
    assert logits.shape == expected.shape and logits.dtype == torch.float32 and (written.any() or not selects.any())
    tolerance = max(2e-5, SHARPER * 16 * torch.finfo(dtype).eps)  # keys are computed in the dtype
    torch.testing.assert_close(logits[written], expected[written], rtol=1e-5, atol=tolerance * size, equal_nan=size == 1)
    assert logits[~written].isnan().all()
    if size > 1:
        assert logits[written].abs().max() > 89, "the exponentials of these neither overflow nor vanish"


@SHAPES
@SPLITS
def test_attention_is_the_reference(H, G, D, programs, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    case, rows = attention_case(H, G, D, S=5 if D == 24 else 4)
    queries = case[0]
    expected = reference.attend_pages(*case)
    output = attend.attend_pages(wide(queries), *case[1:])
    assert output.shape == queries.shape and output.is_contiguous() and expected.isfinite().all()
    assert not output[rows == 0].any() and (expected[rows > 0] != 0).any(2).all()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rest", [1, 30, 1056])
@SPLITS
def test_attention_to_what_is_there_and_then_to_the_rest_is_attention_to_all(programs, rest, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    monkeypatch.setattr(attend, "PROGRAMS_OF_THE_REST", rest)
    (queries, keys, values, lens, reads, scale), rows = attention_case(3, 2, 16, S=4, budget=20)
    width, listed = reads.frames.shape[2], (reads.frames >= 0).sum(-1)
    whole = attend.attend_pages(queries, keys, values, lens, reads, scale)
    share = torch.tensor([0.0, 0.5, 1.0], device=DEVICE)[torch.randint(3, listed.shape, device=DEVICE)]
    present = torch.where(torch.rand(listed.shape, device=DEVICE) < 0.3, width, (share * listed).int()).int()
    waits = (present < listed) & (rows > 0)[:, None]
    assert waits.any() and not waits[rows > 0].all() and (present == listed).any()
    coming = torch.zeros(len(keys), 3, dtype=torch.bool, device=DEVICE)
    for b, h in waits.nonzero().tolist():
        coming[reads.frames[b, h, present[b, h] : listed[b, h]].long(), h] = True
    not_yet = [tensor.masked_fill(coming[:, None, :, None], torch.nan) for tensor in (keys, values)]
    reads = reads._replace(present=present)

    def in_parts(module, at_first, then) -> torch.Tensor:
        """Both parts in both orders: none waits for the other."""
        outputs = []
        for present_first in (True, False):
            shares = module.allocate_shares(queries, keys, reads)
            for tensor in shares:
                tensor.fill_(torch.nan)
            calls = [(module.attend_present, at_first), (module.attend_rest, then)]
            for attend_part, cache in calls if present_first else calls[::-1]:
                attend_part(queries, *cache, lens, reads, scale, shares)
            outputs.append(module.merge_shares(*shares, queries.dtype))
        assert torch.equal(*(output.nan_to_num(7) for output in outputs))
        return outputs[0]

    for module in (attend, reference):
        torch.testing.assert_close(in_parts(module, not_yet, (keys, values)), whole, rtol=1e-5, atol=1e-5)
    lost = in_parts(attend, not_yet, not_yet).unflatten(1, (3, -1)).isnan().any(-1).any(-1)
    assert lost.any() and not (lost & ~waits).any(), "what never came is not hidden, nor anybody else's"


@pytest.mark.parametrize("dtype, index", LOW)
@SPLITS
def test_attention_in_low_precision_rounds_weights_and_output_only(dtype, index, programs, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    case, _ = attention_case(2, 4, 16, 4, dtype, index)
    queries, keys, values, *others = (x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in case)
    exact, size = (reference.attend_pages(queries, keys, v, *others) for v in (values, values.abs()))
    output = attend.attend_pages(*case)
    assert output.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * (size + exact.abs()) + 1e-5
    assert ((output.float() - exact).abs() <= bound).all()


@pytest.mark.parametrize("S", [1, 24, 48])
def test_attention_over_pages_of_any_size(S, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", 20)  # two splits
    case, _ = attention_case(2, 4, 16, S, seq_lens=(1, S, S + 1, 5 * S, 30 * S - 1), width=9, capacity=13)
    torch.testing.assert_close(attend.attend_pages(*case), reference.attend_pages(*case), rtol=1e-5, atol=1e-5)


def test_attention_of_one_request_and_one_slot():
    case, _ = attention_case(1, 2, 16, 4, seq_lens=(3,), width=1, capacity=2)
    torch.testing.assert_close(attend.attend_pages(*case), reference.attend_pages(*case), rtol=1e-5, atol=1e-5)


def test_attention_over_a_list_of_more_than_a_thousand_pages():
    case, _ = attention_case(1, 2, 16, 1, seq_lens=(1300, 7, 1090, 1), width=1100, capacity=1200)
    torch.testing.assert_close(attend.attend_pages(*case), reference.attend_pages(*case), rtol=1e-5, atol=1e-5)


@SPLITS
def test_attention_survives_logits_that_overflow_an_exponential(programs, monkeypatch):
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    (queries, *others), _ = attention_case(2, 2, 16, 4)
    queries *= 300
    output = attend.attend_pages(queries, *others)
    torch.testing.assert_close(output, reference.attend_pages(queries, *others), rtol=1e-4, atol=1e-4)


def test_nothing_that_attention_reads_is_written():
    (*tensors, reads, scale), _ = attention_case(2, 3, 16, 4)
    tensors += reads[:2]
    before = [tensor.clone() for tensor in tensors]
    attend.attend_pages(*tensors[:4], reads, scale)
    assert all(torch.equal(old.nan_to_num(7), new.nan_to_num(7)) for old, new in zip(before, tensors))


@SHAPES
@SPLITS
@pytest.mark.parametrize("rest", [1, 1056])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["as logits", "beyond an exponential"])
def test_learned_sinks_are_in_the_sum_of_the_softmax(H, G, D, programs, rest, size, monkeypatch):
    """In exact numbers, on requests of one token and of many, of which a part is attended to later."""
    monkeypatch.setattr(attend, "PROGRAMS", programs)
    monkeypatch.setattr(attend, "PROGRAMS_OF_THE_REST", rest)
    S = 5
    (queries, keys, values, lens, reads, scale), rows = attention_case(H, G, D, S)
    present = torch.randint(0, reads.frames.shape[2] + 1, (len(rows), H), dtype=torch.int32, device=DEVICE)
    reads, sinks = reads._replace(present=present), size * torch.randn(H * G, device=DEVICE)
    outputs = []
    for module in (attend, reference):
        shares = module.allocate_shares(queries, keys, reads)
        module.attend_rest(queries, keys, values, lens, reads, scale, shares)
        module.attend_present(queries, keys, values, lens, reads, scale, shares)
        outputs.append(module.merge_shares(*shares, queries.dtype, sinks))
    assert not outputs[0][rows == 0].any() and not outputs[1][rows == 0].any()
    for b in (rows > 0).nonzero().flatten().tolist():
        for h in range(H):
            listed, own = reads.frames[b, h] >= 0, slice(h * G, h * G + G)
            place = reads.pages[b, h, listed][:, None] * S + torch.arange(S, device=DEVICE)
            frames, visible = reads.frames[b, h, listed].long(), place < lens[b]
            k, v = (cache[frames, :, h][visible].double() for cache in (keys, values))
            logits = queries[b, own].double() @ k.T * scale
            expected = softmax_with_sinks(logits, v.expand(G, -1, -1), sinks[own].double()).float()
            for output in outputs:
                torch.testing.assert_close(output[b, own], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_learned_sinks_of_any_type_are_merged_as_the_reference_does(dtype):
    outputs, weights = torch.randn(3, 7, 5, 24, device=DEVICE), 4 * torch.randn(3, 7, 5, device=DEVICE)
    weights[0, :, 2:], outputs[0, :, 2:] = float("-inf"), float("nan")
    weights[1, 3] = float("-inf")  # of nobody
    sinks = (4 * torch.randn(7, device=DEVICE)).to(dtype)
    merged = merge.merge_shares(outputs, weights, torch.float32, sinks)
    torch.testing.assert_close(merged, reference.merge_shares(outputs, weights, torch.float32, sinks), rtol=1e-5, atol=1e-6)
    assert not merged[1, 3].any()
    without = merge.merge_shares(outputs, weights, torch.float32)
    assert (merged.abs() < without.abs()).sum() > 0.9 * without.count_nonzero(), "a sink takes weight from all others"
    weights[2, 1, 0] = float("nan")
    assert merge.merge_shares(outputs, weights, torch.float32, sinks)[2, 1].isnan().all(), "what never came is not hidden"


@pytest.mark.parametrize("T, heads, D", [(1, 1, 16), (37, 6, 24), (5, 64, 64), (70, 3, 90)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_learned_sinks_are_added_behind_attention(T, heads, D, dtype):
    logits, values = 3 * torch.randn(T, heads, 19, device=DEVICE), torch.randn(T, heads, 19, D, device=DEVICE)
    sinks = 3 * torch.randn(heads, device=DEVICE)
    logits[0], sinks[0] = logits[0] - 200, 200.0  # a sink that takes all
    attended = (logits.softmax(-1)[..., None] * values).sum(2).to(dtype)
    weights = logits.logsumexp(-1) * math.log2(math.e)
    found, expected = (add(attended, weights, sinks) for add in (learned_sinks.add_learned_sinks, reference.add_learned_sinks))
    assert found.dtype == expected.dtype == dtype
    exact = torch.stack([softmax_with_sinks(*each, sinks) for each in zip(logits, values)])
    bound = 2 * torch.finfo(dtype).eps * exact.abs() + 1e-6
    assert ((found.float() - exact).abs() <= bound + 1e-5 * exact.abs()).all() and not found[0, 0].any()
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
