# SPDX-License-Identifier: Apache-2.0
"""FreeKV's decode step and the extend that precedes it (paper sections 3 and 4).

One step of one layer waits for the last step's recall ahead, then runs on four streams (DESIGN.md, section A step):

- selection: score the candidates; plan; the correction's recall and the attention to the rest; plan ahead behind the merge.
- appends: append the new token. If it fills its page, digest and offload the page.
- main: find the corrected kv heads; behind plan and append, attend to the present pages; merge.
- transfers: recall ahead, beside the next layer.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch, ExtendBatch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.extend_plan import ExtendPlan
from sglang_freekv.kernels import Candidates, Misses, Reads
from sglang_freekv.kernels.reference_stamps import AHEAD, ATTENTION, CORRECTION
from sglang_freekv.memory_pool.recall_clock import RecallClock
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Handle, TransferStream
from sglang_freekv.policy import Policy

# Programs of a correction's recall. Attention waits for it, so it takes the larger share of the link from recalls ahead.
# Trials: benchmarks/results/bench_step-history.json.
CORRECTING_PROGRAMS = 64


def programs_ahead(requests: int) -> int:
    """Programs of a recall ahead.

    Eight fill the link if the computation leaves them processors (benchmarks/results/bench_recall.json). Above eight requests sixteen are
    faster (benchmarks/results/bench_step-history.json).
    """
    return 8 if requests <= 8 else 16


def plans_ahead_first(requests: int) -> bool:
    """Whether kv heads that are not corrected plan ahead before attention.

    With one or two requests most layers have no corrected kv head. Planning ahead then comes behind attention, which starts sooner.
    """
    return requests > 2


class ExtendAttention(Protocol):
    """Causal attention of new tokens over ``[prefix | new]``, for each request on its own."""

    def plan(self, query_lens: list[int], key_lens: list[int]) -> None:
        """Prepare for all layers of a batch. A request's queries are those of its last ``query_len`` positions."""

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """``[sum(query_lens), Hq, D]`` from ``queries`` of the same shape and ``keys``, ``values [sum(key_lens), H, D]``."""


class Recall(Protocol):
    """Copies missing units from the host pool to their slots, and leaves the list empty, as ``kernels.recall_pages`` does."""

    def __call__(
        self, host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int, closely: bool = False
    ) -> None: ...


class Retrieval:
    """The retrieval engine of one model: every layer here is a retrieval layer, numbered from 0.

    Args:
        config: page size, budget, sink and window.
        policy: digests and their scores, pooling, correction.
        store: host pool, digests, device cache, staging buffers and canary.
        selection: stream of scores, plans, the corrections' recalls and the attention to the rest.
        appends: stream of new tokens, and of the digest and the offload of a page that one of them fills.
        transfers: stream of recalls ahead, and of an extend's offload and staging.
        recall: copies missing units, by ``kernels.recall_pages`` or the copy engine.
        extend_attention: causal attention of the device.
    """

    def __init__(
        self,
        config: FreeKVConfig,
        policy: Policy,
        store: Store,
        selection: TransferStream,
        appends: TransferStream,
        transfers: TransferStream,
        recall: Recall,
        extend_attention: ExtendAttention,
    ) -> None:
        self.config, self.policy, self.store = config, policy, store
        self.selection, self.appends, self.transfers = selection, appends, transfers
        self.recall, self.extend_attention = recall, extend_attention
        self.host, self.digests, self.cache, self.canary = store.host, store.digests, store.cache, store.canary
        device = self.cache.layers[0].keys.device
        self.in_flight: list[list[Handle]] = [[] for _ in self.cache.layers]
        self.counts = torch.zeros(self.cache.num_rows, 3, dtype=torch.int64, device=device)
        units = self.cache.num_rows * self.cache.num_kv_heads * self.cache.num_attended
        self.misses_now = Misses.allocate(units, device)
        self.misses_ahead = [Misses.allocate(units, device) for _ in self.cache.layers]  # a plan fills one while a recall empties another
        self.clock = RecallClock(len(self.cache.layers), config.recall_timing, device) if config.recall_timing else None

    def decode(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, scale: float
    ) -> torch.Tensor:
        """One decode step of one layer. The host launches work and waits for none, so a CUDA graph can hold the step.

        Args:
            queries: ``[B, Hq, D]`` post-RoPE.
            keys, values: ``[B, H, D]`` of the new tokens.
            batch: rows, lengths and page table.
            scale: factor of the layer's attention logits.

        Returns:
            ``[B, Hq, D]`` attention output, in the dtype of the queries.
        """
        cache, policy, rows, seq_lens = self.cache.layers[layer], self.policy, batch.rows, batch.seq_lens
        digests, logits = self.digests.layers[layer], []
        self.complete_transfers(layer)

        def score() -> None:
            logits.append(policy.digests.score(queries, digests, batch, scale))

        def append() -> None:
            starts, filled = kernels.append_tokens(
                keys, values, rows, seq_lens, batch.page_table, cache.slot_pages, cache.keys, cache.values
            )
            policy.digests.write(cache.token_rows[0], starts, filled, digests)
            self._offload(layer, *cache.token_rows, starts, filled)

        self.selection.submit(score)
        appended = self.appends.submit(append)
        corrected = policy.needs_correction(queries, rows, cache.previous_queries, self.counts, self.cache.num_kv_heads)
        reads = Reads.allocate(*corrected.shape, self.cache.num_attended, corrected.device)
        attended, shares = (queries, cache.keys, cache.values, seq_lens, reads, scale), kernels.allocate_shares(queries, cache.keys, reads)

        def plan() -> None:
            self._plan(layer, logits[0], batch, corrected, reads)

        def correct() -> None:
            stamp = self._stamp(layer, CORRECTION)
            self.recall(self.host.layers[layer], self.misses_now, cache.keys, cache.values, CORRECTING_PROGRAMS, True, **stamp)
            kernels.attend_rest(*attended, shares)

        def verify() -> None:
            self._verify(layer, self.misses_now)

        def plan_rest() -> None:
            self._plan_rest(layer, logits.pop(), batch, corrected)
            self.in_flight[layer].append(self.transfers.submit(recall_ahead))

        def recall_ahead() -> None:
            programs, stamp = programs_ahead(len(rows)), self._stamp(layer, AHEAD)
            self.recall(self.host.layers[layer], self.misses_ahead[layer], cache.keys, cache.values, programs, **stamp)
            self._verify(layer, self.misses_ahead[layer])

        planned = self.selection.submit(plan)
        correction = self.selection.submit(correct)
        if self.canary is not None:
            self.selection.submit(verify)  # behind the correction, because attention waits for that
        appended.wait()
        planned.wait()
        kernels.attend_present(*attended, shares, **self._stamp(layer, ATTENTION))
        correction.wait()
        output = kernels.merge_shares(*shares, queries.dtype)
        self.in_flight[layer].append(self.selection.submit(plan_rest))
        return output

    def end_step(self, rows: torch.Tensor) -> None:
        """Join the side streams behind the last layer of a decode step of ``rows [B]``, and add up the stamps if recall is timed."""
        if self.clock is not None:
            self.clock.computed()
        self.complete_all_transfers()
        if self.clock is not None:
            self.clock.settle(rows)

    def prepare_extend(self, plan: ExtendPlan) -> None:
        """Begin an extend: wait for the last pass's work before rows and pages change hands, and start to stage the first layers' prefixes.

        Raises:
            RuntimeError: the contexts do not fit a staging buffer.
        """
        batch = plan.batch
        self.complete_all_transfers()
        self.store.staging.begin(sum(batch.key_lens), plan.prefixes, plan.behind)
        self.extend_attention.plan(batch.query_lens, batch.key_lens)
        self.counts[batch.rows] = 0

    def extend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ExtendBatch, scale: float
    ) -> torch.Tensor:
        """One extend of one layer: attend to ``[prefix | new]``, digest and offload the pages that are filled, and seed the rows.

        Args:
            queries: ``[T, Hq, D]`` post-RoPE.
            keys, values: ``[T, H, D]`` of the new tokens.
            batch: the extend batch that ``prepare_extend`` began.
            scale: factor of the layer's attention logits.

        Returns:
            ``[T, Hq, D]`` attention output.
        """
        context_keys, context_values = self.store.staging.context(layer)
        context_keys[batch.new_rows], context_values[batch.new_rows] = keys, values
        starts = batch.full_starts[:, None].expand(-1, self.cache.num_kv_heads)
        self.in_flight[layer].append(
            self.transfers.submit(lambda: self._offload(layer, context_keys, context_values, starts, batch.full_pages))
        )
        output = self.extend_attention(queries, context_keys, context_values, scale)
        self.policy.digests.write(context_keys, starts, batch.full_pages, self.digests.layers[layer])
        self._seed(layer, queries[batch.last_tokens], batch, context_keys, context_values, scale)
        return output

    def complete_transfers(self, layer: int) -> None:
        """Order the current stream behind the work that the last pass left in flight in ``layer``.

        A plan and a recall ahead own the slots and the slot table until then. A correction may recall the pages of an offload.
        """
        for handle in self.in_flight[layer]:
            handle.wait()
        self.in_flight[layer].clear()

    def complete_all_transfers(self) -> None:
        for layer in range(len(self.in_flight)):
            self.complete_transfers(layer)
        self.store.staging.complete()

    def row_counts(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, 3]`` int64 HITS, RECALLED and CORRECTED of ``rows [B]`` since their last extend."""
        return self.counts[rows]

    def _stamp(self, layer: int, kind: int) -> dict[str, torch.Tensor]:
        """Keyword arguments by which a kernel stamps its time; none unless recall is timed."""
        return {} if self.clock is None else {"stamp": self.clock.stamp(layer, kind)}

    def _offload(self, layer: int, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        kernels.offload_pages(keys, values, starts, host_pages, self.host.layers[layer])
        if self.canary is not None:
            self.canary.seal(layer, keys, values, starts, host_pages)

    def _verify(self, layer: int, recalled: Misses) -> None:
        if self.canary is not None:
            self.canary.verify_recalled(layer, recalled, self.cache.layers[layer].keys, self.cache.layers[layer].values)

    def _plan(self, layer: int, logits: torch.Tensor, batch: DecodeBatch, corrected: torch.Tensor, reads: Reads) -> None:
        """Write what this step attends to, and plan ahead for kv heads that are not corrected if ``plans_ahead_first``."""
        candidates, ahead_first = self._candidates(logits, batch), plans_ahead_first(len(batch.rows))
        misses = self.misses_now, self.misses_ahead[layer]
        kernels.plan_pages(candidates, corrected, self.cache.layers[layer].tables, reads, *misses, self.counts, ahead_first=ahead_first)

    def _plan_rest(self, layer: int, logits: torch.Tensor, batch: DecodeBatch, corrected: torch.Tensor) -> None:
        candidates, ahead_first = self._candidates(logits, batch), plans_ahead_first(len(batch.rows))
        misses = self.misses_ahead[layer]
        kernels.plan_rest(candidates, corrected, self.cache.layers[layer].tables, misses, self.counts, ahead_first=ahead_first)

    def _candidates(self, logits: torch.Tensor, batch: DecodeBatch) -> Candidates:
        config = self.config
        return Candidates(logits, batch.rows, batch.seq_lens, batch.page_table, config.pages, config.page_size, self.policy.pooling)

    def _seed(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: ExtendBatch,
        context_keys: torch.Tensor,
        context_values: torch.Tensor,
        scale: float,
    ) -> None:
        """Fill the rows with the pages of the first decode step, which the last tokens' ``queries [B, Hq, D]`` select."""
        cache = self.cache.layers[layer]
        logits = self.policy.digests.score(queries, self.digests.layers[layer], batch, scale)
        kernels.seed_slots(self._candidates(logits, batch), cache.tables)
        cache.previous_queries[batch.rows] = queries
        kernels.fill_pages(
            context_keys, context_values, batch.context_starts, batch.rows, batch.seq_lens, cache.slot_pages, cache.keys, cache.values
        )
