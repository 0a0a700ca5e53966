"""What a server may do to the retrieval engine, as a state machine of hypothesis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine import CONFIGS, DIM, GROUP, HEADS, LAYERS, SCALE, Engine, Request, attend, choose, expected_step
from residency_watch import Watch
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.kernels import CORRECTED, RECALLED
from sglang_freekv.memory_pool.transfer import InlineStream

ROWS, LONGEST_PROMPT, LONGEST_ANSWER = 4, 96, 28  # contexts of all rows fit a staging buffer together
POOL_TOKENS = 320  # less than they take: pages change hands
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def just_promised(config: FreeKVConfig) -> int:
    """``resident`` of an ``Engine`` that has no more frames than ``ROWS`` requests are promised."""
    return ROWS * (config.whole_pages + 1) - 8 * config.cache_pages


some_requests = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)
chunks = st.integers(0, LONGEST_PROMPT)


@dataclass
class Cached:
    """What the radix tree keeps of a request that had a row: its text, and the host pages of the first part of it."""

    text: Request
    pages: list[int]


class Server(Engine):
    """The engine with page tables as they are when pages are allocated one by one: the next page's entry is stale."""

    def _tensors(self, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.zeros(len(requests), max(len(request.pages) for request in requests) + 3, dtype=torch.int64)
        for entries, request in zip(table, requests):
            count = len(request.pages)
            entries[:count] = torch.tensor(request.pages)
            entries[count] = torch.randint(1, 400, (), generator=self.generator)
        return torch.tensor([request.row for request in requests]), table


class Traffic(RuleBasedStateMachine):
    """What SGLang's scheduler, allocator and radix tree may do to the engine, in any order, beside a model of what must come of it.

    The model of a request is its text, known in full, and ``expected_step``.
    """

    config, stream, resident, ran, saw = CONFIGS["tight"], InlineStream, 0, Counter(), Counter()

    def __init__(self) -> None:
        super().__init__()
        self.size = self.config.page_size
        self.engine = Server(self.config, [], 0, self.stream, resident=self.resident)
        self.engine.used_rows = lambda: {request.row for request in self.running if self.engine.owners.get(request.row) is request}
        self.engine.may_extend_in_place = lambda: len(self.free_pages) % 3 > 0
        self.engine.held_pages = lambda: len({page for request in self.running for page in request.pages})
        self.retrieval = self.engine.retrieval
        self.watch = Watch(self.engine, self.saw)
        self.sabotage()
        self.free_pages = self.engine.free_pages[: POOL_TOKENS // self.size].tolist()
        self.all_pages = sorted(self.free_pages)
        self.free_rows = list(range(1, ROWS + 1))
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.tree: list[Cached] = []
        self.corrected: dict[int, int] = {}  # of a row since its last extend; a row without an entry is yet to be seeded
        self.sources: dict[int, tuple[Request, int]] = {}  # of a row: whose text its own begins with, and for how many pages
        self.filled: dict[int, tuple[int, int]] = {}  # of a row: the pages that its last extend filled, until they are the tree's
        self.at_rest = True
        self.padding = Request(0, 1, 0, [], self.engine.generator)
        for tensor in (self.padding.q, self.padding.k, self.padding.v):
            tensor.fill_(torch.nan)

    def sabotage(self) -> None:
        """Break the engine, for a test of this test."""

    # Where requests are, and whose pages are whose.

    @property
    def most_alike(self) -> int:
        """Pages of a prompt that is computed again. With another page its request stays whole."""
        return min(self.config.whole_pages - 1, LONGEST_PROMPT // self.size)

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.running if request.tokens < request.prompt]

    @property
    def ready(self) -> list[Request]:
        return [request for request in self.running if request.prompt <= request.tokens < request.total]

    def held(self) -> set[int]:
        return {page for holder in (*self.running, *self.tree) for page in holder.pages}

    def reclaim(self, pages: list[int]) -> None:
        self.free_pages.extend(sorted(set(pages) - self.held()))

    def grow(self, request: Request, tokens: int) -> bool:
        """Pages for ``tokens`` tokens, the page freed last first; False if there are too few even without the tree."""
        need = -(-tokens // self.size) - len(request.pages)
        while len(self.free_pages) < need and self.tree:
            self.reclaim(self.tree.pop(0).pages)
        if len(self.free_pages) < need:
            return False
        request.pages.extend(self.free_pages.pop() for _ in range(need))
        return True

    def request(self, prompt: int, alike: Cached | None, pages: int) -> Request:
        """One whose text begins like another, as far as that one's first ``pages`` go."""
        request = Request(prompt, prompt + LONGEST_ANSWER, 0, [], self.engine.generator, kv_dtype=self.config.kv_dtype)
        if alike is not None:
            known = min(len(alike.pages[:pages]) * self.size, request.total)
            for ours, theirs in zip((request.q, request.k, request.v), (alike.text.q, alike.text.k, alike.text.v)):
                ours[:, :known] = theirs[:, :known]
            request.store()
        return request

    def start(self, request: Request, pages: list[int]) -> None:
        """Give it a row, the one freed last, and the pages of a prefix, at least a token short of its prompt."""
        request.pages = pages[: (request.prompt - 1) // self.size]
        request.tokens = len(request.pages) * self.size
        request.row = self.free_rows.pop()
        request.speculative = {}
        self.running.append(request)
        for known in (self.sources, self.filled):
            known.pop(request.row, None)
        self.saw["prefix pages"] += len(request.pages)

    def prompts(self) -> list[Cached]:
        """What the tree has of running requests."""
        return [Cached(request, request.pages[: min(request.tokens, request.prompt) // self.size]) for request in self.running]

    def count_absent(self, entry: Cached) -> int:
        """Of the pages that may be computed again."""
        return int((self.retrieval.store.frames.tables.frame_of[entry.pages[: self.most_alike]] < 0).sum())

    def insert(self, request: Request, *, ahead: bool = False) -> None:
        """Put what the request's last extend filled into the tree. Pages that the tree has of the same text replace the request's own.

        SGLang does so before the request's next pass; with ``ahead`` that may have been launched already.
        """
        now, extended = self.engine.residency.frames.now, self.engine.residency.extended
        if request.row not in self.filled or (ahead and now == extended and len(self.free_pages) % 2):
            return
        (first, last), (text, alike) = self.filled.pop(request.row), self.sources.get(request.row, (request, 0))
        found = next((entry.pages for entry in (*self.tree, *self.prompts()) if entry.text is text), [])[first : min(last, alike)]
        if ahead and now > extended + 1:  # SGLang would have had the row in a step before
            return
        own, request.pages[first : first + len(found)] = request.pages[first : first + len(found)], found
        self.engine.req_to_token[request.row, : len(request.pages) * self.size : self.size] = torch.tensor(request.pages) * self.size
        self.saw["replaced pages"] += len(set(own).difference(found))
        self.reclaim(own)

    # Forward passes.

    def extend_by(self, requests: list[Request], chunk: int) -> None:
        """Extend each to the end of its prompt, or by ``chunk`` tokens in whole pages; 0 leaves it waiting."""
        spans = []
        for request in requests if chunk else ():
            self.insert(request)
            end = min(request.prompt, request.tokens + max(1, chunk // self.size) * self.size)
            if self.grow(request, end):
                spans.append((request, request.tokens, end))
        if not spans:
            return
        self.at_rest = False
        self.saw["extended tokens"] += sum(end - start for _, start, end in spans)
        before = self.engine.in_place
        with self.watch:
            outputs = self.engine.extend([request for request, _, _ in spans], [end for _, _, end in spans])
        self.saw["extends in place" if self.engine.in_place > before else "staged extends"] += 1
        for layer, output in enumerate(outputs):
            for (request, start, end), part in zip(spans, output.split([end - start for _, start, end in spans])):
                torch.testing.assert_close(part, causal(request, layer, start, end), **TOLERANCE)
        self.corrected.update({request.row: 0 for request, _, _ in spans})
        self.filled.update({request.row: (start // self.size, end // self.size) for request, start, end in spans})

    def decode(self, requests: list[Request], padded: bool) -> None:
        """One token of each, unless there is no page for it."""
        batch = []
        for request in requests:
            if self.grow(request, request.tokens + 1):
                self.insert(request, ahead=True)
                batch.append(request)
        if not batch:
            return
        self.at_rest, self.padding.tokens = False, 0
        self.saw["decoded tokens"] += len(batch)
        with self.watch:
            outputs = self.engine.decode(batch + [self.padding] * padded)
        for layer, output in enumerate(outputs):
            assert not output[len(batch) :].any()
            for request, actual in zip(batch, output):
                self.check_output(request, layer, actual.view(HEADS * GROUP, DIM))

    def count_recalls(self, request: Request) -> None:
        """Of a row since its last extend."""
        if request.row in self.corrected:
            self.saw["recalled units"] += int(self.retrieval.row_counts(torch.tensor([request.row]))[0, RECALLED])

    # The rules.

    @precondition(lambda self: self.free_rows)
    @rule(prompt=st.integers(1, LONGEST_PROMPT), source=st.integers(0, 7), shared=st.integers(1, LONGEST_PROMPT), chunk=chunks)
    def admit(self, prompt: int, source: int, shared: int, chunk: int) -> None:
        """A fresh request, or one that begins like one that the tree knows."""
        self.ran["admit"] += 1
        found = dict(enumerate((*self.tree[::-1], *self.prompts()))).get(source)
        request = self.request(prompt, found, shared)
        self.start(request, found.pages[:shared] if found else [])
        self.extend_by([request], chunk)

    @precondition(lambda self: self.free_rows and self.tree)
    @rule(
        known=st.sampled_from((2, 5, LONGEST_PROMPT)),
        matched=st.sampled_from((0, 0, 3)),
        chunk=st.sampled_from((12, LONGEST_PROMPT)),
        steps=st.integers(1, 3),
    )
    def compute_again(self, known: int, matched: int, chunk: int, steps: int) -> None:
        """A request computes what the tree gets from another one meanwhile, of which it matched a part."""
        self.ran["compute again"] += 1
        found = max(self.tree, key=self.count_absent)
        alike = min(known, len(found.pages), self.most_alike)
        request = self.request(alike * self.size + 1, found, alike)
        self.start(request, found.pages[: min(matched, alike)])
        self.sources[request.row] = found.text, alike
        self.extend_by([request], chunk)
        for _ in range(steps if request.tokens == request.prompt else 0):
            self.decode(self.ready, padded=False)

    @precondition(lambda self: self.resident and len(self.free_rows) > 1)
    @rule()
    def rush(self) -> None:
        """Long prompts come to all rows at once, so that frames run short."""
        self.ran["rush"] += 1
        requests = [self.request(LONGEST_PROMPT, None, 0) for _ in self.free_rows]
        for request in requests:
            self.start(request, [])
        self.extend_by(requests, LONGEST_PROMPT)

    @precondition(lambda self: self.waiting)
    @rule(order=some_requests, chunk=chunks)
    def extend(self, order: list[int], chunk: int) -> None:
        self.ran["extend"] += 1
        self.extend_by([self.waiting[index] for index in order if index < len(self.waiting)] or self.waiting, max(1, chunk))

    @precondition(lambda self: self.ready)
    @rule(order=some_requests, padded=st.booleans())
    def decode_some(self, order: list[int], padded: bool) -> None:
        self.ran["decode some"] += 1
        chosen = [self.ready[index] for index in order if index < len(self.ready)] or self.ready[-1:]
        rows = {request.row for request in chosen}
        self.decode(chosen + [request for request in self.ready if request.row in self.filled.keys() - rows], padded)

    @precondition(lambda self: self.ready)
    @rule(steps=st.integers(1, 5))
    def decode_all(self, steps: int) -> None:
        self.ran["decode all"] += 1
        for _ in range(steps):
            self.decode(self.ready, padded=False)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, ROWS - 1), end=st.sampled_from(("finished", "aborted", "retracted")))
    def stop(self, index: int, end: str) -> None:
        """Its row is free, its full pages are the tree's or nobody's."""
        self.ran["stop"] += 1
        request = self.running.pop(index % len(self.running))
        self.free_rows.append(request.row)
        self.count_recalls(request)
        self.corrected.pop(request.row, None)
        full_pages = request.pages[: request.tokens // self.size]
        if end != "aborted" and full_pages:
            self.tree.append(Cached(request, full_pages))
        if end == "retracted":
            self.retracted.append(request)
        self.reclaim(request.pages)

    @precondition(lambda self: self.retracted and self.free_rows)
    @rule(more=st.integers(0, 1), chunk=chunks)
    def resume(self, more: int, chunk: int) -> None:
        """What it had is its prompt now, and as much of that as the tree still has is its prefix."""
        self.ran["resume"] += 1
        request = self.retracted.pop()
        request.prompt = max(request.prompt, min(request.tokens + more, request.total))
        self.start(request, max((entry.pages for entry in self.tree if entry.text is request), key=len, default=[]))
        self.extend_by([request], chunk)

    @precondition(lambda self: self.tree)
    @rule(index=st.integers(0, 7), left=st.integers(0, LONGEST_PROMPT // 2))
    def evict(self, index: int, left: int) -> None:
        """The end of an entry, or the whole tree."""
        self.ran["evict"] += 1
        for entry in [self.tree[index]] if index < len(self.tree) else self.tree:
            pages, entry.pages = entry.pages, entry.pages[: left // self.size]
            self.reclaim(pages)
        self.tree = [entry for entry in self.tree if entry.pages]

    @precondition(lambda self: not self.at_rest)
    @rule()
    def rest(self) -> None:
        """Everything is where it should be once nothing is in flight; what nobody holds may then be anything."""
        self.ran["rest"] += 1
        for layer in range(LAYERS):
            self.retrieval.complete_transfers(layer)
        assert not any(misses.length[:2].any() for misses in (self.retrieval.misses_now, *self.retrieval.misses_ahead))
        assert self.retrieval.canary is None or not self.retrieval.canary.faults.any()
        self.retrieval.store.check_integrity(self.check_host_pages(), self.retrieval.policy)
        for request in self.running:
            if request.row in self.corrected:
                assert self.retrieval.row_counts(torch.tensor([request.row]))[0, CORRECTED] == self.corrected[request.row]
                for layer in range(LAYERS):
                    self.check_row(request, layer)
        self.spoil()
        self.at_rest = True

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        assert sorted((*self.free_pages, *self.held())) == self.all_pages

    def teardown(self) -> None:
        self.rest()
        for request in self.running:
            self.count_recalls(request)

    # What must hold.

    def check_output(self, request: Request, layer: int, output: torch.Tensor) -> None:
        expected, corrected = expected_step(self.config, request, layer)
        self.corrected[request.row] += corrected
        self.saw["corrected kv heads"] += corrected
        torch.testing.assert_close(output, expected, **TOLERANCE)
        if request.tokens <= max(self.config.budget_tokens, self.config.dense_below_tokens):
            dense = [attend(request, layer, head, request.tokens - 1, list(range(request.tokens))) for head in range(HEADS)]
            torch.testing.assert_close(output, torch.cat(dense), **TOLERANCE)

    def check_host_pages(self) -> torch.Tensor:
        """Every page that is full has the keys and values of its text; returns those pages."""
        holders = [(request, request.pages[: request.tokens // self.size]) for request in self.running if request.row in self.corrected]
        holders += [(entry.text, entry.pages) for entry in self.tree]
        for text, pages in holders:
            for number, pools in enumerate((self.retrieval.host.layers, self.retrieval.host.scales)):
                for layer, pool in enumerate(pools):
                    keys_values = torch.stack([kind[layer, : len(pages) * self.size] for kind in text.stored[2 * number :][:2]])
                    in_pages = keys_values.unflatten(1, (len(pages), self.size))  # [2, P, S, H, ...]
                    assert torch.equal(pool[pages], in_pages.movedim((1, 3), (0, 1)))
        return torch.tensor(sorted({page for _, pages in holders for page in pages}), dtype=torch.int64)

    def check_row(self, request: Request, layer: int) -> None:
        """Its slots hold its keys and values bit for bit, and the next step attends to the pages that it should."""
        cache, budget = self.retrieval.cache.layers[layer], self.config.pages
        num_pages = -(-(request.tokens + 1) // self.size)
        for head in range(HEADS):
            table = cache.slot_pages[request.row, head].long()
            slots = (table >= 0).nonzero().squeeze(1)
            self.check_pages(request, layer, head, table[slots], cache.row_frames[request.row, slots].long())
            pages = torch.tensor(request.pages)
            frames = self.retrieval.store.frames.tables.frame_of[pages].long()
            self.check_pages(request, layer, head, (frames >= 0).nonzero().squeeze(1), frames[frames >= 0])
            chosen = request.speculative.get((layer, head))
            if chosen is None:
                chosen = choose(self.config, request, layer, head, request.tokens - 1, request.tokens + 1)
            attended = cache.tables.pages(torch.tensor([request.row]))[0, head]
            fixed = {page for page in range(num_pages) if page < budget.sink or page >= num_pages - budget.window}
            assert set(attended[attended >= 0].tolist()) == fixed | chosen

    def check_pages(self, request: Request, layer: int, head: int, pages: torch.Tensor, frames: torch.Tensor) -> None:
        """The ``frames`` hold the keys and values of ``pages`` bit for bit, as far as they are written."""
        cache, tokens = self.retrieval.cache.layers[layer], pages[:, None] * self.size + torch.arange(self.size)
        written = tokens < request.tokens
        for held, truth in zip(cache.kv.tensors, request.stored, strict=True):
            assert torch.equal(held[frames, :, head][written], truth[layer, tokens[written], head])

    def spoil(self) -> None:
        """NaN wherever nobody may look: pages and rows that are free, and the row of padding. Codes become one that is none."""

        def spoil(tensor: torch.Tensor, where: torch.Tensor) -> None:
            tensor[where] = torch.nan if tensor.is_floating_point() else -128

        rows, free = [0, *self.free_rows], torch.tensor(self.free_pages, dtype=torch.int64)
        for layer, cache in enumerate(self.retrieval.cache.layers):
            host = self.retrieval.host
            for pool in (pools[layer] for pools in (host.layers, host.scales, self.retrieval.digests.layers) if pools):
                spoil(pool, free)
            cache.previous_queries[rows] = torch.nan
            frames = self.retrieval.store.frames.tables
            idle = torch.cat((cache.row_frames[rows].flatten(), frames.free[: frames.free_count], frames.frame_of[free]))
            for held in cache.kv.tensors:
                spoil(held, idle[idle >= 0].long())


def causal(request: Request, layer: int, start: int, end: int) -> torch.Tensor:
    """``[end - start, Hq, D]`` dense attention of the tokens from ``start`` on."""
    q, k, v = request.q[layer, start:end], request.seen_k[layer, :end], request.seen_v[layer, :end]
    k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * SCALE
    future = torch.arange(end) > torch.arange(start, end)[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
