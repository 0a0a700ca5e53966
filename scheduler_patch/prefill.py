# SPDX-License-Identifier: Apache-2.0
"""Bounds who runs and SGLang's prefill batches, and says before a batch which requests have which rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_freekv import releases
from sglang_freekv.kv_pool import full_allocator, pool_of
from sglang_freekv.residency import NOBODY
from sglang_freekv.scheduler_patch.held import Held

FIRST_TO_GIVE_WAY = 1 << 30  # numbers of requests without a row, above all rows: of two rows with equally many pages, the higher gives way


def mark_tables(scheduler, batch, *args, **kwargs) -> None:
    """BEFORE a batch is launched, on SGLang's schedule stream: mark the point at which its rows of ``req_to_token`` are written.

    Rows that have become free since the last batch have no request any more. Of all pages that are not free, those that the prefix cache
    may evict have none either. With a canary, the batch keeps the pages of its requests until its faults are read.
    """
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    pool, extends = pool_of(allocator.get_kvcache()), batch.forward_mode.is_extend()
    if pool.store.canary is not None:
        batch.freekv_held = Held.at_launch(batch, rows.req_to_token, pool.page_size)
    numbers, new, used = batch.req_pool_indices_cpu.tolist(), NOBODY, pool.residency.lending.promised.keys()
    if extends:
        new = _new_requests(pool, rows, batch.reqs, numbers)
        pool.planner.note_tables(batch.req_pool_indices)
    if new or len(used) != rows.size - len(rows.free_slots):  # else they are those of before
        used = set(range(1, rows.size + 1)).difference(rows.free_slots)
        for row in pool.owners.keys() - used:
            del pool.owners[row]  # or an ended request would stay in memory until its row is taken again
    lengths = list(zip(numbers, batch.seq_lens_cpu.tolist()))
    pool.residency.note_requests(used, _held_pages(allocator, scheduler.tree_cache), lengths, new)


def _new_requests(pool, rows, requests, numbers: list[int]) -> dict[int, int]:
    """Row and longest context of each request of an extend whose first pass this is. A chunked prompt keeps its row."""
    new, owners = {}, pool.owners
    for request, row, generation in zip(requests, numbers, rows.req_generation[numbers].tolist()):
        if owners.get(row) != (request, generation):  # a request that was retracted may come back to its row
            owners[row], new[row] = (request, generation), _longest_context(request, pool)
    return new


def whole_pages(adder, req) -> None:
    """BEFORE a chunk of a long prompt is cut: round the tokens reserved for other requests to whole pages, so that the rest is whole pages.

    Only full pages have a place in the host pool, so a chunk that ends within a page could not be continued.
    """
    budget, name = (adder.memory_budget, "total_offset") if releases.has("prefill budget") else (adder, "rem_total_token_offset")
    setattr(budget, name, budget.ceil_paged_tokens(math.ceil(getattr(budget, name))))


def bounded_contexts(original, adder, req, *args, **kwargs):
    """AROUND the admission of a request: everyone who runs is promised frames, and the contexts of a batch have room.

    They must be in frames, or fit one staging buffer together, prefix hits included. Coded KV is decoded to room of that size, so there
    all must fit it. Whoever would be alone is let in.
    """
    pool = pool_of(adder.token_to_kv_pool_allocator.get_kvcache())
    free = set(adder.tree_cache.req_to_token_pool.free_slots)
    rows = {id(request): row for row, (request, _) in pool.owners.items() if row not in free}
    if not _is_promised(adder, req, pool, rows):
        # 0.5.17 takes the first for full until a request leaves, so one must run
        return AddReqResult.NO_TOKEN if adder.running_batch is not None and adder.running_batch.reqs else AddReqResult.OTHER
    contexts = sum(_context_end(other) for other in adder.can_run_list) + len(req.full_untruncated_fill_ids)
    in_frames = not pool.config.is_coded and _stays_whole(adder, req, pool, rows, free)
    if adder.can_run_list and contexts > pool.staging_tokens and not in_frames:
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


def _is_promised(adder, req, pool, rows: Mapping[int, int]) -> bool:
    """Whether ``req`` can be promised frames beside those who have ``rows``, by the id of their request, and the batch."""
    lending, page_size = pool.residency.lending, adder.token_to_kv_pool_allocator.page_size
    longest = [-(-_longest_context(other, pool) // page_size) for other in (*adder.can_run_list, req) if id(other) not in rows]
    others = [lending.promised[row] for row in rows.values()] + [lending.promise(pages) for pages in longest[:-1]]
    return not others or lending.admits(others, longest[-1])


def _stays_whole(adder, req, pool, rows: Mapping[int, int], free: set[int]) -> bool:
    """Whether the extend of a batch with ``req`` will surely be in place. Its own prefix counts, because the tree may give it up yet."""
    allocator, batch = adder.token_to_kv_pool_allocator, adder.can_run_list
    contexts = [(id(other), _context_end(other)) for other in batch] + [(id(req), len(req.full_untruncated_fill_ids))]
    pages = {rows.get(key, FIRST_TO_GIVE_WAY + place): -(-tokens // allocator.page_size) for place, (key, tokens) in enumerate(contexts)}
    new = sum(-(-_new_tokens(other) // allocator.page_size) for other in batch)
    held = _held_pages(allocator, adder.tree_cache) + new + -(-len(req.full_untruncated_fill_ids) // allocator.page_size)
    return pool.residency.lending.keeps_whole(pages, held, free)


def _held_pages(allocator, tree) -> int:
    """Host pages that requests have, together: those that are neither free nor the prefix cache's to evict."""
    full = full_allocator(allocator)
    return -(-(full.size - full.available_size() - tree.evictable_size()) // full.page_size)


def _longest_context(req, pool) -> int:
    """Tokens of the request's context at its end. A staging buffer is for the longest context of all.

    One that asks for no token has the first one in a pass that is launched before its end is known, as any other.
    """
    answer = req.sampling_params.max_new_tokens
    return pool.staging_tokens if answer is None else min(pool.staging_tokens, len(req.origin_input_ids) + max(1, answer))


def _context_end(req) -> int:
    """Tokens of the request's context behind the chunk that it is admitted with."""
    return req.extend_end if releases.has("extend end") else req.extend_range.end


def _new_tokens(req) -> int:
    """Tokens of the chunk that the request is admitted with."""
    return req.extend_end - req.prefix_len if releases.has("extend end") else req.extend_range.length
