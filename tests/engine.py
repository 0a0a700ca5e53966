"""The retrieval engine on random requests, and what the papers say of them written as loops."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sglang_freekv import kernels
from sglang_freekv.batch import DecodeBatch
from sglang_freekv.closing import captured
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.kernels.coded_extend import CodedExtend
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.layer_taus import LayerTaus
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.copy_engine import CopyEngineRecall
from sglang_freekv.memory_pool.kv_format import FLOATS_OF_8_BITS, KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Streams
from sglang_freekv.policy import POLICIES
from sglang_freekv.residency import Residency
from sglang_freekv.retrieval import Retrieval

LAYERS, HEADS, GROUP, DIM = 3, 2, 3, 16
SCALE = 0.4  # of attention logits; some models have another than one over the root of DIM
LARGEST_CLOSED, MOST_PAGES = 4, 256  # a short extend in place of at most so many requests is closed in all layers together


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
    selected_with: dict = field(default_factory=dict)  # position of the query of each kv head's last selection, on turn
    learned_sinks: torch.Tensor | None = None  # [LAYERS, HEADS * GROUP]
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        def walk(heads: int) -> torch.Tensor:
            steps = torch.randn(LAYERS, self.total, heads, DIM, generator=self.generator)
            return 0.6 * steps + torch.randn(LAYERS, 1, heads, DIM, generator=self.generator)

        self.q, self.k, self.v = walk(HEADS * GROUP), walk(HEADS), walk(HEADS)
        if self.kv_dtype == "int8":  # numbers of few bits, whose sums are exact: a rotation in any order gives them the same codes
            self.k, self.v = (torch.round(numbers * 1024) / 1024 for numbers in (self.k, self.v))
        self.store()

    def store(self) -> None:
        """Find what becomes of the keys and values in memory: ``stored``, which has scales behind codes, and what attention sees."""
        self.stored, self.seen_k, self.seen_v = (self.k, self.v), self.k, self.v
        if floats := FLOATS_OF_8_BITS.get(self.kv_dtype):
            self.stored = tuple(numbers.to(floats) for numbers in (self.k, self.v))  # none of which is near the largest
            self.seen_k, self.seen_v = (codes.float() for codes in self.stored)
        if self.kv_dtype == "int8":
            codes, scales = zip(coded(turned(self.k)), coded(self.v))
            self.stored = *codes, *scales
            keys, self.seen_v = (code * scale.float()[..., None] for code, scale in zip(codes, scales))
            self.seen_k = turned(keys)


def turned(numbers: torch.Tensor) -> torch.Tensor:
    """``numbers [..., DIM]`` in the basis of keys that are coded, or back. DIM is a power of four, so that its root is exact."""
    signs = torch.ones(1, 1)
    while len(signs) < DIM:
        signs = torch.kron(signs, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return numbers @ signs / math.sqrt(DIM)


def coded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes, scales)`` of ``numbers [..., DIM]`` in 8 bits."""
    scales = (numbers.abs().amax(-1) / 127).half()
    return (numbers / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scales


def attend(request: Request, layer: int, head: int, position: int, tokens: list[int]) -> torch.Tensor:
    q = request.q[layer, position].view(HEADS, GROUP, DIM)[head]
    k, v = request.seen_k[layer, tokens, head], request.seen_v[layer, tokens, head]
    logits = q @ k.T * SCALE
    if request.learned_sinks is not None:
        logits = torch.cat((logits, request.learned_sinks[layer].view(HEADS, GROUP)[head, :, None]), 1)
    return logits.softmax(-1)[:, : len(tokens)] @ v


def choose(
    config: FreeKVConfig, request: Request, layer: int, head: int, position: int, tokens: int, before: Collection[int] = ()
) -> set[int]:
    """Pages chosen by the query at ``position`` among the candidates of a context of ``tokens`` tokens. Those of the selection ``before``
    weigh more."""
    size = config.page_size
    last = -(-tokens // size) - config.pages.window
    candidates = list(range(config.pages.sink, last))
    if not candidates:
        return set()
    keys = request.seen_k[layer, : last * size, head].view(last, size, DIM)[config.pages.sink :]
    q = request.q[layer, position].view(HEADS, GROUP, 1, DIM)[head]
    upper, lower = keys.amax(1), keys.amin(1)
    if config.digest == "cuboid-mean":
        centre = (upper + lower) / 2
        radius = (keys - centre[:, None]).abs().mean(1)
        upper, lower = centre + radius, centre - radius
    if config.digest == "two-bit":
        levels = torch.stack([lower + level * (upper - lower) / 3 for level in range(4)], -1)[:, None]  # [candidates, 1, D, 4]
        nearest = (levels - keys[..., None]).abs().argmin(-1, keepdim=True)
        moved = levels.expand(-1, size, -1, -1).gather(-1, nearest).squeeze(-1)  # [candidates, S, D]
        scores = (q[..., None, :] * moved).sum(-1).mul(SCALE).logsumexp(-1)
    else:
        scores = torch.maximum(q * upper, q * lower).sum(-1) * SCALE
    pooled = {"softmax-mean": scores.softmax(-1).mean(0).log(), "max": scores.amax(0), "mean": scores.mean(0)}[config.pooling]
    pooled += config.hysteresis * torch.tensor([page in before for page in candidates])
    most = len(candidates) if tokens <= config.dense_below_tokens else config.pages.selected
    return {candidates[index] for index in pooled.sort(descending=True, stable=True).indices[:most].tolist()}


def expected_step(config: FreeKVConfig, request: Request, layer: int) -> tuple[torch.Tensor, int]:
    """Output of one decode step of one layer, and how many kv heads were corrected."""
    n, size, corrected, outputs = request.tokens, config.page_size, 0, []
    for head in range(HEADS):
        chosen, last = request.speculative.get((layer, head)), n - 2
        if n == request.prompt + 1:
            chosen = choose(config, request, layer, head, n - 2, n)
        elif config.selection == "on-turn":
            last = request.selected_with[layer, head]
        compared = request.q[layer, n - 1], request.q[layer, last]
        if config.method != "louiskv":
            compared = (query.view(HEADS, GROUP, DIM)[head] for query in compared)
        tau = config.tau if config.tau_by_layer is None else config.tau_by_layer.taus[layer]
        is_corrected = tau is None or F.cosine_similarity(*compared, dim=-1).mean() < tau
        pages = -(-n // size)
        fixed = {p for p in range(pages) if p < config.pages.sink or p >= pages - config.pages.window}
        if is_corrected:
            chosen, corrected = choose(config, request, layer, head, n - 1, n, fixed | chosen), corrected + 1
        attended = fixed | chosen
        tokens = [t for p in sorted(attended) for t in range(p * size, min((p + 1) * size, n))]
        outputs.append(attend(request, layer, head, n - 1, tokens))
        stands = config.method == "louiskv" and len(chosen) == config.pages.selected and n >= config.dense_below_tokens
        if config.selection == "on-turn":
            by_memory = config.budget_tokens < config.dense_below_tokens and n <= config.dense_below_tokens
            stands = n % size != 0 and not by_memory
        if is_corrected or not stands:
            chosen, last = choose(config, request, layer, head, n - 1, n + 1, attended), n - 1
        request.speculative[layer, head], request.selected_with[layer, head] = chosen, last
    return torch.cat(outputs), corrected


class Engine:
    """A retrieval engine and the requests it serves.

    Args:
        resident: frames beyond the slots of all rows; negative if there are fewer. With 0 nothing is resident.
        sinks: whether each query head has a learned sink.
    """

    def __init__(
        self,
        config: FreeKVConfig,
        prompts: list[int],
        steps: int,
        stream,
        seed: int = 0,
        device: str = "cpu",
        *,
        resident: int = 0,
        sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        policy = POLICIES[config.method](config)
        digest = policy.digests.shape(DIM, 4)
        shape = KVShape(LayerTable.uniform(LAYERS), HEADS, HEADS * GROUP, DIM, digest, KVFormat.of(config.kv_dtype, torch.float32))
        self.device = device
        self.config, self.generator, self.free_pages = config, generator, torch.randperm(400, generator=generator) + 1
        streams = Streams(stream(), stream(), stream())
        store = Store.build(
            config,
            shape,
            400 * config.page_size,
            8,
            500,
            device,
            streams.transfers,
            num_frames=9 * config.cache_pages + resident,
            resident=resident != 0,
        )
        recall = kernels.recall_pages
        if config.recall == "copy-engine":
            recall = CopyEngineRecall((2, config.page_size, DIM), shape.format.storage, device, buffer_units=3)
        attention = ReferenceExtend()
        if config.is_coded:
            attention = CodedExtend(attention, (500, HEADS, DIM), torch.float32, config.page_size, device)
        self.retrieval = Retrieval(config, policy, store, streams, recall, attention)
        record = (lambda work: work) if device == "cpu" else captured
        self.retrieval.close_together([SCALE] * LAYERS, LARGEST_CLOSED, MOST_PAGES, record)
        self.planner = ExtendPlanner(streams.transfers, config.page_size)
        self.req_to_token = torch.zeros((9, 400 * config.page_size), dtype=torch.int64, device=device)  # as SGLang's
        self.residency, self.in_place = Residency(store.frames, self.req_to_token, config.whole_pages), 0  # extends in place so far
        rows = torch.randperm(8, generator=generator)[: len(prompts)] + 1
        self.owners: dict[int, Request] = {}  # of each row, as of its last pass
        others = torch.Generator().manual_seed(seed + 1)  # requests are those of an engine without sinks
        self.learned_sinks = 3 * torch.randn(LAYERS, HEADS * GROUP, generator=others) if sinks else None
        self.requests = [self.admit(prompt, prompt + steps, int(row)) for prompt, row in zip(prompts, rows)]

    def admit(self, prompt: int, total: int, row: int) -> Request:
        count = total // self.config.page_size + 2
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return Request(prompt, total, row, pages, self.generator, learned_sinks=self.learned_sinks, kv_dtype=self.config.kv_dtype)

    def _tensors(self, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(request.pages) for request in requests)
        table = torch.stack([F.pad(request.pages, (0, width - len(request.pages))) for request in requests])
        return self.to_device(torch.tensor([request.row for request in requests])), self.to_device(table)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host does not wait: a wait would hide missing edges."""
        return tensor if self.device == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def extend(self, requests: list[Request], upto: list[int]) -> list[torch.Tensor]:
        rows, table = self._tensors(requests)
        spans = [(request, request.tokens, end) for request, end in zip(requests, upto)]
        prefixes = [a for _, a, _ in spans]
        frames, given, in_place = self._begin(requests, rows, table, [b for _, _, b in spans], prefixes)
        lengths = prefixes, [b - a for _, a, b in spans]
        plan = self.planner.plan(rows, table, frames, *lengths, self.req_to_token, given=given, in_place=in_place)
        self.in_place += plan.batch.in_place
        self.retrieval.prepare_extend(plan)
        outputs = [
            self.retrieval.extend(
                layer,
                *(self.to_device(torch.cat([getattr(r, x)[layer, a:b] for r, a, b in spans])) for x in "qkv"),
                plan.batch,
                SCALE,
                **self._sinks(layer),
            )
            for layer in range(LAYERS)
        ]
        for request, _, end in spans:
            request.tokens = end
        return outputs

    def decode(self, requests: list[Request]) -> list[torch.Tensor]:
        rows, table = self._tensors(requests)
        self.planner.note_step()
        for request in requests:
            request.tokens += 1
        tokens = [request.tokens for request in requests]
        frames, given, _ = self._begin(requests, rows, table, tokens)
        if given is not None:
            self.retrieval.refill(table, given)
        batch = DecodeBatch(rows, self.to_device(torch.tensor(tokens)), table, frames)
        return [
            self.retrieval.decode(layer, *self.new_tokens(layer, requests), batch, SCALE, **self._sinks(layer)) for layer in range(LAYERS)
        ]

    def _begin(
        self, requests: list[Request], rows: torch.Tensor, table: torch.Tensor, tokens: list[int], prefixes: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        """What SGLang's hooks and backend do when a pass begins.

        Returns:
            The frames of its pages, those that absent ones were given, and whether an extend is in place.
        """
        self.req_to_token[rows, : table.shape[1] * self.config.page_size : self.config.page_size] = table * self.config.page_size
        self.retrieval.complete_all_transfers()
        frames = torch.empty_like(table, dtype=torch.int32)
        where = rows, self.to_device(torch.tensor(tokens)), torch.empty_like(frames), frames
        self.owners = {row: owner for row, owner in self.owners.items() if row in self.used_rows()}
        new = {request.row: request.total for request in requests if request.row and self.owners.get(request.row) is not request}
        self.owners |= {request.row: request for request in requests}
        batch = [(request.row, length) for request, length in zip(requests, tokens)]
        self.residency.note_requests(self.used_rows(), self.held_pages(), batch, new)
        if prefixes is None:
            begins = sum(n % self.config.page_size == 0 for n in tokens)
            return frames, self.residency.begin_decode(*where, begins), False
        in_place, prefix_lens = self.residency.in_place and self.may_extend_in_place(), self.to_device(torch.tensor(prefixes))
        return frames, self.residency.begin_extend(*where, prefix_lens, tokens, in_place=in_place), in_place

    def may_extend_in_place(self) -> bool:
        """Whether an extend is in place if it can be."""
        return True

    def _sinks(self, layer: int) -> dict[str, torch.Tensor]:
        return {} if self.learned_sinks is None else {"learned_sinks": self.to_device(self.learned_sinks[layer])}

    def used_rows(self) -> set[int]:
        return {request.row for request in self.requests}

    def held_pages(self) -> int:
        """Host pages that requests have, together."""
        return sum(len(request.pages) for request in self.requests)

    def prepare_replay(self, fills_page: bool) -> None:
        """What SGLang's backend does before a decode graph."""
        self.retrieval.complete_all_transfers()
        self.planner.note_graph(fills_page)

    def new_tokens(self, layer: int, requests: list[Request]) -> list[torch.Tensor]:
        """Queries, keys and values of the last token of each request."""
        return [self.to_device(torch.stack([getattr(r, x)[layer, r.tokens - 1] for r in requests])) for x in "qkv"]

    def run(self, steps: int) -> torch.Tensor:
        self.extend(self.requests, [request.prompt for request in self.requests])
        return torch.stack([torch.stack(self.decode(self.requests)) for _ in range(steps)])


def others_answers(engine: Engine, steps: int, overflows: bool) -> list[torch.Tensor]:
    """What all requests but the second are answered, in an extend, one behind a prefix, and ``steps`` decode steps. Queries, keys and
    values of the second are NaN from some token on if it ``overflows``, and infinite behind that."""
    second, others = engine.requests[1], [index for index in range(len(engine.requests)) if index != 1]
    if overflows:
        for numbers in (second.q, second.k, second.v):
            numbers[:, 6:] = torch.nan
            numbers[:, 20::3] = torch.inf
        second.store()
    answers = []
    for upto in ([request.prompt // 32 * 16 for request in engine.requests], [request.prompt for request in engine.requests]):
        lens = [end - request.tokens for request, end in zip(engine.requests, upto)]
        answers += [output.split(lens)[index] for output in engine.extend(engine.requests, upto) for index in others]
    for _ in range(steps):
        answers += [output[others] for output in engine.decode(engine.requests)]
    engine.retrieval.complete_all_transfers()
    return answers


CONFIGS = {
    "tight": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=()),
    "least-window": FreeKVConfig(budget_tokens=16, sink_tokens=4, window_tokens=8, page_size=4, tau=0.8, dense_layers=()),
    "no-sink": FreeKVConfig(budget_tokens=24, sink_tokens=0, window_tokens=16, page_size=8, tau=0.7, dense_layers=(), digest="min-max"),
    "one-token-pages": FreeKVConfig(budget_tokens=12, sink_tokens=2, window_tokens=3, page_size=1, tau=0.6, dense_layers=()),
    "always-corrected": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=2, dense_layers=()),
    "never-corrected": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=-2, dense_layers=()),
    "slack": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), device_cache_tokens=64),
    "slack-min-max": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), device_cache_tokens=64, digest="min-max"
    ),
    "roomy": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), device_cache_tokens=192),
    "in-full-below": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=72,
        dense_below_tokens=72,
    ),
    "tau-by-layer": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau_by_layer=LayerTaus("tau.json", "made up", (0.5, -2, 0.7)),
        dense_layers=(),
    ),
    "two-bit": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=16, page_size=8, tau=0.6, dense_layers=(), digest="two-bit"),
    "max-pooling": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), pooling="max"),
    "hysteresis": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), hysteresis=0.3),
    "hysteresis-slack-max-pooling": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=64,
        pooling="max",
        hysteresis=0.7,
    ),
    "hysteresis-in-full-below": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=72,
        dense_below_tokens=72,
        hysteresis=0.2,
    ),
    "two-bit-slack": FreeKVConfig(
        budget_tokens=80,
        sink_tokens=16,
        window_tokens=32,
        page_size=16,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=112,
        digest="two-bit",
    ),
    "on-turn": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), selection="on-turn"),
    "on-turn-two-bit-slack": FreeKVConfig(
        budget_tokens=80,
        sink_tokens=16,
        window_tokens=16,
        page_size=8,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=96,
        digest="two-bit",
        hysteresis=0.2,
        selection="on-turn",
    ),
    "on-turn-in-full-below": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=72,
        dense_below_tokens=72,
        selection="on-turn",
    ),
    "on-turn-always-corrected": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=2, dense_layers=(), selection="on-turn"
    ),
    "on-turn-never-corrected": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=-2, dense_layers=(), selection="on-turn"
    ),
    "on-turn-one-token-pages": FreeKVConfig(
        budget_tokens=12, sink_tokens=2, window_tokens=3, page_size=1, tau=0.6, dense_layers=(), selection="on-turn"
    ),
    "copy-engine": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), recall="copy-engine"
    ),
    "nhd": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), host_layout="nhd", digest="min-max"
    ),
    "int8": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), kv_dtype="int8", canary="full"
    ),
    "int8-two-bit-slack": FreeKVConfig(
        budget_tokens=80,
        sink_tokens=16,
        window_tokens=32,
        page_size=16,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=112,
        digest="two-bit",
        kv_dtype="int8",
    ),
    "fp8": FreeKVConfig(
        budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), kv_dtype="fp8_e4m3", canary="full"
    ),
    "fp8-e5m2-slack-nhd": FreeKVConfig(
        budget_tokens=80,
        sink_tokens=16,
        window_tokens=32,
        page_size=16,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=112,
        digest="min-max",  # floats of 8 bits are often half way between the levels of two bits, where these loops round otherwise
        host_layout="nhd",
        kv_dtype="fp8_e5m2",
    ),
    "fp8-on-turn-copy-engine": FreeKVConfig(
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        selection="on-turn",
        recall="copy-engine",
        kv_dtype="fp8_e4m3",
    ),
    "canary": FreeKVConfig(budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=(), canary="full"),
    "louiskv": FreeKVConfig("louiskv", budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, tau=0.6, dense_layers=()),
    "louiskv-in-full-below": FreeKVConfig(
        "louiskv",
        budget_tokens=40,
        sink_tokens=8,
        window_tokens=8,
        page_size=4,
        tau=0.6,
        dense_layers=(),
        device_cache_tokens=96,
        dense_below_tokens=72,
    ),
    "quest": FreeKVConfig("quest", budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=()),
    "arkvale": FreeKVConfig("arkvale", budget_tokens=40, sink_tokens=0, window_tokens=16, page_size=8, dense_layers=()),
    "arkvale-slack": FreeKVConfig(
        "arkvale", budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=(), device_cache_tokens=64
    ),
    "arkvale-hysteresis": FreeKVConfig(
        "arkvale", budget_tokens=40, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=(), device_cache_tokens=64, hysteresis=0.2
    ),
}
