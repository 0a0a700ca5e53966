"""The engine with its recall timed: what is recalled takes time, what is late is waited for, and no output changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import CONFIGS, LAYERS, Engine
from sglang_freekv.kernels.reference_stamps import AHEAD, ATTENTION, CORRECTION, END
from sglang_freekv.memory_pool.recall_clock import RecallTimes
from sglang_freekv.memory_pool.transfer import InlineStream
from test_retrieval import DeferredStream

STEPS, PROMPTS = 12, [64, 99, 150]


def timed(config, every: int, stream) -> tuple[RecallTimes, torch.Tensor]:
    """What the clock says after all steps, and their outputs."""
    engine = Engine(replace(config, recall_timing=every), PROMPTS, STEPS, stream)
    engine.extend(engine.requests, PROMPTS)
    rows, outputs = torch.tensor([request.row for request in engine.requests]), []
    for _ in range(STEPS):
        outputs.append(torch.stack(engine.decode(engine.requests)))
        engine.retrieval.end_step(rows)
    times = RecallTimes() if engine.retrieval.clock is None else RecallTimes(*engine.retrieval.clock.snapshot().tolist())
    return times, torch.stack(outputs)


@pytest.mark.parametrize("every, sampled", [(0, 0), (1, 12), (5, 3), (100, 1)])
def test_one_step_of_so_many_is_timed_and_no_output_changes(every, sampled):
    times, outputs = timed(CONFIGS["tight"], every, InlineStream)
    assert times.sampled_steps == sampled and (times.recall_ns > 0) == (sampled > 0)
    assert torch.equal(outputs, timed(CONFIGS["tight"], 0, InlineStream)[1])


def test_what_is_recalled_beside_the_computation_is_not_waited_for():
    """A stream that works at once has recalled before attention is over."""
    times, _ = timed(CONFIGS["tight"], 1, InlineStream)
    assert times.wait_ns == 0 < times.recall_ns


@pytest.mark.parametrize("name", ["never-corrected", "always-corrected"])
def test_what_is_late_is_waited_for(name):
    """A stream that works as late as it may recalls behind attention, and behind the end of the computation."""
    times, _ = timed(CONFIGS[name], 1, DeferredStream)
    assert 0 < times.wait_ns and 0 < times.recall_ns


def test_what_fits_the_budget_takes_no_time():
    config = replace(CONFIGS["tight"], budget_tokens=400)
    times, _ = timed(config, 1, DeferredStream)
    assert times == RecallTimes(0, 0, STEPS)


@pytest.mark.parametrize("name, kind", [("never-corrected", CORRECTION), ("quest", AHEAD)])
def test_a_recall_that_has_nothing_to_do_has_no_end(name, kind):
    engine = Engine(replace(CONFIGS[name], recall_timing=1), PROMPTS, STEPS, InlineStream)
    engine.extend(engine.requests, PROMPTS)
    seen = torch.zeros(3, dtype=torch.bool)
    for _ in range(STEPS):
        engine.decode(engine.requests)
        seen |= (engine.retrieval.clock.stamps[:LAYERS, :, END] > 0).any(0)
        engine.retrieval.end_step(torch.tensor([engine.requests[0].row]))
    assert seen.tolist() == [each != kind for each in (CORRECTION, AHEAD, ATTENTION)]
