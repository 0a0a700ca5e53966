# SPDX-License-Identifier: Apache-2.0
"""Engine: the pools, streams and lists that all passes of all retrieval layers share, and the moves between pools."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kernels import Candidates, Misses, Turn
from sglang_freekv.kernels.extend import ExtendAttention
from sglang_freekv.kernels.kv import KV
from sglang_freekv.memory_pool.digest_pool import keys_to_digest
from sglang_freekv.memory_pool.recall_clock import RecallClock
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Handle, Streams
from sglang_freekv.policy import Policy


class Recall(Protocol):
    """Copies missing units from the host pool to their slots, and leaves the list empty, as ``kernels.recall_pages`` does."""

    def __call__(
        self, host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int, closely: bool = False
    ) -> None: ...


class Engine:
    """What decode steps and extends are made of. Every layer here is a retrieval layer, numbered from 0.

    Args:
        config: page size, budget, sink and window.
        policy: digests and their scores, pooling, correction.
        store: host pool, digests, device cache, staging buffers and canary.
        streams: the side streams.
        recall: copies missing units, by ``kernels.recall_pages`` or the copy engine.
        extend_attention: causal attention of the device.
    """

    def __init__(
        self, config: FreeKVConfig, policy: Policy, store: Store, streams: Streams, recall: Recall, extend_attention: ExtendAttention
    ) -> None:
        self.config, self.policy, self.store, self.streams = config, policy, store, streams
        self.recall, self.extend_attention = recall, extend_attention
        self.host, self.digests, self.cache, self.canary = store.host, store.digests, store.cache, store.canary
        device = self.cache.layers[0].keys.device
        self.in_flight: list[list[Handle]] = [[] for _ in self.cache.layers]
        self.counts = torch.zeros(self.cache.num_rows, 3, dtype=torch.int64, device=device)
        units = self.cache.num_rows * self.cache.num_kv_heads * min(self.cache.num_attended, self.cache.num_slots)
        self.misses_now = Misses.allocate(units, device)
        self.misses_ahead = [Misses.allocate(units, device) for _ in self.cache.layers]  # a plan fills one while a recall empties another
        self.clock = RecallClock(len(self.cache.layers), config.recall_timing, device) if config.recall_timing else None

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
        self.store.in_place.complete()

    def row_counts(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, 3]`` int64 HITS, RECALLED and CORRECTED of ``rows [B]`` since their last extend."""
        return self.counts[rows]

    def candidates(self, logits: torch.Tensor, batch: DecodeBatch) -> Candidates:
        """What a plan selects among by the scores ``logits [B, Hq, P]``."""
        config = self.config
        where = batch.rows, batch.seq_lens, batch.page_table, batch.frames
        how = self.policy.pooling, config.hysteresis, config.selects_on_turn
        return Candidates(logits, *where, config.pages, config.page_size, *how)

    def turn(self, layer: int, batch: DecodeBatch) -> Turn | None:
        """What tells which kv heads of ``layer`` select, if they do so on turn only."""
        if not self.config.selects_on_turn:
            return None
        selects = torch.empty(len(batch.rows), self.cache.num_kv_heads, dtype=torch.bool, device=batch.rows.device)
        return Turn(batch.seq_lens, batch.frames, self.config.pages, self.config.page_size, self.cache.layers[layer].tables, selects)

    def standing(self, layer: int, batch: DecodeBatch, logits: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, P]`` float32 scores by which kv heads keep the pages that they attend to by the tables: 1 for these, else 0.

        A kv head that attends to more than the budget does so in full. It keeps its scores ``logits``, for the step that has to choose.
        """
        marked = self.cache.layers[layer].tables.marked(batch.rows, batch.page_table.shape[1])
        group, in_full = logits.shape[1] // marked.shape[1], marked.sum(-1) > self.config.pages.total
        stands = marked.to(logits.dtype).repeat_interleave(group, 1)
        return stands.where(~in_full.repeat_interleave(group, 1)[..., None], logits)

    def offload(self, layer: int, kv: KV, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Copy full pages to the host pool, and let the canary write their checksums. Arguments are as in ``kernels.offload_pages``."""
        with_scales = self.host.scales_with(layer, kv.scales)
        kernels.offload_pages(kv.keys, kv.values, starts, host_pages, self.host.layers[layer], **with_scales)
        if self.canary is not None:
            self.canary.seal(layer, kv, starts, host_pages)

    def digest(self, layer: int, kv: KV, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Write the digests of full pages, of keys as attention sees them. Arguments are as in ``keys_to_digest``."""
        digests = self.digests.layers[layer]
        keys, starts = keys_to_digest(kv, starts, host_pages, self.config.page_size, digests.dtype)
        self.policy.digests.write(keys, starts, host_pages, digests)

    def verify(self, layer: int, recalled: Misses) -> None:
        """Let the canary examine units that were recalled."""
        if self.canary is not None:
            self.canary.verify_recalled(layer, recalled, self.cache.layers[layer].kv)

    def stamp(self, layer: int, kind: int) -> dict[str, torch.Tensor]:
        """Keyword arguments by which a kernel stamps its time; none unless recall is timed."""
        return {} if self.clock is None else {"stamp": self.clock.stamp(layer, kind)}
