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
    pool.residency.note_requests(used, _held_pages(allocator, scheduler.tree_cache))
    if batch.forward_mode.is_extend():
        pool.planner.note_tables(batch.req_pool_indices)


def whole_pages(adder, req) -> None:
    """BEFORE a chunk of a long prompt is cut: round the tokens reserved for other requests to whole pages, so that the rest is whole pages.

    Only full pages have a place in the host pool, so a chunk that ends within a page could not be continued.
    """
    budget, name = (adder.memory_budget, "total_offset") if releases.has("prefill budget") else (adder, "rem_total_token_offset")
    setattr(budget, name, budget.ceil_paged_tokens(math.ceil(getattr(budget, name))))


def bounded_contexts(original, adder, req, *args, **kwargs):
    """AROUND the admission of a request: the contexts of a batch, prefix hits included, must fit frames, or one staging buffer together."""
    pool = adder.token_to_kv_pool_allocator.get_kvcache()
    contexts = sum(_context_end(other) for other in adder.can_run_list)
    staged = contexts + len(req.full_untruncated_fill_ids) <= pool.staging_tokens
    if adder.can_run_list and not staged and not _fits_frames(adder, req, pool):
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


def _fits_frames(adder, req, pool) -> bool:
    """Whether the extend of a batch with ``req`` will surely be in place. Its own prefix counts, because the tree may give it up yet."""
    allocator = adder.token_to_kv_pool_allocator
    new = sum(-(-_new_tokens(other) // allocator.page_size) for other in adder.can_run_list)
    own = -(-len(req.full_untruncated_fill_ids) // allocator.page_size)
    running = len(adder.running_batch.reqs) if adder.running_batch is not None else 0
    rows = running + len(adder.can_run_list) + 1
    return pool.residency.fits(_held_pages(allocator, adder.tree_cache) + new + own, rows)


def _held_pages(allocator, tree) -> int:
    """Host pages that requests have, together: those that are neither free nor the prefix cache's to evict."""
    return -(-(allocator.size - allocator.available_size() - tree.evictable_size()) // allocator.page_size)


def _context_end(req) -> int:
    """Tokens of the request's context behind the chunk that it is admitted with."""
    return req.extend_end if releases.has("extend end") else req.extend_range.end


def _new_tokens(req) -> int:
    """Tokens of the chunk that the request is admitted with."""
    return req.extend_end - req.prefix_len if releases.has("extend end") else req.extend_range.length
