# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: what a server will do on a GPU, in small, so that all of its kernels are compiled before it is ready."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_freekv.batch import DecodeBatch
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.residency import Residency
from sglang_freekv.retrieval import Retrieval


def compile_all(
    retrieval: Retrieval, residency: Residency, requests: int, pages: int, *, learned_sinks: torch.Tensor | None = None
) -> None:
    """Compile, in parallel, the kernels of all that a server does. Arguments are as of ``rehearse``."""
    from sglang_freekv.kernels.compilation import compile_in_parallel  # Triton needs a GPU

    compile_in_parallel(lambda: rehearse(retrieval, residency, requests, pages, learned_sinks=learned_sinks))


def rehearse(retrieval: Retrieval, residency: Residency, requests: int, pages: int, *, learned_sinks: torch.Tensor | None = None) -> None:
    """Each way to begin a pass, one extend, a refill of no page, and decode steps of many sizes, all of padding in the first layer.

    Under ``compile_in_parallel`` no kernel of ours runs. PyTorch's and those of extend attention do; they write to row 0, which is padding.

    Args:
        requests: B of the largest batch.
        pages: P of every page table.
        learned_sinks: ``[Hq]`` as models have them that do.
    """
    previous = retrieval.cache.layers[0].previous_queries
    (_, query_heads, dim), heads = previous.shape, retrieval.cache.num_kv_heads
    scale, device = dim**-0.5, residency.req_to_token.device
    padding = torch.zeros(requests, dtype=torch.int64, device=device)  # SGLang's types of rows and lengths
    page_table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
    page = retrieval.config.page_size
    frames = torch.full_like(page_table, -1)
    begun = padding, padding, page_table, frames
    residency.frames.lend_all()
    residency.begin_decode(*begun, 0)
    for in_place in (True, False):
        residency.begin_extend(*begun, padding.int(), [], in_place=in_place)

    def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fused = torch.zeros(count, query_heads + 2 * heads, dim, dtype=previous.dtype, device=device)
        queries, keys, values = fused.split([query_heads, heads, heads], 1)
        return queries, keys, values

    for size in _batch_sizes(requests):
        batch = DecodeBatch(padding[:size], padding[:size] + 1, page_table[:size], frames[:size])
        retrieval.decode(0, *tokens(size), batch, scale, learned_sinks=learned_sinks)
        retrieval.end_step(batch.rows)
    planner = ExtendPlanner(retrieval.streams.transfers, page)
    given = frames[:1].clone()
    plan = planner.plan(padding[:1], page_table[:1], frames[:1], [page], [page], residency.req_to_token, given=given)
    retrieval.prepare_extend(plan)
    retrieval.extend(0, *tokens(page), plan.batch, scale, learned_sinks=learned_sinks)
    retrieval.refill(page_table[:1], given)
    retrieval.complete_all_transfers()


def _batch_sizes(most: int) -> Iterator[int]:
    """Sizes of batches up to ``most``, close enough that kernels of no size in between differ from those of both neighbours."""
    yield most
    power = 1
    while power < most:
        yield power
        if power + power // 2 < most and power > 1:
            yield power + power // 2
        power *= 2
