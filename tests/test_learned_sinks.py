"""Learned sinks in the engine: every extend and every step has them in its softmax, and selects as it does without them."""

from __future__ import annotations

import pytest
import torch

from engine import CONFIGS, GROUP, HEADS, LAYERS, Engine, Request, attend, expected_step
from sglang_freekv import kernels
from sglang_freekv.kernels import reference
from sglang_freekv.memory_pool.transfer import InlineStream

NAMES = ("tight", "in-full-below", "on-turn-two-bit-slack", "always-corrected", "never-corrected", "louiskv", "canary")
STEPS = 9
EXTEND = reference.extend_attention


def dense(request: Request, layer: int, first: int, end: int) -> torch.Tensor:
    """Attention of the tokens from ``first`` to ``end`` to all that come before them."""
    rows = [[attend(request, layer, head, token, list(range(token + 1))) for head in range(HEADS)] for token in range(first, end)]
    return torch.stack([torch.cat(row) for row in rows])


def worst(prompts: list[int], name: str, resident: int, *, sinks: bool = True) -> tuple[float, float]:
    """The largest error of an extend in two chunks, and of the steps behind it."""
    engine = Engine(CONFIGS[name], prompts, STEPS, InlineStream, resident=resident, sinks=sinks)
    errors = []
    for begins, ends in (
        ([0] * len(prompts), [prompt // 16 * 8 for prompt in prompts]),
        ([prompt // 16 * 8 for prompt in prompts], prompts),
    ):
        outputs = engine.extend(engine.requests, ends)
        expected = [
            torch.cat([dense(request, layer, *span) for request, *span in zip(engine.requests, begins, ends)]) for layer in range(LAYERS)
        ]
        errors += [float((output - right).abs().max()) for output, right in zip(outputs, expected)]
    assert engine.in_place == (2 if resident == 400 else 0)
    steps = []
    for _ in range(STEPS):
        for layer, output in enumerate(engine.decode(engine.requests)):
            for found, request in zip(output, engine.requests):
                right, _ = expected_step(engine.config, request, layer)
                steps.append(float((found.view_as(right) - right).abs().max()))
    return max(errors), max(steps)


@pytest.mark.parametrize("resident", [0, 400], ids=["staged", "in place"])
@pytest.mark.parametrize("name", NAMES)
def test_extends_and_steps_have_learned_sinks(name, resident):
    assert max(worst([16, 64, 99], name, resident)) < 2e-5


def test_the_sinks_that_are_tested_matter():
    """A tenth of the weight at least, in the mean; without any the expectations are those of a plain softmax."""
    engine = Engine(CONFIGS["tight"], [64], STEPS, InlineStream, sinks=True)
    request, tokens = engine.requests[0], list(range(64))
    with_sinks = torch.stack([attend(request, layer, head, 63, tokens) for layer in range(LAYERS) for head in range(HEADS)])
    request.learned_sinks = None
    without = torch.stack([attend(request, layer, head, 63, tokens) for layer in range(LAYERS) for head in range(HEADS)])
    kept = (with_sinks / without).mean(-1)
    assert kept.shape == (LAYERS * HEADS, GROUP) and kept.max() < 1 and kept.mean() < 0.9
    assert max(worst([64], "tight", 0, sinks=False)) < 2e-5


def _merging_without(monkeypatch) -> None:
    monkeypatch.setattr(
        kernels, "merge_shares", lambda outputs, weights, dtype, sinks=None: reference.merge_shares(outputs, weights, dtype)
    )


def _sinks_as_logits_of_base_two(monkeypatch) -> None:
    monkeypatch.setattr(
        kernels, "merge_shares", lambda outputs, weights, dtype, sinks=None: reference.merge_shares(outputs, weights, dtype, sinks * 0.6931)
    )


def _extending_without(monkeypatch) -> None:
    monkeypatch.setattr(reference, "extend_attention", lambda *args, learned_sinks: EXTEND(*args))


@pytest.mark.parametrize("breaks, wrong", [(_merging_without, 1), (_sinks_as_logits_of_base_two, 1), (_extending_without, 0)])
def test_what_leaves_the_sinks_out_is_caught(breaks, wrong, monkeypatch):
    breaks(monkeypatch)
    errors = worst([64, 99], "tight", 0)
    assert errors[wrong] > 1e-3 and errors[1 - wrong] < 2e-5


def test_what_is_selected_does_not_depend_on_sinks():
    pages = []
    for sinks in (False, True):
        engine = Engine(CONFIGS["tight"], [64, 99], STEPS, InlineStream, sinks=sinks)
        engine.run(steps=STEPS)
        rows = torch.tensor([request.row for request in engine.requests])
        pages.append(torch.stack([layer.tables.pages(rows).sort().values for layer in engine.retrieval.cache.layers]))
    assert torch.equal(*pages)
