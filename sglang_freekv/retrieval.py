"""FreeKV's decode step and the extend that precedes it (paper sections 3 and 4).

One step of one layer: finish last step's recall, append the new token, correct the kv heads whose query turned, attend,
and behind the attention offload the page that is full, and select and recall for the next step.
"""

from __future__ import annotations

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch, ExtendBatch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Handle, TransferStream
from sglang_freekv.policy import RetrievalPolicy

HITS, RECALLED, CORRECTED = range(3)
NOW, AHEAD = range(2)  # what corrections do, and what runs beside the computation: each counts for itself


class Retrieval:
    """The retrieval engine of one model: every layer here is a retrieval layer, numbered from 0.

    Args:
        config: budget, sink and window.
        policy: digests, scores, correction.
        store: host pool, digests and device cache.
        stream: where recall, offload and prefix staging run.
    """

    def __init__(self, config: FreeKVConfig, policy: RetrievalPolicy, store: Store, stream: TransferStream) -> None:
        self.config, self.policy, self.store, self.stream = config, policy, store, stream
        self.host, self.digests, self.cache = store.host, store.digests, store.cache
        self.in_flight: list[Handle | None] = [None] * len(self.cache.keys)
        self.counts = torch.zeros(2, self.cache.num_rows, 3, dtype=torch.int64, device=self.cache.keys[0].device)

    def decode(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: DecodeBatch, scale: float
    ) -> torch.Tensor:
        """One decode step of one layer.

        Args:
            queries: ``[B, Hq, D]`` post-RoPE.
            keys, values: ``[B, H, D]`` of the new tokens.

        Returns:
            ``[B, Hq, D]`` attention output.
        """
        cache, rows = self.cache, batch.rows
        self.complete_transfers(layer)
        cache.append(layer, rows, batch.seq_lens, keys, values)
        filled = self._digest_filled_pages(layer, batch)

        turned = self.policy.needs_correction(queries, cache.previous_queries[layer][rows], cache.num_kv_heads)
        self.counts[NOW, rows, CORRECTED] += turned.sum(1)
        self._recall(layer, queries, batch, batch.seq_lens, turned, turned, self.counts[NOW])

        output = cache.attend(layer, queries, rows, batch.seq_lens, scale)

        def behind_the_attention() -> None:
            kernels.offload_pages(*filled, self.host.layers[layer])
            self._recall(layer, queries, batch, batch.seq_lens + 1, torch.ones_like(turned), ~turned, self.counts[AHEAD])

        self.in_flight[layer] = self.stream.submit(behind_the_attention)
        cache.previous_queries[layer][rows] = queries
        return output

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
        if layer == 0:  # nothing else may hold context buffers when this batch's are allocated
            self.complete_all_transfers()
        context_keys, context_values = self.store.staging.context(layer, batch)
        context_keys[batch.new_rows], context_values[batch.new_rows] = keys, values
        output = kernels.extend_attention(queries, context_keys, context_values, batch.query_lens, batch.key_lens, scale)

        starts = batch.full_starts[:, None].expand(-1, self.cache.num_kv_heads)
        self.policy.digest(context_keys, starts, batch.full_pages, self.digests.layers[layer], self.config.page_size)
        pages = self.host.layers[layer]
        self.in_flight[layer] = self.stream.submit(
            lambda: kernels.offload_pages(context_keys, context_values, starts, batch.full_pages, pages)
        )
        self._seed(layer, queries[batch.last_tokens], batch, context_keys, context_values)
        return output

    def complete_transfers(self, layer: int) -> None:
        """Wait for what the last forward pass of ``layer`` left in flight: a recall, which owns the slots and the slot table
        until then, or an offload, which a correction may read back."""
        if (handle := self.in_flight[layer]) is not None:
            handle.wait()
            self.in_flight[layer] = None

    def complete_all_transfers(self) -> None:
        for layer in range(len(self.in_flight)):
            self.complete_transfers(layer)

    def row_counts(self, rows: torch.Tensor) -> torch.Tensor:
        """``[B, 3]`` hits, recalled and corrected of ``rows [B]`` since their last extend; they may lag by what is in flight."""
        return self.counts[:, rows].sum(0)

    def _digest_filled_pages(self, layer: int, batch: DecodeBatch) -> tuple[torch.Tensor, ...]:
        """Digest the pages that the new tokens have filled; returns keys, values, starts and host pages for their offload."""
        size, cache = self.config.page_size, self.cache
        page = (batch.seq_lens - 1) // size
        host_pages = batch.page_table.gather(1, page[:, None]).squeeze(1).where(batch.seq_lens % size == 0, -1)
        starts = cache.locate(layer, batch.rows, page) * size
        keys, values = cache.keys[layer].flatten(0, 1), cache.values[layer].flatten(0, 1)
        self.policy.digest(keys, starts, host_pages, self.digests.layers[layer], size)
        return keys, values, starts, host_pages

    def _required_pages(self, layer: int, queries: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """``[B, H, C]`` int32 pages to attend to at ``seq_lens`` tokens: sink, selected by ``queries``, window; -1 padding."""
        config = self.config
        num_pages = (seq_lens + config.page_size - 1) // config.page_size
        first_window = num_pages - config.window_pages
        scores = self.policy.score(queries, self.digests.layers[layer], page_table, config.sink_pages, first_window)
        selected = kernels.select_pages(scores, config.selected_pages)

        sink = torch.arange(config.sink_pages, device=queries.device).expand(len(seq_lens), -1)
        sink = sink.where(sink < num_pages[:, None], -1)
        window = first_window[:, None] + torch.arange(config.window_pages, device=queries.device)
        window = window.where(window >= config.sink_pages, -1)
        sink, window = (pages.to(torch.int32)[:, None].expand(-1, selected.shape[1], -1) for pages in (sink, window))
        return torch.cat((sink, selected, window), dim=-1)

    def _recall(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: DecodeBatch,
        seq_lens: torch.Tensor,
        heads: torch.Tensor,
        lookups: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Make resident what ``heads [B, H]`` will attend to at ``seq_lens`` tokens; ``counts [row, 3]`` tell of it.

        Hits are counted for ``lookups [B, H]``, so that a corrected kv head, which selects twice with one query, counts once.
        """
        cache, rows = self.cache, batch.rows
        required = self._required_pages(layer, queries, batch.page_table, seq_lens)
        table = cache.slot_pages[layer][rows]
        planned, incoming = kernels.plan_slots(table, required)
        cache.slot_pages[layer][rows] = planned.where(heads[..., None], table)

        full = batch.seq_lens // self.config.page_size  # the page about to begin has a slot but no content yet
        missing = (incoming >= 0) & (incoming < full[:, None, None]) & heads[..., None]
        page_table = batch.page_table[:, None].expand(-1, incoming.shape[1], -1)
        host_pages = page_table.gather(2, incoming.clamp(0, page_table.shape[2] - 1).long())
        slots = cache.slots(rows)[:, None].expand_as(incoming)
        kernels.recall_pages(self.host.layers[layer], host_pages.where(missing, -1), slots, cache.keys[layer], cache.values[layer])

        sink, chosen = self.config.sink_pages, self.config.selected_pages
        selected = (required[..., sink : sink + chosen] >= 0).sum(2)
        recalled = missing.sum(2)
        counts[rows, RECALLED] += recalled.sum(1)
        counts[rows, HITS] += ((selected - recalled) * lookups).sum(1)

    def _seed(
        self, layer: int, queries: torch.Tensor, batch: ExtendBatch, context_keys: torch.Tensor, context_values: torch.Tensor
    ) -> None:
        """Fill the rows for the first decode step, selected by the last tokens' ``queries [B, Hq, D]``."""
        cache, rows, size = self.cache, batch.rows, self.config.page_size
        required = self._required_pages(layer, queries, batch.page_table, batch.seq_lens + 1)
        planned, incoming = kernels.plan_slots(torch.full_like(required, -1), required)
        cache.slot_pages[layer][rows] = planned
        cache.previous_queries[layer][rows] = queries
        written = (incoming >= 0) & (incoming * size < batch.seq_lens[:, None, None])
        starts = (batch.context_starts[:, None, None] + incoming * size).where(written, -1)
        slots = cache.slots(rows)[:, None].expand_as(incoming)
        kernels.fill_pages(context_keys, context_values, starts, slots, cache.keys[layer], cache.values[layer])
        self.counts[:, rows] = 0
