"""What holds of every method in the registry, and of the example in CONTRIBUTING: its file alone makes it one of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine import CONFIGS, HEADS, LAYERS, Engine, attend
from sglang_freekv import methods
from sglang_freekv.config import DIGESTS, POOLINGS, FreeKVConfig
from sglang_freekv.decode_step import DecodeStep
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.methods import METHODS, Method
from sglang_freekv.policy import POLICIES, policy_of
from test_retrieval import DeferredStream

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, PAPERS = "recency", ("https://arxiv.org/abs/", "https://openreview.net/forum?id=")
STEPS = 13


def example() -> str:
    """The file that CONTRIBUTING shows."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 40
    return text


@pytest.fixture(params=[*METHODS, EXAMPLE])
def method(request, monkeypatch) -> Method:
    if request.param == EXAMPLE:
        module = ModuleType(EXAMPLE)
        exec(compile(example(), EXAMPLE, "exec"), vars(module))
        monkeypatch.setitem(METHODS, EXAMPLE, module.METHOD)
        monkeypatch.setitem(POLICIES, EXAMPLE, policy_of)
    return METHODS[request.param]


def engine_of(method: Method, prompts: list[int], stream=InlineStream, budget: int = 40) -> Engine:
    config = FreeKVConfig(method.name, budget_tokens=budget, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=())
    return Engine(config, prompts, STEPS, stream)


def test_a_method_says_what_it_is(method):
    assert method.paper.startswith(PAPERS) and method.about and "\n" not in method.about
    assert method.digest in DIGESTS and method.pooling in POOLINGS and (method.tau is None or -2 <= method.tau <= 2)
    config = FreeKVConfig(method.name)
    assert (config.tau, config.digest, config.pooling) == (method.tau, method.digest, method.pooling)


def test_a_budget_that_covers_the_context_is_dense(method):
    engine = engine_of(method, [3, 60], budget=80)
    outputs = engine.run(STEPS)
    for step in (0, STEPS - 1):
        for index, request in enumerate(engine.requests):
            n = request.prompt + step + 1
            dense = torch.cat([attend(request, LAYERS - 1, head, n - 1, list(range(n))) for head in range(HEADS)])
            torch.testing.assert_close(outputs[step, LAYERS - 1, index].view_as(dense), dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompts", [[5, 64, 99], [64, 99]], ids=["ahead before attention", "ahead behind attention"])
def test_a_step_attends_to_sink_window_and_a_whole_budget(method, prompts, monkeypatch):
    engine, reads, finish = engine_of(method, prompts), [], DecodeStep.finish
    engine.extend(engine.requests, prompts)

    def watch(step: DecodeStep) -> torch.Tensor:
        reads.append(step.reads)
        return finish(step)

    monkeypatch.setattr(DecodeStep, "finish", watch)
    for _ in range(STEPS):
        reads.clear()
        for layer, output in enumerate(engine.decode(engine.requests)):
            for index, request in enumerate(engine.requests):
                n, parts = request.tokens, []
                count = -(-n // 4)
                for head in range(HEADS):
                    pages = sorted(reads[layer].pages[index, head][reads[layer].frames[index, head] >= 0].tolist())
                    assert len(set(pages)) == len(pages) == min(count, 10) and {0, 1, count - 2, count - 1} <= {*pages}
                    assert method.name != EXAMPLE or pages == [0, 1, *range(max(2, count - 8), count)]
                    parts.append(attend(request, layer, head, n - 1, [t for p in pages for t in range(p * 4, min(p * 4 + 4, n))]))
                torch.testing.assert_close(output[index].view(-1, parts[0].shape[-1]), torch.cat(parts), atol=1e-5, rtol=1e-5)
    engine.retrieval.complete_all_transfers()
    engine.retrieval.store.check_integrity(engine.requests[-1].pages[: prompts[-1] // 4], engine.retrieval.policy)


def test_transfers_may_be_as_late_as_their_handles_allow(method):
    early, late = (engine_of(method, [64, 99], stream).run(STEPS) for stream in (InlineStream, DeferredStream))
    assert torch.equal(early, late)


def test_the_registry_is_the_files_and_every_engine_test_runs_them():
    files = {file.stem for file in Path(methods.__file__).parent.glob("*.py")} - {"__init__", "method"}
    assert set(METHODS) == files == {config.method for config in CONFIGS.values()} and next(iter(METHODS)) == "freekv"
