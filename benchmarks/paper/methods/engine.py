"""Methods that are this project's engine under another load or policy: FreeKV, ArkVale, Quest in device memory, LouisKV's trigger."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.paper.method import Traffic, Work
from benchmarks.profiles import CORRECTED
from benchmarks.replay import Controls, Replay, replayed
from benchmarks.replay_load import Load
from sglang_freekv import kernels
from sglang_freekv.engine import Recall
from sglang_freekv.kernels import RECALLED
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.retrieval import Retrieval

TRIGGERED = {CORRECTED[0.8]: 1 / 5, CORRECTED[0.9]: 1 / 16}  # by FreeKV's share of kv heads under the same load


@dataclass(frozen=True)
class OnTrigger(Replay):
    """Selects for the corrected kv heads alone: the others keep the scores by which they last selected (LouisKV,
    section 4.1).

    Args:
        frozen: these scores ``[B, Hq, P]``, of each layer.
    """

    frozen: list[torch.Tensor]

    def adjust(self, layer, logits, corrected, standing) -> torch.Tensor:
        frozen = self.frozen[layer]
        torch.where(corrected.repeat_interleave(logits.shape[1] // corrected.shape[1], 1)[..., None], logits, frozen, out=frozen)
        return frozen


class Asking(Replay):
    """Tells the host which kv heads are corrected."""

    def corrected(self, *args, **options) -> torch.Tensor:
        corrected = super().corrected(*args, **options)
        bool(corrected.any())
        return corrected


class Engine:
    """FreeKV under the load.

    Args:
        corrected: in place of the load's; 1 corrects always: retrieval that blocks.
        on_trigger: nothing is selected ahead.
        resident: all pages are on the device already.
        recall: how what is missing comes.
        captured: False launches kernel by kernel.
        asks: the host waits for the flags of each layer, as a host that launches corrections must.
    """

    def __init__(
        self,
        work: Work,
        corrected: float | None = None,
        on_trigger: bool = False,
        resident: bool = False,
        recall: Recall = kernels.recall_pages,
        captured: bool = True,
        asks: bool = False,
    ) -> None:
        self.work, self.captured, self.on_trigger, self.resident = work, captured, on_trigger, resident
        self.corrected = work.corrected if corrected is None else corrected
        missed = 0.0 if resident else work.missed
        pools, requests = work.pools, work.requests
        config = pools.config
        controls = Controls(pools.device)
        controls.set(Load(self.corrected, missed, max(1, work.candidates), config.pages.selected))
        policy = replayed(config, controls)
        if asks:
            policy = Asking(**vars(policy))
        if on_trigger:
            shape = work.batch, pools.shape.query_heads, requests.table.shape[1]
            policy = OnTrigger(**vars(policy), frozen=[torch.randn(shape, device=pools.device) for _ in pools.store.cache.layers])
        self.retrieval = Retrieval(config, policy, pools.store, pools.streams, work.recall(recall), ReferenceExtend())
        queries = torch.zeros(work.batch, pools.shape.query_heads, pools.shape.head_dim, dtype=pools.dtype, device=pools.device)
        for cache, digests in zip(pools.store.cache.layers, pools.store.digests.layers):
            logits = policy.digests.score(queries, digests, requests.batch, pools.shape.head_dim**-0.5)
            requests.seed(cache, config, logits)  # so that the first step misses x, too

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.retrieval.decode(layer, q, k, v, self.work.requests.batch, q.shape[-1] ** -0.5)

    def complete(self) -> None:
        self.retrieval.complete_all_transfers()

    def begin(self) -> None:
        self.retrieval.counts.zero_()

    def traffic(self, steps: int) -> Traffic:
        """Recall as it was counted. LouisKV need not read the digests of kv heads that are not corrected, though a graph does."""
        work = self.work
        scored = work.candidates * (self.corrected if self.on_trigger else 1)
        units = self.retrieval.row_counts(work.requests.rows)[:, RECALLED].sum().item() / steps
        link = units * work.pools.store.host.unit_bytes * (not self.resident)
        return Traffic(link, link + work.elements(2 * work.pools.shape.head_dim * (work.budget + scored)))


class LouisKV(Engine):
    """At the strides between two triggers that its paper reports, 5 tokens of long input and 16 of long output; other loads as they are."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, corrected=TRIGGERED.get(work.corrected, work.corrected), on_trigger=True)
