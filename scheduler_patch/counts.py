# SPDX-License-Identifier: Apache-2.0
"""Per-request counts: from the device with each step's results to ``meta_info``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.utils import _async_d2h

from sglang_freekv.counts import RequestCounts

KEY = "freekv"


@dataclass
class StepCounts:
    """Counts ``[B, 3]`` of the rows of one forward pass, a list as soon as they are looked at; whether it was a decode step; the canary's
    faults after it."""

    rows: torch.Tensor | list[list[int]]
    decoded: bool
    faults: torch.Tensor | None


def attach(result, worker, batch, *args, **kwargs) -> None:
    """AFTER the forward pass, on its stream: snapshot the rows' counts, and what the canary found, beside the logits."""
    if result.logits_output is not None:
        retrieval, faults = worker.model_runner.attn_backend.retrieval, None
        if retrieval.canary is not None:
            retrieval.complete_all_transfers()  # without a graph some may be under way, and a note half written
            faults = retrieval.canary.faults.clone()
        result.logits_output.freekv = StepCounts(retrieval.row_counts(batch.req_pool_indices), batch.forward_mode.is_decode(), faults)


def copy_to_cpu(result, *args, **kwargs) -> None:
    """BEFORE SGLang copies a step's results to the host under the overlap schedule: send ours along."""
    if (step := getattr(result.logits_output, KEY, None)) is not None:
        step.rows = _async_d2h(step.rows)
        step.faults = _async_d2h(step.faults) if step.faults is not None else None


def collect(_, processor, i: int, req, logits_output) -> None:
    """AFTER SGLang has collected a request's custom info for one step: account for it."""
    if (step := getattr(logits_output, KEY, None)) is None:
        return
    pool = processor.token_to_kv_pool_allocator.get_kvcache()
    if req.customized_info is None:
        req.customized_info = {}
    counts = req.customized_info.setdefault(KEY, RequestCounts(pool.config.page_size, pool.config.pages.total, pool.heads))
    if isinstance(step.rows, torch.Tensor):  # once a step: without the overlap schedule they are still on the device
        step.rows = step.rows.tolist()
    pool.totals.add(counts.update(tuple(step.rows[i]), req.seqlen, step.decoded))


def cached_on_the_host(details, *args) -> None:
    """AFTER SGLang has told where the tokens of a prefix hit come from: retrieval layers bring them from host memory."""
    if details is not None:
        details["host"] += details["device"]
        details["device"] = 0


class AccumulatedInfo(dict):
    """What the tokenizer manager has received of a request's custom info. Ours is a running total that replaces the last one
    instead of growing by an item per token, so it is no key to be sliced by token."""

    def __init__(self) -> None:
        super().__init__({KEY: _Latest()})

    def keys(self):
        return super().keys() - {KEY}


class _Latest(dict):
    def extend(self, totals: list[dict[str, int]]) -> None:
        for total in totals:
            self.update(total or {})


def replace_accumulated(_, state, *args, **kwargs) -> None:
    """AFTER a request's state is made in the tokenizer manager."""
    state.customized_info_accumulated = AccumulatedInfo()
