# SPDX-License-Identifier: Apache-2.0
"""Bounds SGLang's prefill batches, and says when the prefixes of a batch may be staged."""

from __future__ import annotations

import math

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_freekv import releases


def mark_tables(scheduler, batch, *args, **kwargs) -> None:
    """BEFORE a batch is launched, on SGLang's schedule stream: mark the point at which its rows of ``req_to_token`` are written.

    Rows that have become free since the last batch have no request any more. Of all pages that are not free, those that the prefix cache
    may evict have none either.
    """
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    pool, used = allocator.get_kvcache(), set(range(1, rows.size + 1)).difference(rows.free_slots)
    held = allocator.size - allocator.available_size() - scheduler.tree_cache.evictable_size()
    pool.residency.note_requests(used, -(-held // allocator.page_size))
    if batch.forward_mode.is_extend():
        pool.planner.note_tables(batch.req_pool_indices)


def whole_pages(adder, req) -> None:
    """BEFORE a chunk of a long prompt is cut: round the tokens reserved for other requests to whole pages, so that the rest is whole pages.

    Only full pages have a place in the host pool, so a chunk that ends within a page could not be continued.
    """
    budget, name = (adder.memory_budget, "total_offset") if releases.has("prefill budget") else (adder, "rem_total_token_offset")
    setattr(budget, name, budget.ceil_paged_tokens(math.ceil(getattr(budget, name))))


def bounded_contexts(original, adder, req, *args, **kwargs):
    """AROUND the admission of a request: the contexts of a batch, prefix hits included, must fit one staging buffer together."""
    pool = adder.token_to_kv_pool_allocator.get_kvcache()
    contexts = sum(_context_end(other) for other in adder.can_run_list)
    if adder.can_run_list and contexts + len(req.full_untruncated_fill_ids) > pool.staging_tokens:
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


def _context_end(req) -> int:
    """Tokens of the request's context behind the chunk that it is admitted with."""
    return req.extend_end if releases.has("extend end") else req.extend_range.end
