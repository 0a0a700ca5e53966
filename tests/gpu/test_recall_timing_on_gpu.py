"""Recall timed by the GPU's clock inside a replayed graph: what is recalled takes time, what is late is waited for, no bit changes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.needle import tasks
from engine import CONFIGS, LAYERS, SCALE, Engine
from serving import TestServer, freekv, start_all, stop_all
from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.closing import without_garbage
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.memory_pool.recall_clock import RecallTimes
from sglang_freekv.memory_pool.transfer import CudaStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

STEPS, PROMPTS = 12, [64, 99, 150]
LATE = 2_000_000  # cycles: a millisecond, where a step takes a tenth of it


class TimedEngine(Engine):
    """Decodes by one CUDA graph, which is captured with rows of padding as SGLang's are.

    Args:
        late: what is delayed: the recall of "corrections" or that "ahead", or the "attention" to present pages.
    """

    def __init__(self, config: FreeKVConfig, every: int, late: str | None = None) -> None:
        super().__init__(replace(config, recall_timing=every), PROMPTS, STEPS, lambda: CudaStream("cuda"), device="cuda")
        recall, attend = self.retrieval.recall, kernels.attend_present

        def recall_late(host_pool, misses, *args, **stamp) -> None:
            if late == ("corrections" if misses is self.retrieval.misses_now else "ahead"):
                torch.cuda._sleep(LATE)
            recall(host_pool, misses, *args, **stamp)

        def attend_late(*args, **stamp) -> None:
            torch.cuda._sleep(LATE)
            attend(*args, **stamp)

        self.retrieval.recall = recall_late
        with mock.patch.object(kernels, "attend_present", attend_late if late == "attention" else attend):
            self.capture()

    def capture(self) -> None:
        rows, table = self._tensors(self.requests)
        self.rows, self.seq_lens, self.table = torch.zeros_like(rows), torch.ones_like(rows), torch.zeros_like(table)
        self.tokens = [self.new_tokens(layer, self.requests) for layer in range(LAYERS)]
        self.batch = DecodeBatch(self.rows, self.seq_lens, self.table, torch.full_like(self.table, -1))
        for _ in range(2):
            self.step()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with without_garbage(), torch.cuda.graph(self.graph):
            self.outputs = self.step()

    def step(self) -> list[torch.Tensor]:
        outputs = [self.retrieval.decode(layer, *self.tokens[layer], self.batch, SCALE) for layer in range(LAYERS)]
        self.retrieval.end_step(self.rows)
        return outputs

    def replay(self) -> torch.Tensor:
        for request in self.requests:
            request.tokens += 1
        self.prepare_replay(True)
        rows, table = self._tensors(self.requests)
        self.rows.copy_(rows)
        self.table.copy_(table)
        self.seq_lens.copy_(torch.tensor([request.tokens for request in self.requests]))
        for layer in range(LAYERS):
            for static, new in zip(self.tokens[layer], self.new_tokens(layer, self.requests)):
                static.copy_(new)
        self.graph.replay()
        return torch.stack(self.outputs)

    def times(self) -> RecallTimes:
        return RecallTimes(*self.retrieval.clock.snapshot().tolist())


def run(name: str, every: int = 1, late: str | None = None, **changes) -> tuple[torch.Tensor, RecallTimes | None]:
    """Outputs of all steps, and what the clock says."""
    engine = TimedEngine(replace(CONFIGS[name], **changes), every, late)
    engine.extend(engine.requests, PROMPTS)
    outputs = torch.stack([engine.replay() for _ in range(STEPS)])
    return outputs, engine.times() if every else None


@pytest.mark.parametrize("name", ["tight", "always-corrected", "never-corrected"])
@pytest.mark.parametrize("every, sampled", [(1, 12), (5, 3)])
def test_recall_takes_time_and_no_output_changes(name, every, sampled):
    outputs, times = run(name, every)
    assert times.sampled_steps == sampled, "steps of padding alone are none"
    assert 0 < times.recall_ns < 1e9 and 0 <= times.wait_ns <= times.recall_ns
    assert torch.equal(outputs, run(name, 0)[0])


@pytest.mark.parametrize("name, late", [("quest", "corrections"), ("never-corrected", "ahead")])
def test_a_recall_that_begins_late_is_waited_for(name, late):
    outputs, times = run(name, late=late)
    assert times.wait_ns == times.recall_ns > 0, "each begins behind what it could have run beside"
    assert torch.equal(outputs, run(name, 0)[0])


def test_a_correction_beside_a_long_attention_is_not_waited_for():
    _, times = run("quest", late="attention")
    assert times.wait_ns == 0 < times.recall_ns


def test_what_fits_the_budget_takes_no_time():
    assert run("tight", budget_tokens=400)[1] == RecallTimes(0, 0, STEPS)


def test_an_eager_step_is_timed_too():
    config = replace(CONFIGS["tight"], recall_timing=1)
    engine = Engine(config, PROMPTS, STEPS, lambda: CudaStream("cuda"), device="cuda")
    engine.extend(engine.requests, PROMPTS)
    rows = engine._tensors(engine.requests)[0]
    for _ in range(STEPS):
        engine.decode(engine.requests)
        engine.retrieval.end_step(rows)
    times = RecallTimes(*engine.retrieval.clock.snapshot().tolist())
    assert times.sampled_steps == STEPS and 0 <= times.wait_ns <= times.recall_ns and times.recall_ns > 0


def test_a_server_tells_it(tmp_path):
    """Decode graphs and the overlap schedule: sums arrive with the results of a step, and every fourth step is sampled."""
    flags = freekv(512, tau=0.9, host_memory=4, recall_timing=4) | {
        "--device": "cuda", "--dtype": "bfloat16", "--mem-fraction-static": 0.4, "--sampling-backend": "pytorch", "--enable-metrics": True,
    }  # fmt: skip
    (server,) = start_all([TestServer(flags, tmp_path / "log.txt")])
    prompt = tasks.make_document(np.random.default_rng(7), 4000, needle_count=2).token_ids
    before = server.flush()["recall_timing"]["sampled_steps"]
    server.generate(prompt, 81)
    told = server.when_idle()["recall_timing"]
    stop_all([server])
    assert told["sampled_steps"] - before in (20, 21) and 0 < told["recall_seconds"] < 1  # a step may be launched behind the last token
    assert 0 <= told["recall_wait_seconds"] <= told["recall_seconds"]
