"""Which tokens methods say they read, against what they answer; and dense attention's mass on them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.accuracy.mass import Watched
from benchmarks.accuracy.method import Budget, Prompt, Step
from benchmarks.accuracy.methods import METHODS
from benchmarks.accuracy.methods.razor import RazorAttention
from benchmarks.accuracy.methods.streaming_llm import StreamingLLM

BATCH, HEADS, GROUP, DIM, TOKENS, STEPS = 2, 2, 2, 16, 300, 40
BUDGET = Budget(total=192, sink=32, window=64, page=32)
ANOTHER_VALUE = {"shadowkv"} | {name for name in METHODS if "-tail-" in name}  # keys of a low rank; pseudo-tokens beside what is read
EXACT = {name: entry for name, entry in METHODS.items() if "-tau-" not in name} | {
    "streaming_llm": partial(StreamingLLM, reindexed=False),
    "razor": partial(RazorAttention, ((True, False),) * 2, compensate=False),
}


def random_text() -> tuple[Prompt, list[Step]]:
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(BATCH, heads, TOKENS + STEPS, DIM, generator=random) for heads in (HEADS * GROUP, HEADS, HEADS))
    queries = queries.cumsum(2) / torch.arange(1, TOKENS + STEPS + 1)[:, None] ** 0.5  # near the last one, as in a text
    seen = (each[:, :, :TOKENS] for each in (queries, keys, values, keys))
    prompt = Prompt(*seen, lambda plain, positions: plain, DIM**-0.5, layer=1, layers=2)
    return prompt, [Step(*(each[:, :, at] for each in (queries, queries, keys, values)), at) for at in range(TOKENS, TOKENS + STEPS)]


def dense_weights(steps: list[Step], prompt: Prompt, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step: ``[B, H, G, n]``, and values ``[B, H, n, D]``, by definition."""
    keys, values = (
        torch.cat((of_prompt, torch.stack([getattr(step, name) for step in steps[: number + 1]], dim=2)), dim=2)
        for of_prompt, name in ((prompt.keys, "key"), (prompt.values, "value"))
    )
    query = steps[number].query.unflatten(1, (HEADS, GROUP))
    return (query @ keys.mT * prompt.scale).softmax(-1), values


@pytest.mark.parametrize("name", EXACT)
def test_what_a_method_says_it_read_explains_its_answer(name):
    prompt, steps = random_text()
    watched = Watched(EXACT[name]())
    cache = watched.begin(replace(prompt, kv_dtype=watched.kv_dtype), BUDGET)
    for number, step in enumerate(steps):
        answer, (paid, values) = cache.attend(step), dense_weights(steps, prompt, number)
        read = cache.trace.read.expand(BATCH, HEADS, step.position + 1)
        assert torch.equal(read.sum(-1), cache.trace.attended), f"step {number}"
        mass = (paid * read[:, :, None]).sum(-1)
        torch.testing.assert_close(cache.trace.mass, mass.mean(-1))
        if name not in ANOTHER_VALUE:
            expected = (paid * read[:, :, None]) @ values / mass[..., None]
            torch.testing.assert_close(answer, expected.flatten(1, 2), rtol=1e-4, atol=1e-5, msg=lambda text: f"step {number}: {text}")


@pytest.mark.parametrize("name", ["freekv", "freekv-narrow-page-8", "quest", "arkvale"])
def test_pages_are_what_sink_and_window_are_not(name):
    prompt, steps = random_text()
    method = METHODS[name]()
    cache, page = method.begin(prompt, BUDGET), getattr(method, "page", None) or BUDGET.page
    sink, window = (0, page) if name == "quest" else (getattr(method, each) or getattr(BUDGET, each) for each in ("sink", "window"))
    for step in steps:
        cache.attend(step)
        assert (cache.trace.selected == BUDGET.total - sink - window).all()
        assert ((cache.trace.attended - cache.trace.selected) <= sink + window).all()
        assert (cache.trace.fetched <= cache.trace.selected).all()
