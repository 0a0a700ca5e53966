# SPDX-License-Identifier: Apache-2.0
"""What SGLang may put into one prefill batch, and when its prefixes may begin to come."""

from __future__ import annotations

import math

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_freekv.retrieval import Scheduled


def mark_tables(scheduler, batch, *args, **kwargs) -> None:
    """BEFORE a batch is launched, on SGLang's schedule stream: what the scheduler wrote for it is written behind this point."""
    if batch.forward_mode.is_extend():
        retrieval = scheduler.token_to_kv_pool_allocator.get_kvcache().retrieval
        retrieval.scheduled = Scheduled(retrieval.transfers.mark(), batch.req_pool_indices)


def whole_pages(adder, req) -> None:
    """BEFORE a chunk of a long prompt is cut: reserve whole pages for the others, so that what is left is whole pages too.

    Only full pages have a place in the host pool; a chunk that ended within one could not be continued.
    """
    adder.rem_total_token_offset = adder.ceil_paged_tokens(math.ceil(adder.rem_total_token_offset))


def bounded_contexts(original, adder, req, *args, **kwargs):
    """AROUND the admission of a request: the contexts of a batch, prefix hits included, must fit the context buffers together."""
    pool = adder.token_to_kv_pool_allocator.get_kvcache()
    contexts = sum(other.extend_range.end for other in adder.can_run_list)
    if adder.can_run_list and contexts + len(req.full_untruncated_fill_ids) > pool.staging_tokens:
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)
