"""The layout of an extend, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_freekv.batch import AbsentPrefixes, ExtendBatch, StagedPrefixes
from sglang_freekv.kernels.ragged import all_to_device

SPANS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 40)), min_size=1, max_size=6
)  # pages of prefix and new tokens, for each request


@given(
    spans=SPANS,
    page_size=st.integers(1, 17),
    spare=st.integers(0, 3),
)
@settings(max_examples=300)
def test_the_layout_of_an_extend(spans, page_size, spare):
    prefixes, queries = [pages * page_size for pages, _ in spans], [tokens for _, tokens in spans]
    width = max(prefix + query for prefix, query in zip(prefixes, queries)) // page_size + 1 + spare
    table = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(width)).view(-1, width) + 1
    rows = torch.arange(len(spans)) + 1
    batch = ExtendBatch.build(rows, table, -table, prefixes, queries, page_size)
    tokens = torch.zeros(len(spans) + 1, width * page_size, dtype=torch.int64)
    tokens[1:] = table.repeat_interleave(page_size, 1) * page_size + torch.arange(width * page_size) % page_size
    staged = StagedPrefixes.build(tokens, rows, prefixes, queries, page_size).look_up()

    tensors = ("context_starts", "host_pages", "starts", "new_rows", "full_pages", "full_starts", "last_tokens")
    expected, context = {name: [] for name in tensors}, 0
    for request, (prefix, query) in enumerate(zip(prefixes, queries)):
        expected["context_starts"].append(context)
        for token in range(prefix + query):
            if token < prefix and token % page_size == 0:
                expected["host_pages"].append(table[request, token // page_size])
                expected["starts"].append(context)
            if token >= prefix:
                expected["new_rows"].append(context)
                if token % page_size == page_size - 1:
                    expected["full_pages"].append(table[request, token // page_size])
                    expected["full_starts"].append(context - page_size + 1)
            context += 1
        expected["last_tokens"].append(len(expected["new_rows"]) - 1)
    built = vars(batch) | staged._asdict()
    assert {name: built[name].tolist() for name in expected} == expected
    assert not batch.in_place
    assert batch.rows is rows and batch.page_table is table and batch.query_lens == queries
    assert batch.key_lens == batch.seq_lens.tolist() == [prefix + query for prefix, query in zip(prefixes, queries)]


@given(
    spans=SPANS,
    page_size=st.integers(1, 17),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_the_layout_of_an_extend_in_place(spans, page_size, seed):
    """Contexts lie in frames, and only pages that were absent are staged: those that the batch gave a frame."""
    prefixes, queries = [pages * page_size for pages, _ in spans], [tokens for _, tokens in spans]
    width, generator = max(prefix + query for prefix, query in zip(prefixes, queries)) // page_size + 1, torch.Generator().manual_seed(seed)
    table, frames = (torch.randperm(len(spans) * width, generator=generator).view(-1, width).int() + start for start in (1, 0))
    given = frames.where(torch.rand(frames.shape, generator=generator) < 0.5, -1)
    rows = torch.arange(len(spans)) + 1
    batch = ExtendBatch.build(rows, table, frames, prefixes, queries, page_size, in_place=True)
    staged = AbsentPrefixes.build(table, given, prefixes, page_size).look_up()

    new_rows, full_pages, full_starts, absent = [], [], [], set()
    for request, (prefix, query) in enumerate(zip(prefixes, queries)):
        for token in range(prefix + query):
            page, start = table[request, token // page_size].item(), frames[request, token // page_size].item() * page_size
            if token >= prefix:
                new_rows.append(start + token % page_size)
                if token % page_size == page_size - 1:
                    full_pages.append(page)
                    full_starts.append(start)
            elif given[request, token // page_size] >= 0:
                absent.add((page, start))
    assert [x.tolist() for x in (batch.new_rows, batch.full_pages, batch.full_starts)] == [new_rows, full_pages, full_starts]
    assert batch.in_place and batch.frames is frames
    count, pages = len(absent), staged.host_pages.tolist()
    assert set(zip(pages[:count], staged.starts.tolist())) == absent and pages[count:] == [-1] * (sum(prefixes) // page_size - count)


@given(pages=st.integers(0, 7), over=st.integers(1, 16), page_size=st.integers(2, 17))
@settings(max_examples=50)
def test_a_prefix_that_is_not_whole_pages_is_refused(pages, over, page_size):
    prefix = pages * page_size + 1 + over % (page_size - 1)
    with pytest.raises(RuntimeError, match=f"prefix of {prefix} tokens, expected a multiple of the page size {page_size}$"):
        ExtendBatch.build(torch.tensor([1, 2]), *torch.ones(2, 2, 200, dtype=torch.int64), [0, prefix], [1, 1], page_size)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(max_examples=50)
def test_tensors_that_travel_together_stay_apart_and_aligned(lengths):
    tensors = [torch.arange(length) + 10 * index for index, length in enumerate(lengths)]
    arrived = all_to_device(torch.device("cpu"), *tensors)
    assert [tensor.tolist() for tensor in arrived] == [tensor.tolist() for tensor in tensors]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in arrived)
