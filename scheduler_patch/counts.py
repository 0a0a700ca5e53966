# SPDX-License-Identifier: Apache-2.0
"""Counts of each request: they leave the device with a step's results, and reach the client in ``meta_info``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.utils import _async_d2h

from sglang_freekv.counts import RequestCounts
from sglang_freekv.kv_pool import pool_of
from sglang_freekv.memory_pool.recall_clock import RecallTimes
from sglang_freekv.scheduler_patch import registry
from sglang_freekv.scheduler_patch.held import Held

KEY = "freekv"


@dataclass
class StepCounts:
    """FreeKV's part of the results of one forward pass.

    Args:
        rows: ``[B, 4]`` counts of the batch's rows, as in ``RequestCounts.update``. They become a list when the first of them is read.
        decoded: whether it was a decode step.
        faults: the canary's faults, if there is a canary.
        held: the pages that its requests held at its launch, if there is a canary.
        recall: ``[3]`` int64 in the order of ``RecallTimes``, if recall is timed.
    """

    rows: torch.Tensor | list[list[int]]
    decoded: bool
    faults: torch.Tensor | None = None
    held: Held | None = None
    recall: torch.Tensor | None = None


def attach(result, worker, batch, *args, **kwargs) -> None:
    """AFTER the forward pass, on its stream: snapshot the rows' counts, the canary's faults and the time of recall."""
    if result.logits_output is not None:
        retrieval = pool_of(worker.model_runner.token_to_kv_pool).retrieval
        rows, decoded = batch.req_pool_indices, batch.forward_mode.is_decode()
        if retrieval.clock is not None and decoded and any(retrieval.in_flight):  # a step in a graph has ended already
            retrieval.end_step(rows)
        absent = retrieval.store.frames.tables.row_absent[rows]
        step = StepCounts(torch.column_stack([retrieval.row_counts(rows), absent]), decoded)
        if retrieval.canary is not None:
            retrieval.complete_all_transfers()  # without a graph, transfers may be in flight and a fault half written
            step.faults, step.held = retrieval.canary.faults.clone(), batch.freekv_held
        if retrieval.clock is not None:
            step.recall = retrieval.clock.snapshot()
        result.logits_output.freekv = step


def copy_to_cpu(result, *args, **kwargs) -> None:
    """BEFORE SGLang copies a step's results to the host under the overlap schedule: copy FreeKV's part too."""
    if (step := getattr(result.logits_output, KEY, None)) is not None:
        for name in ("rows", "faults", "recall"):
            if (tensor := getattr(step, name)) is not None:
                setattr(step, name, _async_d2h(tensor))


def collect(_, processor, i: int, req, logits_output) -> None:
    """AFTER SGLang has collected a request's custom info for one step: add the step to the counts of request and engine."""
    if (step := getattr(logits_output, KEY, None)) is None:
        return
    registry.prove(registry.STEP)
    pool = pool_of(processor.token_to_kv_pool_allocator.get_kvcache())
    if req.customized_info is None:
        req.customized_info = {}
    counts = req.customized_info.setdefault(KEY, RequestCounts(pool.config, pool.heads))
    if isinstance(step.rows, torch.Tensor):  # the batch's first request; without the overlap schedule the rows are on the device
        step.rows = step.rows.tolist()
        if step.recall is not None:
            pool.recall_times = RecallTimes(*step.recall.tolist())
    pool.totals.add(counts.update(tuple(step.rows[i]), req.seqlen, step.decoded))


def cached_on_the_host(details, *args) -> None:
    """AFTER SGLang has counted the tokens of a prefix hit by where they are: count those on the device as on the host."""
    if details is not None:
        details["host"] += details["device"]
        details["device"] = 0


class AccumulatedInfo(dict):
    """A request's custom info, as the tokenizer manager accumulates it.

    SGLang appends one item per token to each key, and slices the items of ``keys()`` by token. FreeKV's counts are a running total. Each
    replaces the last one, and its key is not among ``keys()`` and ``items()``.
    """

    def __init__(self) -> None:
        super().__init__({KEY: _Latest()})

    def keys(self):
        return super().keys() - {KEY}

    def items(self):
        return [(key, self[key]) for key in self.keys()]


class _Latest(dict):
    def extend(self, totals: list[dict[str, int]]) -> None:
        for total in totals:
            self.update(total or {})


def replace_accumulated(_, state, *args, **kwargs) -> None:
    """AFTER a request's state is made in the tokenizer manager: replace the dict that accumulates its custom info."""
    state.customized_info_accumulated = AccumulatedInfo()
