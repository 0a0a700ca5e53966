"""Counts of a step reach their requests, from wherever SGLang has left them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_freekv.config import FreeKVConfig
from sglang_freekv.counts import RequestCounts, RetrievalCounts
from sglang_freekv.scheduler_patch import counts


def test_counts_are_fetched_once_for_all_requests_of_a_step():
    class Once(torch.Tensor):
        fetched = 0

        def tolist(self):
            Once.fetched += 1
            return super().tolist()

    rows = torch.tensor([[5, 1, 0, 13], [7, 2, 3, 3], [9, 0, 0, 0]]).as_subclass(Once)
    output = SimpleNamespace(freekv=counts.StepCounts(rows, True, None))
    config = SimpleNamespace(page_size=8, pages=SimpleNamespace(total=4), cache_pages=4, attended_pages=4)
    pool = SimpleNamespace(config=config, heads=6, totals=RetrievalCounts())
    processor = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: SimpleNamespace(full_kv_pool=pool)))
    requests = [SimpleNamespace(customized_info=None, seqlen=100 + i) for i in range(3)]
    for i, request in enumerate(requests):
        counts.collect(None, processor, i, request, output)
    assert Once.fetched == 1
    found = [request.customized_info[counts.KEY].counts for request in requests]
    assert found == [RetrievalCounts(1, 6, 0, 6, 1), RetrievalCounts(1, 6, 3, 9, 2), RetrievalCounts(1, 6, 0, 9, 0)]
    assert [request.customized_info[counts.KEY][-1:][0]["resident_pages"] for request in requests] == [0, 10, 13]
    assert pool.totals == RetrievalCounts(3, 18, 3, 24, 3)


def test_a_context_with_more_absent_pages_than_slots_is_not_attended_to_in_full():
    config = FreeKVConfig(page_size=8, budget_tokens=512, sink_tokens=16, window_tokens=32, dense_below_tokens=1024)
    counted = RequestCounts(config, 6)
    for absent, attended in ((0, 100), (64, 100), (65, 64)):
        counted.update((0, 0, 0, absent), 800, True)
        assert counted[:][0]["attended_pages"] == attended


def test_the_page_of_a_token_that_has_no_kv_yet_does_not_count():
    counted = RequestCounts(FreeKVConfig(page_size=8), 6)
    for tokens, context, resident in ((16, 2, 0), (17, 2, 0), (18, 3, 1)):
        counted.update((0, 0, 0, 2), tokens, True)
        assert [counted[:][0][name] for name in ("context_pages", "resident_pages")] == [context, resident]


def test_a_running_total_is_no_list_of_tokens():
    """SGLang 0.5.23 copies the lists of a request's custom info to chunks of a stream that lack them."""
    accumulated = counts.AccumulatedInfo()
    accumulated["other"] = [1]
    accumulated.setdefault(counts.KEY, []).extend([{"corrected_heads": 1}, {"corrected_heads": 2}])
    assert dict(accumulated.items()) == {"other": [1]} and accumulated.keys() == {"other"}
    assert accumulated[counts.KEY] == {"corrected_heads": 2}
