"""The layout of an extend, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_freekv.batch import ExtendBatch, Prefixes


@given(
    spans=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40)), min_size=1, max_size=6),
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
    staged = Prefixes.build(tokens, rows, prefixes, queries, page_size).look_up()

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
    assert batch.rows is rows and batch.page_table is table and batch.query_lens == queries
    assert batch.key_lens == batch.seq_lens.tolist() == [prefix + query for prefix, query in zip(prefixes, queries)]


@given(pages=st.integers(0, 7), over=st.integers(1, 16), page_size=st.integers(2, 17))
@settings(max_examples=50)
def test_a_prefix_that_is_not_whole_pages_is_refused(pages, over, page_size):
    prefix = pages * page_size + 1 + over % (page_size - 1)
    with pytest.raises(RuntimeError, match=f"prefix of {prefix} tokens, expected a multiple of the page size {page_size}$"):
        ExtendBatch.build(torch.tensor([1, 2]), *torch.ones(2, 2, 200, dtype=torch.int64), [0, prefix], [1, 1], page_size)
