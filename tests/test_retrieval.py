"""The retrieval engine against the paper's semantics written as loops, on random tensors: any lengths, any order of transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from sglang_freekv.batch import DecodeBatch, ExtendBatch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.policy import FreeKV
from sglang_freekv.retrieval import CORRECTED, RECALLED, Retrieval

torch.set_num_threads(1)
LAYERS, HEADS, GROUP, DIM = 3, 2, 3, 8


class DeferredStream:
    """Runs work as late as its handles allow, where ``InlineStream`` runs it as early as possible."""

    def __init__(self) -> None:
        self.queue = []

    def submit(self, work):
        self.queue.append(work)
        return _Deferred(self, work)


class _Deferred:
    def __init__(self, stream: DeferredStream, work) -> None:
        self.stream, self.work = stream, work

    def wait(self) -> None:
        while any(work is self.work for work in self.stream.queue):
            self.stream.queue.pop(0)()


@dataclass
class Request:
    """One request with all its queries, keys and values known beforehand."""

    prompt: int
    total: int
    row: int
    pages: torch.Tensor
    generator: torch.Generator
    tokens: int = 0
    speculative: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        def walk(heads: int) -> torch.Tensor:
            steps = torch.randn(LAYERS, self.total, heads, DIM, generator=self.generator)
            return 0.6 * steps + torch.randn(LAYERS, 1, heads, DIM, generator=self.generator)

        self.q, self.k, self.v = walk(HEADS * GROUP), walk(HEADS), walk(HEADS)


def attend(request: Request, layer: int, head: int, position: int, tokens: list[int]) -> torch.Tensor:
    q = request.q[layer, position].view(HEADS, GROUP, DIM)[head]
    k, v = request.k[layer, tokens, head], request.v[layer, tokens, head]
    return (q @ k.T / DIM**0.5).softmax(-1) @ v


def choose(config: FreeKVConfig, request: Request, layer: int, head: int, position: int, tokens: int) -> set[int]:
    """Pages chosen by the query at ``position`` among the candidates of a context of ``tokens`` tokens."""
    size = config.page_size
    last = -(-tokens // size) - config.window_pages
    candidates = list(range(config.sink_pages, last))
    if not candidates:
        return set()
    keys = request.k[layer, : last * size, head].view(last, size, DIM)[config.sink_pages :]
    q = request.q[layer, position].view(HEADS, GROUP, 1, DIM)[head]
    scores = torch.maximum(q * keys.amax(1), q * keys.amin(1)).sum(-1) / DIM**0.5
    pooled = scores.softmax(-1).mean(0)
    return {candidates[index] for index in pooled.sort(descending=True, stable=True).indices[: config.selected_pages].tolist()}


def expected_step(config: FreeKVConfig, request: Request, layer: int) -> tuple[torch.Tensor, int]:
    """Output of one decode step of one layer, and how many kv heads were corrected."""
    n, size, corrected, outputs = request.tokens, config.page_size, 0, []
    for head in range(HEADS):
        now, before = (request.q[layer, n - back].view(HEADS, GROUP, DIM)[head] for back in (1, 2))
        chosen = request.speculative.get((layer, head))
        if n == request.prompt + 1:
            chosen = choose(config, request, layer, head, n - 2, n)
        if F.cosine_similarity(now, before, dim=-1).mean() < config.tau:
            chosen, corrected = choose(config, request, layer, head, n - 1, n), corrected + 1
        pages = -(-n // size)
        attended = {p for p in range(pages) if p < config.sink_pages or p >= pages - config.window_pages} | chosen
        tokens = [t for p in sorted(attended) for t in range(p * size, min((p + 1) * size, n))]
        outputs.append(attend(request, layer, head, n - 1, tokens))
        request.speculative[layer, head] = choose(config, request, layer, head, n - 1, n + 1)
    return torch.cat(outputs), corrected


class Engine:
    """A retrieval engine and the requests it serves."""

    def __init__(self, config: FreeKVConfig, prompts: list[int], steps: int, stream, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = KVShape(LAYERS, 0, HEADS, HEADS * GROUP, DIM, 2 * DIM, 4)
        self.config, self.generator, self.free_pages = config, generator, torch.randperm(400, generator=generator) + 1
        store = Store.build(config, shape, 400 * config.page_size, 8, (2, DIM), torch.float32, "cpu", stream)
        self.retrieval = Retrieval(config, FreeKV(config.tau), store, stream)
        rows = torch.randperm(8, generator=generator)[: len(prompts)] + 1
        self.requests = [self.admit(prompt, prompt + steps, int(row)) for prompt, row in zip(prompts, rows)]

    def admit(self, prompt: int, total: int, row: int) -> Request:
        count = total // self.config.page_size + 2
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return Request(prompt, total, row, pages, self.generator)

    def _tensors(self, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(request.pages) for request in requests)
        table = torch.stack([F.pad(request.pages, (0, width - len(request.pages))) for request in requests])
        return torch.tensor([request.row for request in requests]), table

    def extend(self, requests: list[Request], upto: list[int]) -> list[torch.Tensor]:
        rows, table = self._tensors(requests)
        spans = [(request, request.tokens, end) for request, end in zip(requests, upto)]
        batch = ExtendBatch.build(rows, table, [a for _, a, _ in spans], [b - a for _, a, b in spans], self.config.page_size)
        outputs = [
            self.retrieval.extend(
                layer, *(torch.cat([getattr(r, x)[layer, a:b] for r, a, b in spans]) for x in "qkv"), batch, DIM**-0.5
            )
            for layer in range(LAYERS)
        ]
        for request, _, end in spans:
            request.tokens = end
        return outputs

    def decode(self, requests: list[Request]) -> list[torch.Tensor]:
        rows, table = self._tensors(requests)
        for request in requests:
            request.tokens += 1
        batch = DecodeBatch(rows, torch.tensor([request.tokens for request in requests]), table)
        return [
            self.retrieval.decode(
                layer, *(torch.stack([getattr(r, x)[layer, r.tokens - 1] for r in requests]) for x in "qkv"), batch, DIM**-0.5
            )
            for layer in range(LAYERS)
        ]

    def run(self, steps: int) -> torch.Tensor:
        self.extend(self.requests, [request.prompt for request in self.requests])
        return torch.stack([torch.stack(self.decode(self.requests)) for _ in range(steps)])


CONFIGS = {
    "tight": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=()),
    "one-page-window": FreeKVConfig(budget_tokens=16, sink_tokens=4, window_tokens=4, page_size=4, tau=0.8, dense_layers=()),
    "no-sink": FreeKVConfig(budget_tokens=24, sink_tokens=0, window_tokens=16, page_size=8, tau=0.7, dense_layers=()),
    "one-token-pages": FreeKVConfig(budget_tokens=12, sink_tokens=2, window_tokens=3, page_size=1, tau=0.5, dense_layers=()),
    "always-corrected": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=2, dense_layers=()),
    "never-corrected": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=-2, dense_layers=()),
}


@pytest.mark.parametrize("stream", [InlineStream, DeferredStream])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_decode_follows_the_paper(config, stream):
    engine = Engine(config, prompts=[5, 64, 99], steps=17, stream=stream())
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    corrected = [0] * len(engine.requests)
    for _ in range(17):
        outputs = engine.decode(engine.requests)
        for layer, output in enumerate(outputs):
            for index, request in enumerate(engine.requests):
                expected, flagged = expected_step(config, request, layer)
                corrected[index] += flagged
                torch.testing.assert_close(output[index].view_as(expected), expected, atol=1e-5, rtol=1e-5)
    for index, request in enumerate(engine.requests):
        assert engine.retrieval.row_counts(torch.tensor([request.row]))[0, CORRECTED] == corrected[index]
    assert any(corrected) == (config.tau > -1)
    if config.tau > 1:
        assert corrected == [17 * LAYERS * HEADS] * len(corrected)


@pytest.mark.parametrize("budget", [108, 112, 400])
def test_a_budget_that_covers_the_context_is_dense(budget):
    config = FreeKVConfig(budget_tokens=budget, sink_tokens=8, window_tokens=8, page_size=4, tau=0.9, dense_layers=())
    engine = Engine(config, prompts=[3, 87], steps=20, stream=InlineStream())
    outputs = engine.run(steps=20)
    for step, layer in [(0, 0), (1, 2), (8, 1), (19, 2)]:
        for index, request in enumerate(engine.requests):
            n = request.prompt + step + 1
            dense = torch.cat([attend(request, layer, head, n - 1, list(range(n))) for head in range(HEADS)])
            torch.testing.assert_close(outputs[step, layer, index].view_as(dense), dense, atol=1e-5, rtol=1e-5)
    assert engine.retrieval.counts[..., RECALLED].sum() == 0


def test_a_budget_one_page_short_is_not_dense():
    outputs = {
        budget: Engine(
            FreeKVConfig(budget_tokens=budget, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=()), [87], 20, InlineStream()
        ).run(steps=20)
        for budget in (104, 108)
    }
    assert torch.equal(outputs[104][:17], outputs[108][:17])
    assert not torch.allclose(outputs[104][17:], outputs[108][17:])


@pytest.mark.parametrize("chunks", [[48, 100], [4, 8, 12, 100], [96, 100]])
def test_chunks_and_prefix_hits_leave_no_trace(chunks):
    config = CONFIGS["tight"]
    whole, parts = (Engine(config, prompts=[100], steps=16, stream=DeferredStream()) for _ in range(2))
    whole.extend(whole.requests, [100])
    for end in chunks:
        parts.extend(parts.requests, [end])
    for _ in range(16):
        for expected, actual in zip(whole.decode(whole.requests), parts.decode(parts.requests)):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_prefix_is_shared_by_pages_and_a_row_is_handed_on():
    config = CONFIGS["tight"]
    engine = Engine(config, prompts=[100], steps=16, stream=DeferredStream())
    engine.run(steps=16)
    first = engine.requests[0]
    second = Request(100, 116, first.row, torch.cat((first.pages[:20], engine.free_pages[:10])), engine.generator, tokens=80)
    second.q, second.k, second.v = first.q, first.k, first.v  # the same text, found in the tree; the same row, just freed
    fresh = Engine(config, prompts=[100], steps=16, stream=InlineStream())
    engine.extend([second], [100])
    fresh.extend(fresh.requests, [100])
    for _ in range(16):
        for expected, actual in zip(fresh.decode(fresh.requests), engine.decode([second])):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_recall_after_offload_is_bit_exact():
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=24, stream=DeferredStream())
    engine.run(steps=24)
    request, retrieval = engine.requests[0], engine.retrieval
    for layer in range(LAYERS):
        retrieval.complete_transfers(layer)
        slot_pages = retrieval.cache.slot_pages[layer][request.row]
        for head in range(HEADS):
            for slot, page in enumerate(slot_pages[head].tolist()):
                if 0 <= page < request.tokens // 4:
                    here = slice(page * 4, page * 4 + 4)
                    unit = retrieval.host.layers[layer][request.pages[page], head]
                    resident = retrieval.cache.keys[layer][request.row * retrieval.cache.num_slots + slot, :, head]
                    assert torch.equal(unit[0], request.k[layer, here, head]) and torch.equal(unit[1], request.v[layer, here, head])
                    assert torch.equal(resident, request.k[layer, here, head])


def test_the_digest_check_tells_corruption_from_nan():
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=8, stream=InlineStream())
    engine.run(steps=8)
    store, policy = engine.retrieval.store, engine.retrieval.policy
    pages = engine.requests[0].pages[:25]
    store.host.layers[1][pages[3], 0, 0, 2] = store.digests.layers[1][pages[3], 0] = torch.nan  # a model that overflowed
    store.check_integrity(pages, policy)
    store.host.layers[1][pages[7], 1, 0, 2, 5] += 100
    with pytest.raises(RuntimeError, match="retrieval layer 1: 1 of 25 pages"):
        store.check_integrity(pages, policy)


@pytest.mark.parametrize("damage", ["a page twice", "different occupancy", "padding page"])
def test_broken_invariants_are_found(damage):
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=8, stream=InlineStream())
    engine.run(steps=8)
    store, row = engine.retrieval.store, engine.requests[0].row
    store.check_integrity(engine.requests[0].pages[:25], engine.retrieval.policy)
    if damage == "padding page":
        store.host.layers[2][0, 0, 1, 2, 3] = 1
    else:
        store.cache.slot_pages[0][row, 1, 4] = store.cache.slot_pages[0][row, 1, 5] if damage == "a page twice" else -1
    with pytest.raises(RuntimeError, match=damage):
        store.check_integrity(engine.requests[0].pages[:25], engine.retrieval.policy)


def _without_waiting_for_transfers(retrieval: Retrieval) -> None:
    retrieval.complete_transfers = lambda layer: None


def _without_waiting_for_staging(retrieval: Retrieval) -> None:
    staging, begin = retrieval.store.staging, retrieval.store.staging._begin

    def begin_unordered(layer: int) -> None:
        begin(layer)
        staging.in_flight = type("Ignored", (), {"wait": lambda self: None})()

    staging._begin = begin_unordered


@pytest.mark.parametrize("remove_edge", [_without_waiting_for_transfers, _without_waiting_for_staging])
def test_a_removed_edge_is_caught(remove_edge):
    """The negative control of the deferred stream: without one of the waits the outputs must differ."""
    config = CONFIGS["tight"]
    outputs = []
    for broken in (False, True):
        engine = Engine(config, prompts=[100], steps=16, stream=DeferredStream())
        if broken:
            remove_edge(engine.retrieval)
        engine.extend(engine.requests, [48])
        second_chunk = torch.stack(engine.extend(engine.requests, [100]))
        outputs.append((second_chunk, torch.stack([torch.stack(engine.decode(engine.requests)) for _ in range(16)])))
    assert not all(torch.equal(good, bad) for good, bad in zip(*outputs))
