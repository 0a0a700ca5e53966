# SPDX-License-Identifier: Apache-2.0
"""FreeKV's decode step and the extend that precedes it (paper sections 3 and 4).

One step of one layer: finish last step's recall, score the pages on the selection stream, and plan there a correction of the kv heads
whose query is not like the last one, and the next step of the others. Beside that append the new token, and offload the page that it fills.
Then attend to what is there; beside that the correction's recall, and behind it the attention to the rest, to be merged. Behind the attention
plan what is left of the next step; the transfer stream recalls what that wants beside the next layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch, ExtendBatch, Prefixes
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kernels import Misses, Reads
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Handle, TransferStream
from sglang_freekv.policy import Policy

CORRECTING_PROGRAMS = 64  # of a recall that the computation waits for: the larger share of the link


def programs_ahead(requests: int) -> int:
    """Programs of a recall beside the computation: 8 fill the link, if the computation leaves them room on as many processors."""
    return 8 if requests <= 8 else 16


def plans_early(requests: int) -> bool:
    """Whether the next step is planned before this one's attention. Of few kv heads often none turned: then attention need not wait."""
    return requests > 2


class ExtendAttention(Protocol):
    """Causal attention of new tokens over ``[prefix | new]``, request after request."""

    def plan(self, query_lens: list[int], key_lens: list[int]) -> None:
        """Prepare for a batch; a request's queries are its last ``query_len`` positions."""

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """``[sum(query_lens), Hq, D]`` from queries of that shape and keys, values ``[sum(key_lens), H, D]``."""


class Recall(Protocol):
    """Brings missing units from the host pool to their slots, and leaves the list empty."""

    def __call__(
        self, host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int, closely: bool = False
    ) -> None: ...


class Scheduled(NamedTuple):
    """What the scheduler has written for the next extend; all of it is there behind ``written``.

    Args:
        rows: ``[B]`` rows of its requests in the scheduler's tables.
    """

    written: Handle
    rows: torch.Tensor


class Retrieval:
    """The retrieval engine of one model: every layer here is a retrieval layer, numbered from 0.

    Args:
        config: budget, sink and window.
        policy: digests and their scores, pooling, correction.
        store: host pool, digests and device cache.
        selection: the stream of scores, plans, corrections' recall and the attention to what it brings.
        appends: the stream of new tokens, and of the digest and the offload of a page that one fills.
        transfers: the stream of recall ahead, and of an extend's offload and prefix staging.
        recall: how missing pages come.
        extend_attention: of the device.
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
        self.settled: Handle | None = None  # of all passes but the last, if that is a graph and fills no page
        self.scheduled: Scheduled | None = None  # for the next pass
        self.counts = torch.zeros(self.cache.num_rows, 3, dtype=torch.int64, device=device)
        units = self.cache.num_rows * self.cache.num_kv_heads * self.cache.num_attended
        self.corrected = Misses.allocate(units, device)
        self.ahead = [Misses.allocate(units, device) for _ in self.cache.layers]  # one is filled while the last one is recalled

    def decode(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, scale: float
    ) -> torch.Tensor:
        """One decode step of one layer; launches work and waits for none, so that a CUDA graph can hold it.

        Args:
            queries: ``[B, Hq, D]`` post-RoPE.
            keys, values: ``[B, H, D]`` of the new tokens.

        Returns:
            ``[B, Hq, D]`` attention output.
        """
        cache, policy, rows, seq_lens = self.cache.layers[layer], self.policy, batch.rows, batch.seq_lens
        digests, logits = self.digests.layers[layer], []
        self.settled = None
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
        turned = policy.needs_correction(queries, rows, cache.previous_queries, self.counts, self.cache.num_kv_heads)
        reads = Reads.allocate(*turned.shape, self.cache.num_attended, turned.device)
        attended, shares = (queries, cache.keys, cache.values, seq_lens, reads, scale), kernels.allocate_shares(queries, cache.keys, reads)

        def plan() -> None:
            self._plan(layer, logits[0], batch, turned, reads)

        def correct() -> None:
            self.recall(self.host.layers[layer], self.corrected, cache.keys, cache.values, CORRECTING_PROGRAMS, True)
            kernels.attend_rest(*attended, shares)

        def verify() -> None:
            self._verify(layer, self.corrected)

        def plan_rest() -> None:
            self._plan_rest(layer, logits.pop(), batch, turned)
            self.in_flight[layer].append(self.transfers.submit(recall_ahead))

        def recall_ahead() -> None:
            self.recall(self.host.layers[layer], self.ahead[layer], cache.keys, cache.values, programs_ahead(len(rows)))
            self._verify(layer, self.ahead[layer])

        planned = self.selection.submit(plan)
        corrected = self.selection.submit(correct)
        if self.canary is not None:
            self.selection.submit(verify)  # not sooner: the computation waits for the correction
        appended.wait()
        planned.wait()
        kernels.attend_present(*attended, shares)
        corrected.wait()
        output = kernels.merge_shares(*shares, queries.dtype)
        self.in_flight[layer].append(self.selection.submit(plan_rest))
        return output

    def prepare_replay(self, fills_page: bool) -> None:
        """Before a decode graph is replayed: what passes without one left in flight is over (a graph leaves nothing).

        Args:
            fills_page: whether a request's page is full with this step. Then it is offloaded, and may be in the radix tree before it is.
        """
        self.complete_all_transfers()
        self.settled = None if fills_page else self.transfers.mark()

    def prepare_extend(self, batch: ExtendBatch, prefixes: Callable[[], Prefixes]) -> None:
        """Begin an extend: what the last forward pass left in flight is over before its rows and pages change hands, and the
        first layers' prefixes are on their way; if the last pass is a graph that cannot touch them, beside that graph.

        Args:
            prefixes: lays them out, from the scheduler's tables.
        """
        self.complete_all_transfers()
        behind = None if self.settled is None or self.scheduled is None else (self.settled, self.scheduled.written)
        self.settled = self.scheduled = None
        self.store.staging.begin(sum(batch.key_lens), prefixes, behind)
        self.extend_attention.plan(batch.query_lens, batch.key_lens)
        self.counts[batch.rows] = 0

    def extend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ExtendBatch, scale: float
    ) -> torch.Tensor:
        """Causal attention of new tokens over ``[prefix | new]``; stores the pages they fill and seeds the rows for decoding.

        Args:
            queries: ``[T, Hq, D]`` post-RoPE.
            keys, values: ``[T, H, D]`` of the new tokens.

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
        """Wait for what the last forward pass of ``layer`` left in flight: a plan and a recall, which own the slots and the slot table
        until then, or an offload, which a correction may read back."""
        for handle in self.in_flight[layer]:
            handle.wait()
        self.in_flight[layer].clear()

    def complete_all_transfers(self) -> None:
        for layer in range(len(self.in_flight)):
            self.complete_transfers(layer)
        self.store.staging.complete()

    def row_counts(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, 3]`` hits, recalled and corrected of ``rows [B]`` since their last extend."""
        return self.counts[rows]

    def _offload(self, layer: int, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        kernels.offload_pages(keys, values, starts, host_pages, self.host.layers[layer])
        if self.canary is not None:
            self.canary.seal(layer, keys, values, starts, host_pages)

    def _verify(self, layer: int, recalled: Misses) -> None:
        if self.canary is not None:
            self.canary.verify_recalled(layer, recalled, self.cache.layers[layer].keys, self.cache.layers[layer].values)

    def _plan(self, layer: int, logits: torch.Tensor, batch: DecodeBatch, turned: torch.Tensor, reads: Reads) -> None:
        """Write down what this step attends to, and plan of the next one what need not wait."""
        kernels.plan_pages(
            *self._where(logits, batch, turned),
            *self._tables(layer),
            reads,
            self.corrected,
            self.ahead[layer],
            self.counts,
            self.config.page_size,
            self.policy.pooling,
        )

    def _plan_rest(self, layer: int, logits: torch.Tensor, batch: DecodeBatch, turned: torch.Tensor) -> None:
        kernels.plan_rest(
            *self._where(logits, batch, turned),
            *self._tables(layer),
            self.ahead[layer],
            self.counts,
            self.config.page_size,
            self.policy.pooling,
        )

    def _where(self, logits: torch.Tensor, batch: DecodeBatch, turned: torch.Tensor) -> tuple:
        """What both plans go by."""
        return logits, batch.rows, batch.seq_lens, batch.page_table, self.config.pages, turned, plans_early(len(batch.rows))

    def _tables(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.layers[layer].slot_pages, self.cache.layers[layer].attended

    def _seed(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: ExtendBatch,
        context_keys: torch.Tensor,
        context_values: torch.Tensor,
        scale: float,
    ) -> None:
        """Fill the rows for the first decode step, selected by the last tokens' ``queries [B, Hq, D]``."""
        cache, config = self.cache.layers[layer], self.config
        logits = self.policy.digests.score(queries, self.digests.layers[layer], batch, scale)
        kernels.seed_slots(
            logits,
            batch.rows,
            batch.seq_lens,
            config.pages,
            cache.slot_pages,
            cache.attended,
            config.page_size,
            self.policy.pooling,
        )
        cache.previous_queries[batch.rows] = queries
        kernels.fill_pages(
            context_keys, context_values, batch.context_starts, batch.rows, batch.seq_lens, cache.slot_pages, cache.keys, cache.values
        )
