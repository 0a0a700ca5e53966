# SPDX-License-Identifier: Apache-2.0
"""DecodeStep: the works of one decode step of one retrieval layer, and what they hand to each other."""

from __future__ import annotations

from functools import partial

import torch

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.engine import Engine
from sglang_freekv.kernels import Candidates, Heads, Misses, Reads
from sglang_freekv.kernels.reference_stamps import AHEAD, ATTENTION, CORRECTION
from sglang_freekv.kernels.shares import Shares

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


class DecodeStep:
    """One decode step of one layer: the works of ``schedule.SCHEDULE``, each on its stream.

    Args:
        engine: pools, policy and the moves between pools.
        layer: number of the retrieval layer.
        queries: ``[B, Hq, D]`` post-RoPE.
        keys, values: ``[B, H, D]`` of the new tokens.
        batch: rows, lengths and page table.
        scale: factor of the layer's attention logits.
        learned_sinks: ``[Hq]`` as in ``kernels.merge_shares``.
    """

    selects: torch.Tensor | None = None  # [B, H] kv heads that need scores; None if all do
    candidates: Candidates  # what the plans select among
    heads: Heads  # which are corrected, and which have lost a page
    reads: Reads  # what this step attends to
    shares: Shares  # of both attentions
    output: torch.Tensor

    def __init__(
        self,
        engine: Engine,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: DecodeBatch,
        scale: float,
        *,
        learned_sinks: torch.Tensor | None = None,
    ) -> None:
        self.engine, self.layer, self.batch, self.scale = engine, layer, batch, scale
        self.queries, self.keys, self.values, self.learned_sinks = queries, keys, values, learned_sinks
        self.asked = queries  # of attention; a rotation, if there is one, comes before all that reads them
        self.cache, self.digests, self.host = engine.cache.layers[layer], engine.digests.layers[layer], engine.host.layers[layer]
        self.ahead_first = plans_ahead_first(len(batch.rows))

    def score(self) -> None:
        """Score all candidates with this step's queries, or those of the kv heads that select on turn."""
        logits = self.engine.policy.digests.score(self.queries, self.digests, self.batch, self.scale, self.selects)
        self.candidates = self.engine.candidates(logits, self.batch)

    def rotate(self) -> None:
        """Rotate queries and new keys as keys of coded KV are. Scores and comparisons keep queries as they are."""
        self.asked, self.keys = kernels.rotate(self.queries, self.keys)

    def append(self) -> None:
        """Append the new tokens. A page that one of them fills is digested and offloaded."""
        batch, cache = self.batch, self.cache
        given = self.keys, self.values, batch.rows, batch.seq_lens, batch.page_table, batch.frames, cache.tables
        starts, filled = kernels.append_tokens(*given, keys=cache.keys, values=cache.values, scales=cache.kv.scales)
        self.engine.digest(self.layer, cache.token_rows, starts, filled)
        self.engine.offload(self.layer, cache.token_rows, starts, filled)

    def compare(self) -> None:
        """Find the kv heads whose queries are unlike their last ones, or unlike those that they last selected with."""
        engine, cache, turn = self.engine, self.cache, self.engine.turn(self.layer, self.batch)
        heads, attended, budget = engine.cache.num_kv_heads, engine.cache.num_attended, engine.config.pages.total
        given = self.layer, self.queries, self.batch.rows, cache.previous_queries, engine.counts, heads
        corrected = engine.policy.corrected(*given, turn=turn)
        self.selects = turn and turn.selects
        self.heads = Heads(corrected, torch.empty_like(corrected))
        self.reads = Reads.allocate(len(corrected), heads, attended, corrected.device, budget)
        self.shares = kernels.allocate_shares(self.queries, cache.keys, self.reads)

    def plan(self) -> None:
        """Write down what this step attends to. Kv heads that are not corrected plan ahead too, with ``plans_ahead_first``."""
        engine, logits = self.engine, self.candidates.logits
        standing = partial(engine.standing, self.layer, self.batch, logits)
        adjusted = engine.policy.adjust(self.layer, logits, self.heads.corrected, standing)
        self.candidates = self.candidates._replace(logits=adjusted)
        misses = engine.misses_now, engine.misses_ahead[self.layer]
        kernels.plan_pages(self.candidates, self.heads, self.cache.tables, self.reads, *misses, engine.counts, ahead_first=self.ahead_first)

    def correct(self) -> None:
        """Recall what corrected kv heads miss, and attend to it."""
        engine = self.engine
        self._recall(engine.misses_now, CORRECTING_PROGRAMS, True, **engine.stamp(self.layer, CORRECTION))
        kernels.attend_rest(*self._attended(), self.shares, scales=self.cache.kv.scales)

    def verify(self) -> None:
        """The canary examines what the correction has recalled. It comes behind, because attention waits for the correction."""
        self.engine.verify(self.layer, self.engine.misses_now)

    def attend(self) -> None:
        """Attend to the pages that are present."""
        stamp = self.engine.stamp(self.layer, ATTENTION).get("stamp")
        kernels.attend_present(*self._attended(), self.shares, stamp=stamp, scales=self.cache.kv.scales)

    def merge(self) -> None:
        """Merge the shares of both attentions, and the learned sinks."""
        self.output = kernels.merge_shares(*self.shares, self.queries.dtype, self.learned_sinks)

    def plan_ahead(self) -> None:
        """Give the pages of the next step their slots."""
        engine, candidates = self.engine, self.candidates
        del self.candidates
        misses = engine.misses_ahead[self.layer]
        kernels.plan_rest(candidates, self.heads, self.cache.tables, misses, engine.counts, ahead_first=self.ahead_first)

    def recall_ahead(self) -> None:
        """Recall what the next step misses."""
        engine, misses = self.engine, self.engine.misses_ahead[self.layer]
        self._recall(misses, programs_ahead(len(self.batch.rows)), False, **engine.stamp(self.layer, AHEAD))
        engine.verify(self.layer, misses)

    def finish(self) -> torch.Tensor:
        """Hand out the attention output, and let go of what only MAIN needed: what is in flight keeps the step until the next one."""
        output = self.output
        del self.output, self.queries, self.asked, self.keys, self.values, self.reads, self.shares
        return output

    def _attended(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Reads, float]:
        return self.asked, self.cache.keys, self.cache.values, self.batch.seq_lens, self.reads, self.scale

    def _recall(self, misses: Misses, programs: int, closely: bool, **stamp: torch.Tensor) -> None:
        """Copy missing units to their frames, with the scales of coded ones."""
        kv, scales = self.cache.kv, self.engine.host.scales_with(self.layer, self.cache.kv.scales)
        self.engine.recall(self.host, misses, kv.keys, kv.values, programs, closely, **stamp, **scales)
