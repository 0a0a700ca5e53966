"""What an idle server checks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_freekv.scheduler_patch.observe import CHECKED_PAGES, Observer


def test_a_check_draws_pages_and_leaves_the_random_numbers_of_sampling_alone():
    checked = []
    store = SimpleNamespace(canary=None, check_integrity=lambda pages, policy: checked.append(pages))
    pool = SimpleNamespace(
        store=store,
        device="cpu",
        retrieval=SimpleNamespace(complete_all_transfers=lambda: None, policy=None),
        held_pages=lambda allocator: torch.arange(1000, 2000),
    )
    allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(full_kv_pool=pool))
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, req_to_token_pool=None, metrics_reporter=SimpleNamespace(enable_metrics=False)
    )
    observer, before = Observer(scheduler), torch.get_rng_state()
    for _ in range(2):
        observer.check()
    assert torch.equal(torch.get_rng_state(), before)
    first, second = checked
    assert len(first.unique()) == len(first) == CHECKED_PAGES and first.min() >= 1000 and not torch.equal(first, second)
