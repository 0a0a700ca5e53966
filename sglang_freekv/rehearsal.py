# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: what a server will do on a GPU, in small, so that all of its kernels are compiled before the first decode graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_freekv.batch import DecodeBatch
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.retrieval import Retrieval


def compile_all(retrieval: Retrieval, batch: DecodeBatch, req_to_token: torch.Tensor) -> None:
    """Compile, in parallel, the kernels of all that a server does whose largest batch is ``batch``. Arguments are as of ``rehearse``."""
    from sglang_freekv.kernels.compilation import compile_in_parallel  # Triton needs a GPU

    compile_in_parallel(lambda: rehearse(retrieval, batch, req_to_token))


def rehearse(retrieval: Retrieval, batch: DecodeBatch, req_to_token: torch.Tensor) -> None:
    """One extend, and decode steps of all kinds of batches up to ``batch``, all of padding in the first layer.

    Under ``compile_in_parallel`` no kernel of ours runs. PyTorch's and FlashInfer's do; they write to row 0, which is padding.

    Args:
        batch: the largest batch; its tensors have the types of every later one.
        req_to_token: ``[R, context]`` the scheduler's table.
    """
    previous = retrieval.cache.layers[0].previous_queries
    (_, query_heads, dim), heads = previous.shape, retrieval.cache.num_kv_heads
    scale, rows = dim**-0.5, torch.zeros_like(batch.rows)

    def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fused = torch.zeros(count, query_heads + 2 * heads, dim, dtype=previous.dtype, device=rows.device)
        queries, keys, values = fused.split([query_heads, heads, heads], 1)
        return queries, keys, values

    for size in _batch_sizes(len(rows)):
        part = DecodeBatch(rows[:size], batch.seq_lens[:size], batch.page_table[:size])
        retrieval.decode(0, *tokens(size), part, scale)
        retrieval.end_step(part.rows)
    page = retrieval.config.page_size
    plan = ExtendPlanner(retrieval.streams.transfers, page).plan(rows[:1], batch.page_table[:1], [page], [page], req_to_token)
    retrieval.prepare_extend(plan)
    retrieval.extend(0, *tokens(page), plan.batch, scale)
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
