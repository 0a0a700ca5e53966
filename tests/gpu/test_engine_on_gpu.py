"""The retrieval engine on a GPU: compiled kernels, real streams, a captured step; and what delays on any stream do to it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from delays import DELAYS, delayed_streams
from edges import (
    CONTROLS,
    appending_before_the_rotation,
    merging_before_the_correction,
    planning_ahead_before_the_merge,
    planning_before_the_comparison,
    recalling_before_the_plan_ahead,
    scoring_before_the_comparison,
)
from engine import CONFIGS, LAYERS, SCALE, Engine, Request, expected_step, others_answers
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.closing import without_garbage
from sglang_freekv.decode_step import DecodeStep
from sglang_freekv.kernels import reference
from sglang_freekv.kernels.extend import FlashInferExtend, ReferenceExtend
from sglang_freekv.kernels.flash_attention import FlashAttentionExtend
from sglang_freekv.memory_pool.canary import FaultReader
from sglang_freekv.memory_pool.transfer import CudaStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

STEPS, RUNS, PROMPTS = 17, 200, [64, 99, 150]
FEW = PROMPTS[2:]  # of so few requests the next step is planned behind the attention


def cuda_stream() -> CudaStream:
    return CudaStream("cuda")


@pytest.mark.parametrize("resident", [0, 20, 400], ids=["none resident", "some resident", "all resident"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_decode_on_a_gpu_follows_the_paper(config, resident):
    engine = Engine(config, prompts=[5, 64, 99], steps=STEPS, stream=cuda_stream, device="cuda", resident=resident)
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    assert engine.in_place or resident < 400
    for _ in range(STEPS):
        outputs = [output.cpu() for output in engine.decode(engine.requests)]
        for layer, output in enumerate(outputs):
            for index, request in enumerate(engine.requests):
                expected, _ = expected_step(config, request, layer)
                torch.testing.assert_close(output[index].view_as(expected), expected, atol=2e-5, rtol=2e-5)
    assert_nothing_changed_in_host_memory(engine)


@pytest.mark.parametrize("name", ["tight", "on-turn-two-bit-slack", "always-corrected"])
def test_decode_on_a_gpu_has_learned_sinks(name):
    engine = Engine(CONFIGS[name], prompts=[5, 64, 99], steps=STEPS, stream=cuda_stream, device="cuda", sinks=True)
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    for _ in range(STEPS):
        outputs = [output.cpu() for output in engine.decode(engine.requests)]
        for layer, output in enumerate(outputs):
            for index, request in enumerate(engine.requests):
                expected, _ = expected_step(engine.config, request, layer)
                torch.testing.assert_close(output[index].view_as(expected), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("resident", [0, 400], ids=["none resident", "all resident"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_request_that_overflows_changes_no_other_on_a_gpu(config, resident):
    engines = [Engine(config, [64, 99, 48], STEPS, cuda_stream, device="cuda", resident=resident) for _ in range(2)]
    expected, found = (others_answers(engine, STEPS, overflows) for engine, overflows in zip(engines, (False, True)))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def assert_nothing_changed_in_host_memory(engine: Engine) -> None:
    """The canary, if there is one, has found nothing."""
    engine.retrieval.complete_all_transfers()
    assert engine.retrieval.canary is None or not engine.retrieval.canary.faults.any()


class CapturedEngine(Engine):
    """Decodes by one CUDA graph of all layers, with a padding request at the end of the batch."""

    def capture(self) -> None:
        rows, table = self._tensors(self.requests)
        size = len(self.requests) + 1
        self.rows, self.seq_lens = (torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(2))
        self.seq_lens.fill_(1)
        self.table = torch.zeros((size, table.shape[1]), dtype=torch.int32, device="cuda")
        self.tokens = [self._padded(self.new_tokens(layer, self.requests)) for layer in range(LAYERS)]
        self.batch = DecodeBatch(self.rows, self.seq_lens, self.table, torch.full_like(self.table, -1))
        for _ in range(2):
            self._step()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with without_garbage(), torch.cuda.graph(self.graph):
            self.outputs = self._step()

    def _padded(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat((tensor, torch.full_like(tensor[:1], torch.nan))) for tensor in tensors]

    def _step(self) -> list[torch.Tensor]:
        outputs = [self.retrieval.decode(layer, *self.tokens[layer], self.batch, SCALE) for layer in range(LAYERS)]
        self.retrieval.complete_all_transfers()
        return outputs

    def replay(self) -> list[torch.Tensor]:
        for request in self.requests:
            request.tokens += 1
        self.prepare_replay(any(request.tokens % self.config.page_size == 0 for request in self.requests))
        rows, table = self._tensors(self.requests)
        self.rows[:-1], self.table[:-1] = rows, table
        tokens = [request.tokens for request in self.requests]
        self.seq_lens[:-1] = self.to_device(torch.tensor(tokens))
        self.batch.frames[:-1], given, _ = self._begin(self.requests, rows, table, tokens)
        if given is not None:
            self.retrieval.refill(table, given)
        for layer in range(LAYERS):
            for static, new in zip(self.tokens[layer], self._padded(self.new_tokens(layer, self.requests))):
                static.copy_(new)
        self.graph.replay()
        return [output[:-1].clone() for output in self.outputs]


@pytest.mark.parametrize(
    "name",
    [
        "tight",
        "slack",
        "least-window",
        "always-corrected",
        "two-bit",
        "on-turn",
        "on-turn-two-bit-slack",
        "canary",
        "int8",
        "int8-two-bit-slack",
        "fp8",
        "fp8-e5m2-slack-nhd",
        "louiskv",
        "quest",
        "arkvale-slack",
    ],
)
@pytest.mark.parametrize("resident", [0, 30, 400], ids=["none resident", "some resident", "all resident"])
@pytest.mark.parametrize("prompts", [PROMPTS, FEW], ids=["", "one request"])
def test_a_captured_step_is_the_eager_one(name, prompts, resident):
    eager, captured = (
        cls(CONFIGS[name], prompts, STEPS, cuda_stream, device="cuda", resident=resident) for cls in (Engine, CapturedEngine)
    )
    captured.capture()
    for engine in (eager, captured):
        engine.extend(engine.requests, prompts)
    for _ in range(STEPS):
        for expected, actual in zip(eager.decode(eager.requests), captured.replay()):
            assert torch.equal(actual, expected)
    rows = torch.tensor([request.row for request in captured.requests], device="cuda")
    captured.retrieval.complete_all_transfers()
    eager.retrieval.complete_all_transfers()
    assert torch.equal(captured.retrieval.row_counts(rows), eager.retrieval.row_counts(rows))
    assert_nothing_changed_in_host_memory(captured)


@pytest.mark.parametrize("tau", [-2, 2], ids=["recall ahead", "corrections"])
def test_a_captured_step_tells_a_page_that_changed(tau):
    engine = CapturedEngine(replace(CONFIGS["canary"], tau=tau), PROMPTS, STEPS, cuda_stream, device="cuda")
    engine.capture()
    engine.extend(engine.requests, PROMPTS)
    engine.retrieval.complete_all_transfers()
    torch.cuda.synchronize()
    request, (layer, head) = engine.requests[2], (1, 1)
    changed = request.pages[: PROMPTS[2] // 4].tolist()
    for page in changed:
        engine.retrieval.host.layers[layer][page, head, 1, 2].view(torch.int32)[3] ^= 1 << 9
    for _ in range(STEPS):
        engine.replay()
    told = FaultReader().read(engine.retrieval.canary.faults.cpu())
    assert told and {(fault.layer, fault.head) for fault in told} == {(layer, head)} and {fault.host_page for fault in told} <= set(changed)


@pytest.mark.parametrize("resident", [0, 60, 400], ids=["none resident", "some resident", "all resident"])
def test_passes_with_and_without_a_graph_follow_each_other(resident):
    eager, captured = (
        cls(CONFIGS["slack"], PROMPTS, STEPS, cuda_stream, device="cuda", resident=resident) for cls in (Engine, CapturedEngine)
    )
    captured.capture()
    outputs = []
    for engine, step in ((eager, lambda: eager.decode(eager.requests)), (captured, captured.replay)):
        row = min({*range(1, 8)} - {request.row for request in engine.requests})
        late = engine.admit(40, 40 + STEPS, row)
        told = engine.extend(engine.requests, PROMPTS)
        told += [output.clone() for _ in range(2) for output in engine.decode(engine.requests)]
        told += [output for _ in range(3) for output in step()]
        told += engine.extend([late], [24])  # beside what the graph left
        told += [output for _ in range(2) for output in step()]
        told += engine.extend([late], [40])
        told += [output.clone() for _ in range(2) for output in engine.decode([*engine.requests, late])]
        outputs.append(told + [output for _ in range(3) for output in step()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_delays_inside_a_captured_step_change_nothing():
    expected = _replayed(cuda_stream)
    for seed in range(20):
        assert torch.equal(_replayed(delayed_streams(seed)), expected), f"capture {seed} differs"


def test_an_edge_removed_from_a_captured_step_is_caught():
    expected = _replayed(cuda_stream)
    assert any(not torch.equal(_replayed(delayed_streams(seed), merging_before_the_correction), expected) for seed in range(20))


def _replayed(stream, broken=None, name: str = "tight") -> torch.Tensor:
    """Outputs of captured steps; what delays there are is drawn once, and happens in each."""
    engine = CapturedEngine(CONFIGS[name], PROMPTS, STEPS, stream, device="cuda")
    if broken is not None:
        broken(engine.retrieval)
    engine.capture()
    engine.extend(engine.requests, PROMPTS)
    return torch.stack([torch.stack(engine.replay()) for _ in range(STEPS)])


class LateTest:
    """A policy whose correction test is late: behind the score, beside which the plan has taken its place."""

    def __init__(self, policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def corrected(self, *arguments, **options) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)  # longer than a busy host takes to launch the plan
        return self._policy.corrected(*arguments, **options)


def _with_a_late_test(retrieval) -> None:
    retrieval.policy = LateTest(retrieval.policy)


def _planning_before_the_late_test(retrieval) -> None:
    _with_a_late_test(retrieval)
    planning_before_the_comparison(retrieval)


def _scoring_before_the_late_test(retrieval) -> None:
    _with_a_late_test(retrieval)
    scoring_before_the_comparison(retrieval)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_score_on_turn_waits_for_the_comparison(captured):
    """The plan waits for both, whatever the score does. A mask that is not written yet holds what its memory held before."""
    run = partial(_replayed if captured else _run, name="on-turn")
    expected = run(cuda_stream)
    assert torch.equal(run(cuda_stream, _with_a_late_test), expected)
    assert not torch.equal(run(cuda_stream, _scoring_before_the_late_test), expected), "the negative control"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_plan_that_follows_the_score_waits_for_main_too(captured):
    run = _replayed if captured else _run
    expected = run(cuda_stream)
    assert torch.equal(run(cuda_stream, _with_a_late_test), expected)
    assert not torch.equal(run(cuda_stream, _planning_before_the_late_test), expected), "the negative control"


def _rotating_late(retrieval) -> None:
    decode, rotate = retrieval.decode, DecodeStep.rotate

    def late(step: DecodeStep) -> None:
        torch.cuda._sleep(2_000_000)
        rotate(step)

    def with_late_rotation(*args):
        with mock.patch.object(DecodeStep, "rotate", late):
            return decode(*args)

    retrieval.decode = with_late_rotation


def _appending_before_the_late_rotation(retrieval) -> None:
    _rotating_late(retrieval)
    appending_before_the_rotation(retrieval)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_an_append_of_coded_kv_waits_for_the_rotation(captured):
    run = partial(_replayed if captured else _run, name="int8")
    expected = run(cuda_stream)
    assert torch.equal(run(cuda_stream, _rotating_late), expected)
    assert not torch.equal(run(cuda_stream, _appending_before_the_late_rotation), expected), "the negative control"


class ScheduledEngine(CapturedEngine):
    """Extends as SGLang's overlap loop does: a stream of the scheduler's own writes the page table, which after a graph is not
    ordered behind it. Delays on that stream and before each graph are drawn by ``random``."""

    def __init__(self, stream, generator: random.Random | None) -> None:
        super().__init__(CONFIGS["tight"], PROMPTS, 4 * STEPS, stream, device="cuda")
        self.random, self.schedule = generator, torch.cuda.Stream()
        self.tables = torch.zeros((40, 400 * self.config.page_size), dtype=torch.int64, device="cuda")
        self.rows_of_pass = torch.zeros(1, dtype=torch.int64, device="cuda")  # SGLang's buffer, which each pass fills on its stream
        self.hits = 0
        self.scheduled: list[torch.Tensor] = []  # SGLang keeps a batch until its results are there; the host is further ahead here
        torch.cuda.synchronize()
        self.capture()
        self.extend(self.requests, PROMPTS)

    def _delay(self) -> None:
        if self.random is not None:
            torch.cuda._sleep(*self.random.choices(list(DELAYS), DELAYS.values()))

    def replay(self) -> list[torch.Tensor]:
        outputs = super().replay()
        self._delay()
        return outputs

    def hit(self, request: Request, row: int) -> list[torch.Tensor]:
        """A newcomer with the text and all full pages of ``request`` and five tokens of its own."""
        prefix = request.tokens // self.config.page_size * self.config.page_size
        own = self.free_pages[-4:]
        pages = torch.cat((request.pages[: prefix // self.config.page_size], own))
        newcomer = Request(prefix + 5, request.total, row, pages, self.generator, tokens=prefix)
        newcomer.q, newcomer.k, newcomer.v = request.q, request.k, request.v
        size, self.hits = self.config.page_size, self.hits + 1
        with torch.cuda.stream(self.schedule):
            self._delay()
            self.tables[self.hits, : len(pages) * size : size] = self.to_device(pages * size)
            scheduled = torch.full_like(self.rows_of_pass, self.hits)
            self.planner.note_tables(scheduled)
        self.scheduled.append(scheduled)
        torch.cuda.current_stream().wait_stream(self.schedule)
        self.rows_of_pass.copy_(scheduled)
        rows, table = self._tensors([newcomer])
        plan = self.planner.plan(rows, table, torch.full_like(table, -1, dtype=torch.int32), [prefix], [5], self.tables)
        self.retrieval.prepare_extend(plan)
        tokens = [[self.to_device(getattr(newcomer, x)[layer, prefix : prefix + 5]) for x in "qkv"] for layer in range(LAYERS)]
        return [self.retrieval.extend(layer, *tokens[layer], plan.batch, SCALE) for layer in range(LAYERS)]


def _newcomers(stream=cuda_stream, generator=None, broken=None) -> torch.Tensor:
    """Prefix hits between captured steps, on all pages of a request that goes on decoding, those just filled included."""
    engine = ScheduledEngine(stream, generator)
    if broken is not None:
        broken(engine)
    row = min({*range(1, 8)} - {request.row for request in engine.requests})
    told = []
    for turn in range(12):
        for _ in range(1 + turn % 3):
            told += engine.replay()
        told += engine.hit(engine.requests[turn % len(PROMPTS)], row)
    engine.retrieval.complete_all_transfers()
    return torch.cat([output.flatten() for output in told])


def _looks_beside_graphs() -> tuple[list[bool], list[bool], list[bool]]:
    """Of four newcomers behind a late graph each: whether their prefixes arrived, whether the graph ran on, and whether it fills a page."""
    engine = ScheduledEngine(cuda_stream, None)
    row = min({*range(1, 8)} - {request.row for request in engine.requests})
    arrived, running, fills = [], [], []
    for _ in range(4):
        engine.hit(engine.requests[0], row)
        torch.cuda.synchronize()
        sleep, noted = torch.cuda._sleep, engine.planner.note_graph

        def note_and_sleep(fills_page: bool) -> None:
            noted(fills_page)
            sleep(2_000_000_000)  # a second: the host may be busy

        with mock.patch.object(engine.planner, "note_graph", note_and_sleep):
            engine.replay()
        graph = engine.retrieval.streams.transfers.mark()
        begun = engine.retrieval.store.staging.begin
        seen = []

        def begin_and_look(*args) -> None:
            begun(*args)
            time.sleep(0.02)
            seen.extend((engine.retrieval.store.staging.arrived[0].event.query(), graph.event.query()))

        with mock.patch.object(engine.retrieval.store.staging, "begin", begin_and_look):
            engine.hit(engine.requests[0], row)
        torch.cuda.synchronize()
        arrived.append(seen[0])
        running.append(not seen[1])
        fills.append(any(request.tokens % engine.config.page_size == 0 for request in engine.requests))
    return arrived, running, fills


def test_prefixes_come_beside_a_graph():
    _looks_beside_graphs()  # loads kernels and pins memory, for which the driver has the host wait
    arrived, running, fills = _looks_beside_graphs()
    assert running == [True] * 4, "the host waited for the device"
    assert arrived == [not fill for fill in fills] and any(arrived) and not all(arrived)


class LateAttention(ReferenceExtend):
    """Attends long after a layer's context is there: the host is ahead by a graph."""

    def __call__(self, *args) -> torch.Tensor:
        torch.cuda._sleep(100_000_000)
        return super().__call__(*args)


def _attending_late(engine) -> None:
    engine.retrieval.extend_attention = LateAttention()


def test_prefixes_beside_a_graph_are_those_behind_it():
    expected = _newcomers(broken=lambda engine: setattr(engine.retrieval.streams.transfers, "mark", lambda: None))
    assert torch.equal(_newcomers(), expected)
    assert torch.equal(_newcomers(broken=_attending_late), expected)
    for seed in range(RUNS // 4):
        assert torch.equal(_newcomers(delayed_streams(seed), random.Random(seed)), expected), f"run {seed} differs"


def _without_waiting_for_the_tables(engine) -> None:
    """Pages are looked up before the scheduler has written them."""
    staging, begin = engine.retrieval.store.staging, engine.retrieval.store.staging.begin
    staging.begin = lambda tokens, prefixes, behind=None: begin(tokens, prefixes, behind and behind[:1])


def _by_the_rows_of_the_pass(engine) -> None:
    """Pages are looked up in the tables of the requests that the graph decodes."""
    note = engine.planner.note_tables
    engine.planner.note_tables = lambda rows: note(engine.rows_of_pass)


def _without_waiting_for_the_pass_before_the_graph(engine) -> None:
    """A staging buffer is overwritten while an extend before the graph still computes on it."""
    _attending_late(engine)
    staging, begin = engine.retrieval.store.staging, engine.retrieval.store.staging.begin
    staging.begin = lambda tokens, prefixes, behind=None: begin(tokens, prefixes, behind and behind[1:])


def _without_asking_whether_a_page_is_filled(engine) -> None:
    """A page is read that the graph has yet to write."""
    note = engine.planner.note_graph
    engine.planner.note_graph = lambda fills_page: note(False)


@pytest.mark.parametrize(
    "remove_edge",
    [
        _without_waiting_for_the_tables,
        _by_the_rows_of_the_pass,
        _without_waiting_for_the_pass_before_the_graph,
        _without_asking_whether_a_page_is_filled,
    ],
)
def test_an_edge_removed_beside_a_graph_is_caught(remove_edge):
    expected = _newcomers()
    assert any(not torch.equal(_newcomers(delayed_streams(seed), random.Random(seed), remove_edge), expected) for seed in range(40))


def flash_infer(query_heads: int, kv_heads: int, dim: int, size: int) -> FlashInferExtend:
    pytest.importorskip("flashinfer")
    return FlashInferExtend(query_heads, kv_heads, dim, torch.bfloat16, size, "cuda", 128 << 20)


def flash_attention(query_heads: int, kv_heads: int, dim: int, size: int) -> FlashAttentionExtend:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs a Hopper GPU")
    return FlashAttentionExtend(size, "cuda")


@pytest.mark.parametrize("size", [8, 24, 32, 64, 128])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "learned sinks"])
@pytest.mark.parametrize("make, dim", [(flash_infer, 64), *((flash_attention, dim) for dim in (64, 80, 128, 256))])
def test_extends_are_as_the_reference_s(make, dim, size, sinks):
    """Staged and in place, through one workspace. In place the plan does not wait for the device. FlashInfer compiles each dim for minutes."""
    heads, group, dtype = 2, 3, torch.bfloat16
    kernel = make(heads * group, heads, dim, size)
    learned_sinks = 3 * torch.randn(heads * group, dtype=dtype, device="cuda") if sinks else None
    for query_lens, key_lens in (([5, 1, 300, 64], [5, 700, 1300, 128]), ([1], [1])):
        queries, keys, values = (
            torch.randn(sum(lens), count, dim, dtype=dtype, device="cuda")
            for lens, count in ((query_lens, heads * group), (key_lens, heads), (key_lens, heads))
        )
        exact = [x.float() for x in (queries, keys, values)]
        expected = reference.extend_attention(*exact, query_lens, key_lens, dim**-0.5, learned_sinks=learned_sinks)
        kernel.plan(query_lens, key_lens)
        torch.testing.assert_close(kernel(queries, keys, values, dim**-0.5, learned_sinks).float(), expected, atol=2e-2, rtol=2e-2)
        width = max(key_lens) // size + 1
        frames = torch.randperm(len(key_lens) * width, device="cuda").int().view(-1, width)
        pools = torch.full((2, frames.numel(), size, heads, dim), torch.nan, dtype=dtype, device="cuda")
        for b, parts in enumerate(zip(keys.split(key_lens), values.split(key_lens))):
            tokens = torch.arange(key_lens[b], device="cuda")
            for pool, part in zip(pools, parts):
                pool[frames[b, tokens // size].long(), tokens % size] = part
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel.plan(query_lens, key_lens, frames)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(kernel(queries, *pools, dim**-0.5, learned_sinks).float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("key_lens", [[40, 300, 129], [1024, 999, 1000]], ids=["short contexts", "long contexts"])
@pytest.mark.parametrize("make", [flash_infer, flash_attention])
def test_a_request_s_nan_reaches_no_other_staged_one(make, key_lens):
    """Keys, values and queries of the second request are NaN, and what lies behind the last one is."""
    heads, group, dim, query_lens = 2, 3, 64, [10, 20, 30]
    kernel = make(heads * group, heads, dim, 8)
    buffers = torch.full((2, sum(key_lens) + 300, heads, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    contexts, queries = buffers[:, : sum(key_lens)], torch.randn(sum(query_lens), heads * group, dim, dtype=torch.bfloat16, device="cuda")
    contexts.copy_(torch.randn_like(contexts))
    expected = reference.extend_attention(queries.float(), *contexts.float(), query_lens, key_lens, dim**-0.5)
    contexts.split(key_lens, 1)[1].fill_(torch.nan)
    queries.split(query_lens)[1].fill_(torch.nan)
    kernel.plan(query_lens, key_lens)
    found = kernel(queries, *contexts, dim**-0.5, None).float().split(query_lens)
    for b, told in enumerate(expected.split(query_lens)):
        if b != 1:
            torch.testing.assert_close(found[b], told, atol=2e-2, rtol=2e-2)


def test_a_decode_step_never_waits_for_the_device():
    engine = Engine(CONFIGS["tight"], PROMPTS, STEPS, cuda_stream, device="cuda")
    engine.run(steps=3)  # compiles
    tokens = [engine.new_tokens(layer, engine.requests) for layer in range(LAYERS)]
    rows, table = engine._tensors(engine.requests)
    seq_lens = torch.tensor([request.tokens + 1 for request in engine.requests], device="cuda")
    batch = DecodeBatch(rows, seq_lens, table, torch.full_like(table, -1, dtype=torch.int32))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(LAYERS):
            engine.retrieval.decode(layer, *tokens[layer], batch, SCALE)
        engine.retrieval.complete_all_transfers()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _run(stream, broken=None, name: str = "tight", prompts: list[int] = PROMPTS) -> torch.Tensor:
    engine = Engine(CONFIGS[name], prompts, STEPS, stream, device="cuda")
    if broken is not None:
        broken(engine.retrieval)
    engine.extend(engine.requests, [prompt * 3 // 16 * 4 for prompt in prompts])
    chunks = [output for output in engine.extend(engine.requests, prompts)]
    steps = [torch.stack(engine.decode(engine.requests)) for _ in range(STEPS)]
    assert_nothing_changed_in_host_memory(engine)
    return torch.cat([output.flatten() for output in (*chunks, *steps)])


PARTS = [range(start, start + RUNS // 4) for start in range(0, RUNS, RUNS // 4)]  # a process each, where there are several


@pytest.mark.parametrize("prompts, seeds, name", [
    *((PROMPTS, seeds, "tight") for seeds in PARTS), (FEW, PARTS[0], "tight"), (PROMPTS, PARTS[0], "on-turn"), (FEW, PARTS[0], "on-turn"),
    (PROMPTS, PARTS[0], "int8"), (FEW, PARTS[0], "int8"),
], ids=[*(f"from {seeds[0]}" for seeds in PARTS), "one request", "on turn", "one request, on turn", "int8", "one request, int8"])  # fmt: skip
def test_delays_on_any_stream_change_nothing(prompts, seeds, name):
    expected = _run(cuda_stream, prompts=prompts, name=name)
    assert expected.isfinite().all()
    for seed in seeds:
        assert torch.equal(_run(delayed_streams(seed), prompts=prompts, name=name), expected), f"run {seed} differs"


def test_the_canary_takes_no_delay_for_a_change():
    expected = _run(cuda_stream)
    for seed in range(RUNS // 4):
        assert torch.equal(_run(delayed_streams(seed), name="canary"), expected), f"run {seed} differs"


# these need a comparison or a rotation that is late
LATE = planning_before_the_comparison, scoring_before_the_comparison, appending_before_the_rotation
EDGES = [control for control in CONTROLS if control not in LATE]


@pytest.mark.parametrize(
    "remove_edge, prompts",
    [*((edge, PROMPTS) for edge in EDGES), (planning_ahead_before_the_merge, FEW), (recalling_before_the_plan_ahead, FEW)],
)
def test_a_removed_edge_is_caught_on_a_gpu(remove_edge, prompts):
    """The negative control of the delays."""
    expected = _run(cuda_stream, prompts=prompts)
    assert any(not torch.equal(_run(delayed_streams(seed), remove_edge, prompts=prompts), expected) for seed in range(40))
