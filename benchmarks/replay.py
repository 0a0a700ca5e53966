"""Load replay: FreeKV with the correction rate and the miss rate of a real model, on random weights.

The real kernels run, so that their cost is real; then what they decided is overwritten:

- the correction flags, so that a share ``corrected`` of the kv heads is corrected. The heads of one layer and step drift together: their
  probability is drawn from a Beta distribution for each (request, layer, step), with the concentration of ``profiles.json``. A load has
  one share for every layer, the mean of DeepSeek-R1-Distill-Llama-8B, or one for each layer, as SmolLM2-135M-Instruct has them;
- the logits of the pages, so that a share ``missed`` of the selected pages is new in each step. A page's score is a sum of three
  triangular waves of the step, with hashed phases and with hashed frequencies over eight octaves: some pages stay for long, others come and
  go. Of the pages that a step selects, the share that is selected 1, 4, 16 and 64 steps later is 0.79, 0.43, 0.21 and 0.08, for 32 of 1000
  pages and ``missed`` = 0.21. That recency is an assumption; the two shares are measured figures, from ``profiles.json``.

Both follow a control file, so that one server serves several loads. Without a load the policy is FreeKV. Hysteresis is next to none: ``missed``
was measured with the preset's own, and would else be lessened by it once more.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.replay_load import THETAS, Load, drawn_flags, page_scores, speed_of, thetas_by_layer
from sglang_freekv import retrieval
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.digests import Boxes, Digests, digests_of
from sglang_freekv.kernels import CORRECTED, Misses
from sglang_freekv.kernels.candidates import due
from sglang_freekv.methods import METHODS
from sglang_freekv.policy import POLICIES, Policy

logger = logging.getLogger(__name__)

LAYERS, ROWS, HEADS = 256, 1024, 32  # most that the step counters have room for
POLL_S = 0.05
LEAST_NATS = 1e-6  # of hysteresis: the plan takes as long as with the preset's


class Controls:
    """What the kernels read on the device, and the thread that follows the control file.

    Args:
        device: of the model.
        path: JSON ``{"version": N, "load": [..] or null}``; when it has taken effect, N is written to ``PATH.applied``.
    """

    def __init__(self, device: str, path: Path | None = None) -> None:
        self.device, self.path = torch.device(device), path
        self.knobs = torch.zeros(2, dtype=torch.int32, device=device)  # on, speed
        self.thetas = torch.zeros(LAYERS, THETAS, dtype=torch.float32, device=device)
        self.steps = torch.zeros(LAYERS, ROWS, HEADS, dtype=torch.int32, device=device)
        self.layers: dict[int, int] = {}
        self.deciding: dict[int, int] = {}
        if path is not None:
            threading.Thread(target=self._follow, name="replay-controls", daemon=True).start()

    def set(self, load: Load | None) -> None:
        """Change the load; steps that run now see the old one, or the new one, or some of both."""
        with torch.inference_mode():
            if load is not None:
                self.thetas.copy_(thetas_by_layer(load.corrected, LAYERS))
            self.knobs.copy_(torch.tensor([int(load is not None), speed_of(load) if load is not None else 0], dtype=torch.int32))

    def layer_of(self, tensor: torch.Tensor) -> int:
        """A number for the layer that owns ``tensor``."""
        layer = self.layers.setdefault(tensor.data_ptr(), len(self.layers))
        assert layer < LAYERS, f"{layer + 1} layers, expected at most {LAYERS}"
        return layer

    def thetas_at(self, previous: torch.Tensor) -> torch.Tensor:
        """``[THETAS]`` of the layer that owns ``previous``; layers are counted as they first decide whom to correct."""
        return self.thetas[self.deciding.setdefault(previous.data_ptr(), len(self.deciding))]

    def _follow(self) -> None:
        applied = None
        while True:
            time.sleep(POLL_S)
            try:
                wanted = json.loads(self.path.read_text())
            except (OSError, json.JSONDecodeError):
                continue
            if wanted["version"] != applied:
                self._apply(wanted["load"])
                applied = wanted["version"]
                write_whole(self.path.with_suffix(".applied"), str(applied))
                logger.info(f"replay: load {wanted['load']}")

    def _apply(self, load: list | None) -> None:
        load = None if load is None else Load(*load)
        if self.device.type != "cuda":
            self.set(load)
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            self.set(load)
        stream.synchronize()


def write_whole(path: Path, text: str) -> None:
    """Write a file that no reader sees half of."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


@dataclass(frozen=True)
class Replay(Policy):
    """FreeKV whose decisions are overwritten while ``controls`` has a load."""

    controls: Controls

    def corrected(self, place, queries, rows, previous, counts, num_kv_heads, *, turn=None) -> torch.Tensor:
        controls, layer = self.controls, self.controls.layer_of(previous)
        thetas = controls.thetas_at(previous)
        steps = controls.steps[layer, : len(previous), :num_kv_heads]
        assert steps.shape == (len(previous), num_kv_heads), f"{len(previous)} rows of {num_kv_heads} kv heads, expected fewer"
        if queries.is_cuda:
            from benchmarks.replay_kernels import needs_correction

            given = queries, rows, previous, self.tau_of(place), counts, num_kv_heads, controls.knobs, thetas, steps, layer
            return needs_correction(*given, turn=turn)
        before = previous.clone()
        corrected = super().corrected(place, queries, rows, previous, torch.zeros_like(counts), num_kv_heads)
        drawn = drawn_flags(rows, steps, thetas, layer)
        corrected = torch.where(controls.knobs[0] != 0, drawn, corrected) & (rows > 0)[:, None]
        if turn is not None:
            kept = ~(corrected | due(turn.seq_lens, turn.page_size, turn.tables.attended.shape[2], turn.budget)[:, None])
            turn.selects.copy_((~kept | turn.tables.lost(rows, turn.frames)) & (rows > 0)[:, None])
            previous[rows] = before[rows].where(kept.repeat_interleave(queries.shape[1] // num_kv_heads, 1)[..., None], previous[rows])
        counts[:, CORRECTED].index_add_(0, rows.long(), corrected.sum(1))
        return corrected


@dataclass(frozen=True)
class ReplayedDigests:
    """``digests`` whose scores are overwritten while ``controls`` has a load."""

    digests: Digests
    controls: Controls

    def shape(self, head_dim: int, element_bytes: int) -> tuple[int, ...]:
        return self.digests.shape(head_dim, element_bytes)

    def write(self, keys, starts, host_pages, digests) -> None:
        self.digests.write(keys, starts, host_pages, digests)

    def score(self, queries, digests, batch, scale, selects=None) -> torch.Tensor:
        controls, heads = self.controls, digests.shape[1]
        layer = controls.layer_of(digests)
        if not queries.is_cuda:
            logits = self.digests.score(queries, digests, batch, scale, selects)
            scores = page_scores(batch.rows, batch.seq_lens, heads, logits.shape[2], controls.knobs[1], layer)
            return torch.where(controls.knobs[0] != 0, scores.repeat_interleave(logits.shape[1] // heads, 1), logits)
        from benchmarks import replay_kernels

        budget, page_size = self.digests.budget, self.digests.page_size
        if isinstance(self.digests, Boxes):
            where = (batch.rows, batch.seq_lens, batch.page_table, budget, page_size)
            return replay_kernels.score_pages(queries, digests, *where, scale, controls.knobs, layer, selects)
        logits = self.digests.score(queries, digests, batch, scale, selects)
        replay_kernels.overwrite_scores(logits, batch.rows, batch.seq_lens, budget, page_size, heads, controls.knobs, layer, selects)
        return logits


def replayed(config: FreeKVConfig, controls: Controls) -> Replay:
    """FreeKV as ``config`` has it, but for what ``controls`` overwrites."""
    return Replay(METHODS["freekv"], ReplayedDigests(digests_of(config), controls), config.pooling, config.tau, controls)


def without_hysteresis(config: FreeKVConfig) -> FreeKVConfig:
    """``config`` under a load, which says how many of the selected pages are missed."""
    return replace(config, hysteresis=min(config.hysteresis, LEAST_NATS))


def drain(host_pool: torch.Tensor, misses: Misses, *others, **scales) -> None:
    """In the place of recall: the list of misses is emptied, and nothing is copied."""
    misses.clear()


def install(path: Path | None, copies: bool) -> None:
    """Make ``freekv`` the replay in this process, which is about to become a scheduler."""

    @functools.cache
    def controls() -> Controls:
        return Controls("cuda" if torch.cuda.is_available() else "cpu", path)

    POLICIES["freekv"] = lambda config: replayed(config, controls())
    build = retrieval.Retrieval.__init__

    def build_replayed(self, config: FreeKVConfig, *args, **kwargs) -> None:
        build(self, without_hysteresis(config), *args, **kwargs)
        if not copies:
            self.recall = drain
            logger.info("replay: recall copies nothing")

    retrieval.Retrieval.__init__ = build_replayed
