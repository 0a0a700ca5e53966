# SPDX-License-Identifier: Apache-2.0
"""FreeKV's decode step and the extend that precedes it (paper sections 3 and 4).

A decode step of a layer scores the candidates, compares each query with the last one, and plans what it reads. Corrected kv heads recall
what they miss, while attention begins with the pages that are present. Behind attention the next step is planned, and what it misses is
recalled beside the next layer. ``schedule.SCHEDULE`` has the works and their streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sglang_freekv import kernels, schedule
from sglang_freekv.batch import DecodeBatch, ExtendBatch
from sglang_freekv.closing import Closing, Work
from sglang_freekv.decode_step import DecodeStep
from sglang_freekv.engine import Engine
from sglang_freekv.extend_plan import ExtendPlan
from sglang_freekv.kernels.kv import KV
from sglang_freekv.memory_pool.prefix_stream import PrefixStream


class Retrieval(Engine):
    """The retrieval engine of one model, whose arguments are those of ``Engine``."""

    closing: Closing | None = None  # of short extends in place, if all layers are to be closed together

    def close_together(self, scales: Sequence[float], requests: int, pages: int, record: Callable[[Work], Work]) -> None:
        """Close all layers of a short extend in place together from now on. Arguments are as of ``Closing``."""
        self.closing = Closing(
            self.start_rows,
            partial(self._of_frames, self.digest),
            partial(self._of_frames, self.offload),
            previous_queries=[layer.previous_queries for layer in self.cache.layers],
            scales=scales,
            requests=requests,
            pages=pages,
            page_size=self.config.page_size,
            record=record,
        )

    def _of_frames(self, work: Callable[..., None], layer: int, starts: torch.Tensor, host_pages: torch.Tensor) -> None:
        """``digest`` or ``offload`` of pages that lie in frames of ``layer``, from the token rows ``starts [M]`` on."""
        work(layer, self.cache.layers[layer].token_rows, self._for_heads(starts), host_pages)

    def _for_heads(self, starts: torch.Tensor) -> torch.Tensor:
        """``[M, H]`` of ``[M]``: all kv heads of a page begin at the same token row."""
        return starts[:, None].expand(-1, self.cache.num_kv_heads)

    def decode(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: DecodeBatch,
        scale: float,
        *,
        learned_sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One decode step of one layer. The host launches work and waits for none, so a CUDA graph can hold the step.

        Args:
            queries: ``[B, Hq, D]`` post-RoPE.
            keys, values: ``[B, H, D]`` of the new tokens.
            batch: rows, lengths and page table.
            scale: factor of the layer's attention logits.
            learned_sinks: ``[Hq]`` as in ``kernels.merge_shares``. They take part in attention, and not in what is selected.

        Returns:
            ``[B, Hq, D]`` attention output, in the dtype of the queries.
        """
        self.complete_transfers(layer)
        step = DecodeStep(self, layer, queries, keys, values, batch, scale, learned_sinks=learned_sinks)
        without = [work for work, wanted in (("verify", self.canary is not None), ("rotate", self.config.is_rotated)) if not wanted]
        schedule.run(step, self.streams, self.in_flight[layer], without, on_turn=self.config.selects_on_turn)
        return step.finish()

    def end_step(self, rows: torch.Tensor) -> None:
        """Join the side streams behind the last layer of a decode step of ``rows [B]``, and add up the stamps if recall is timed."""
        if self.clock is not None:
            self.clock.computed()
        self.complete_all_transfers()
        if self.clock is not None:
            self.clock.settle(rows)

    def prepare_extend(self, plan: ExtendPlan) -> None:
        """Begin an extend: wait for the last pass's work, and start to stream prefixes: to frames, or those of the first layers to be staged.

        Raises:
            RuntimeError: the contexts do not fit a staging buffer.
        """
        batch = plan.batch
        self.complete_all_transfers()
        if batch.in_place:
            self.store.in_place.stream_prefixes(plan.prefixes, plan.behind)
        else:
            self.store.staging.begin(sum(batch.key_lens), plan.prefixes, plan.behind)
        self.extend_attention.plan(batch.query_lens, batch.key_lens, batch.frames if batch.in_place else None)
        self.counts.index_fill_(0, batch.rows.long(), 0)

    def refill(self, page_table: torch.Tensor, given: torch.Tensor) -> None:
        """Copy pages of a decode batch to the frames that they were given, as ``InPlace.refill``, behind all that is in flight."""
        self.complete_all_transfers()
        self.store.in_place.refill(page_table, given)

    def extend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ExtendBatch,
        scale: float,
        *,
        learned_sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One extend of one layer: attend to ``[prefix | new]``, digest and offload the pages that are filled, and seed the rows. A short
        one in place does all but the attention behind its last layer, for all of them.

        Args:
            queries: ``[T, Hq, D]`` post-RoPE.
            keys, values: ``[T, H, D]`` of the new tokens.
            batch: the extend batch that ``prepare_extend`` began.
            scale: factor of the layer's attention logits.
            learned_sinks: ``[Hq]`` as in ``kernels.merge_shares``. They take part in attention, and not in what is selected.

        Returns:
            ``[T, Hq, D]`` attention output.
        """
        contexts: PrefixStream = self.store.in_place if batch.in_place else self.store.staging
        cache, context = self.cache.layers[layer], contexts.context(layer)
        asked = queries
        if context.scales is not None:
            asked, keys = kernels.rotate(queries, keys)
        where = batch.new_rows, batch.last_tokens, batch.rows
        last_queries = kernels.write_tokens(
            keys, values, queries, *where,
            keys=context.keys, values=context.values, previous_queries=cache.previous_queries, scales=context.scales,
        )  # fmt: skip
        closing = self.closing if self.closing is not None and self.closing.takes(batch) else None
        full = (context, self._for_heads(batch.full_starts), batch.full_pages) if closing is None and len(batch.full_pages) else None
        if full is not None:
            self.in_flight[layer].append(self.streams.transfers.submit(lambda: self.offload(layer, *full)))
        if batch.given is not None and batch.context_starts is not None:
            kernels.fill_frames(context.keys, context.values, batch.context_starts, batch.given, **self._frames_from(context, layer))
        attended = cache.kv if batch.in_place else context
        coded = {} if attended.scales is None else {"scales": attended.scales}
        output = self.extend_attention(asked, attended.keys, attended.values, scale, learned_sinks, **coded)
        if full is not None:
            self.digest(layer, *full)
        if closing is None:
            self._seed(layer, last_queries, batch, context, scale)
        elif layer == len(self.in_flight) - 1:
            self._close(layer, batch, closing)
        return output

    def _frames_from(self, context: KV, layer: int) -> dict[str, Any]:
        """Keyword arguments by which pages of ``context`` are copied to frames of ``layer``."""
        frames = self.cache.layers[layer].kv
        return {"keys": frames.keys, "values": frames.values, "source_scales": context.scales, "scales": frames.scales}

    def _seed(self, layer: int, queries: torch.Tensor, batch: ExtendBatch, context: KV, scale: float) -> None:
        """Start the rows anew. Staged pages are copied to the slots; in place no slot is wanted, because every page has a frame."""
        self.start_rows(layer, queries, batch, scale)
        if batch.context_starts is not None:
            tables, lying = self.cache.layers[layer].tables, (batch.context_starts, batch.rows, batch.seq_lens)
            kernels.fill_pages(context.keys, context.values, *lying, tables, **self._frames_from(context, layer))

    def _close(self, last: int, batch: ExtendBatch, closing: Closing) -> None:
        """Close all layers behind the last one, ``last``."""
        if len(batch.full_pages):
            self.in_flight[last].append(self.streams.transfers.submit(partial(closing.offload, batch)))
        self.in_flight[last].append(self.streams.selection.submit(partial(closing.run, batch)))

    def start_rows(self, layer: int, queries: torch.Tensor, batch: DecodeBatch, scale: float) -> None:
        """Let the rows attend to the pages of their first decode step, which the last tokens' ``queries [B, Hq, D]`` select."""
        logits = self.policy.digests.score(queries, self.digests.layers[layer], batch, scale)
        logits = self.policy.adjust(layer, logits, None, partial(self.standing, layer, batch, logits))
        kernels.seed_slots(self.candidates(logits, batch), self.cache.layers[layer].tables)
