"""Prefill batches that SGLang's own adder builds: whole pages, and contexts that fit a staging buffer together."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from frame_traffic import make
from sglang_freekv import releases
from sglang_freekv.backend import FreeKVAttnBackend
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.kv_pool import pool_of
from sglang_freekv.lending import Lending
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.residency import Residency
from sglang_freekv.scheduler_patch import prefill
from sglang_freekv.scheduler_patch.prefill import _context_end

PAGE = 32


@pytest.fixture
def adder():
    """SGLang's adder when 1,024 tokens are free and a running request may take 770.7 of them."""
    adder = object.__new__(PrefillAdder)
    lending = Lending(1000, 1, 1, resident=False)
    pool = SimpleNamespace(staging_tokens=1000, residency=SimpleNamespace(lending=lending), owners={}, config=FreeKVConfig())
    allocator = SimpleNamespace(
        size=1024, available_size=lambda: 1024, get_kvcache=lambda: SimpleNamespace(full_kv_pool=pool), page_size=PAGE
    )
    rows = SimpleNamespace(free_slots=[2, 3, 4, 5])
    tree = SimpleNamespace(evictable_size=lambda: 0, supports_mamba=lambda: False, req_to_token_pool=rows)
    adder.__dict__.update(
        page_size=PAGE, dllm_config=None, rem_chunk_tokens=2048, is_hybrid_swa=False, prefill_delayer_single_pass=None, can_run_list=[],
        _mamba_slot_cost=0, running_batch=None, token_to_kv_pool_allocator=allocator, tree_cache=tree,
    )  # fmt: skip
    adder._update_prefill_budget = lambda *args, **kwargs: None
    if releases.has("prefill budget"):
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        adder.memory_budget = PrefillBudget(allocator, tree, num_mixed_decode_tokens=770.7)
        adder.__dict__.update(kv_shard_granule=0, kv_shard_scratch_spec=None, chunked_req_limit=None, mamba_chunk_grid=1)
        adder._request_slot_reserve_for_req = lambda *args, **kwargs: 0
    else:
        adder.rem_total_token_offset = 770.7
    return adder


def request(tokens: int, prefix: int = 0):
    sampling = SimpleNamespace(max_new_tokens=8)
    ids = {"full_untruncated_fill_ids": range(tokens), "origin_input_ids": range(tokens), "prefix_indices": range(prefix)}
    req = MagicMock(**ids, prefix_len=prefix, sampling_params=sampling)
    req.set_extend_range = lambda start, end: setattr(req, "extend_range", SimpleNamespace(end=end, length=end - start))
    return req


@pytest.mark.parametrize("hooked", [False, True])
def test_a_chunk_cut_short_by_full_memory_ends_at_a_page(adder, hooked, monkeypatch):
    if not releases.has("prefill budget"):
        monkeypatch.setattr(PrefillAdder, "rem_total_tokens", property(lambda self: 1024 - self.rem_total_token_offset))
    req = request(6000, prefix=512)
    if hooked:
        prefill.whole_pages(adder, req)
    adder.add_chunked_req(req)
    assert (_context_end(req) % PAGE == 0) == hooked  # without the hook SGLang cuts within a page


def admit(adder, req):
    """What SGLang does with a request that has room."""
    end = req.extend_end = len(req.full_untruncated_fill_ids)
    req.extend_range = SimpleNamespace(end=end, length=end - req.prefix_len)
    adder.can_run_list.append(req)
    return AddReqResult.CONTINUE


def run(adder, lending: Lending, row: int, pages: int) -> None:
    """A request of ``pages`` pages decodes in a row."""
    pool, req = pool_of(adder.token_to_kv_pool_allocator.get_kvcache()), request(pages * PAGE)
    pool.owners[row], pool.residency.lending = (req, 1), lending
    lending.begin(row, pages)
    lending.grow([(row, pages)], held=pages)
    adder.running_batch = SimpleNamespace(reqs=[req])


def test_contexts_of_a_batch_fit_the_context_buffers_together(adder):
    assert prefill.bounded_contexts(admit, adder, request(1200, prefix=1192)) is AddReqResult.CONTINUE  # alone, --context-length bounds it
    adder.can_run_list.clear()
    results = [prefill.bounded_contexts(admit, adder, request(tokens, prefix=tokens - 8)) for tokens in (400, 500, 101, 100)]
    assert results == [AddReqResult.CONTINUE, AddReqResult.CONTINUE, AddReqResult.OTHER, AddReqResult.CONTINUE]


@pytest.mark.parametrize("frames, kv_dtype, fits", [(13, "auto", False), (14, "auto", True), (14, "int8", False)])
def test_contexts_that_do_not_fit_a_staging_buffer_fit_frames(adder, frames, kv_dtype, fits):
    """Requests hold four pages, and one row decodes. Then come contexts of 16, 13 and 4 pages, all but one page of which are hits.

    So at most ten pages are held, with the third request's own, and four rows take a page in hand each. Codes need room decoded in any case.
    """
    pool_of(adder.token_to_kv_pool_allocator.get_kvcache()).config = FreeKVConfig(kv_dtype=kv_dtype)
    run(adder, Lending(frames, 1, 1), 1, pages=4)
    adder.token_to_kv_pool_allocator.available_size = lambda: 1024 - 4 * PAGE
    requests = [request(pages * PAGE, prefix=(pages - 1) * PAGE) for pages in (16, 13, 4)]
    results = [prefill.bounded_contexts(admit, adder, each) is AddReqResult.CONTINUE for each in requests]
    assert results == [True, True, fits]


@pytest.mark.parametrize("running, refusal", [(True, AddReqResult.NO_TOKEN), (False, AddReqResult.OTHER)])
def test_whoever_cannot_be_promised_frames_waits(adder, running, refusal):
    """A long request is promised 5 frames, which it gets in any case when it would be alone."""
    pool = pool_of(adder.token_to_kv_pool_allocator.get_kvcache())
    pool.residency.lending = Lending(4, 2, 4)
    if running:
        run(adder, pool.residency.lending, 1, pages=3)
    results = [prefill.bounded_contexts(admit, adder, request(tokens)) for tokens in (600, 24)]
    assert results == ([refusal, refusal] if running else [AddReqResult.CONTINUE, refusal])
    adder.can_run_list.clear()
    pool.residency.lending.frames = 6  # room for four frames, and for the two of a short request
    assert prefill.bounded_contexts(admit, adder, request(24)) is AddReqResult.CONTINUE
    adder.tree_cache.req_to_token_pool.free_slots.append(1)  # the request has ended; nobody has told the accounts
    adder.can_run_list.clear()
    assert prefill.bounded_contexts(admit, adder, request(600)) is AddReqResult.CONTINUE


def test_a_chunked_prompt_is_promised_frames_once(adder):
    """It has a row already when it stands in the batch again."""
    run(adder, Lending(7, 2, 4), 1, pages=6)
    [(chunked, _)] = pool_of(adder.token_to_kv_pool_allocator.get_kvcache()).owners.values()
    admit(adder, chunked)
    assert prefill.bounded_contexts(admit, adder, request(24)) is AddReqResult.CONTINUE


class NotedFrames(SimpleNamespace):
    """The part of ``Frames`` that is told of requests: it writes down what it was told."""

    def __init__(self, num_frames: int = 99) -> None:
        super().__init__(num_frames=num_frames, num_slots=1, page_size=PAGE, is_resident=True, now=0, told=[])

    def rows_ended(self, rows: list[int]) -> None:
        self.told.append(("ended", *rows))

    def lend(self, rows: list[int]) -> None:
        self.told.append(("lent", *rows))


class Scheduler(SimpleNamespace):
    """A scheduler with five rows. Of nine pages three are free, and two may be evicted, so that requests have four."""

    def __init__(self, planner=None, num_frames: int = 99) -> None:
        self.frames = NotedFrames(num_frames)
        residency = Residency(self.frames, torch.zeros(6, 8 * PAGE, dtype=torch.int64), whole_pages=2)
        self.pool = SimpleNamespace(
            planner=planner or MagicMock(), residency=residency, owners={}, staging_tokens=8 * PAGE, page_size=PAGE,
            store=SimpleNamespace(canary=None),
        )  # fmt: skip
        sizes = {"size": 9 * PAGE, "page_size": PAGE, "available_size": lambda: 3 * PAGE}
        super().__init__(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: SimpleNamespace(full_kv_pool=self.pool), **sizes),
            req_to_token_pool=SimpleNamespace(
                size=5,
                free_slots=[1, 2, 3, 4, 5],
                req_generation=torch.zeros(6, dtype=torch.int64),
                req_to_token=torch.arange(6 * 8 * PAGE, dtype=torch.int32).view(6, -1),
            ),  # fmt: skip
            tree_cache=SimpleNamespace(evictable_size=lambda: 2 * PAGE),
        )

    def launch(self, requests: dict, *, extends: bool = True, tokens: int = 1) -> list[tuple]:
        """Launch a batch of requests in rows, and return what the frames were told."""
        rows = torch.tensor(list(requests))
        self.batch = batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: extends), reqs=list(requests.values()), req_pool_indices=rows,
            req_pool_indices_cpu=rows, seq_lens_cpu=torch.full((len(rows),), tokens), out_cache_loc=None,
        )  # fmt: skip
        self.frames.told.clear()
        prefill.mark_tables(self, batch)
        return list(self.frames.told)

    def take(self, row: int) -> None:
        self.req_to_token_pool.free_slots.remove(row)
        self.req_to_token_pool.req_generation[row] += 1

    def free(self, *rows: int) -> None:
        self.req_to_token_pool.free_slots.extend(rows)


@pytest.mark.parametrize("extends", [True, False])
def test_the_scheduler_s_tables_are_marked_for_the_pass_that_reads_prefixes(extends):
    planner = ExtendPlanner(SimpleNamespace(mark=lambda: "here"), PAGE)
    Scheduler(planner).launch({1: request(8)}, extends=extends)
    assert (planner.tables and (planner.tables[0], planner.tables[1].tolist())) == (("here", [1]) if extends else None)


def test_with_a_canary_a_batch_keeps_the_pages_that_its_requests_hold():
    scheduler, requests = Scheduler(), {1: request(8), 3: request(8)}
    scheduler.launch(requests)
    assert not hasattr(scheduler.batch, "freekv_held")
    scheduler.pool.store.canary = "full"
    scheduler.launch(requests, tokens=PAGE + 1)
    scheduler.req_to_token_pool.req_to_token[:] = 0  # which SGLang may do before the results are read
    assert list(scheduler.batch.freekv_held.pages()) == [(requests[1], [8, 9]), (requests[3], [24, 25])]


def test_a_row_is_told_to_have_ended_when_its_request_has_gone():
    scheduler = Scheduler()
    first, second, third, fourth = (request(8) for _ in range(4))
    for row in (1, 2, 3):
        scheduler.take(row)
    promised = scheduler.pool.residency.lending.promised
    assert scheduler.launch({1: first, 2: second, 3: third}) == [] and promised == {1: 2, 2: 2, 3: 2}
    assert scheduler.launch({3: third}) == []  # the next chunk of its prompt
    scheduler.free(1, 2)
    assert scheduler.launch({3: third}, extends=False) == [("ended", 1, 2)]
    scheduler.free(3)
    scheduler.take(3)
    assert scheduler.launch({3: fourth}) == [("ended", 3)]  # another request has its row at once
    scheduler.free(3)
    scheduler.take(3)
    assert scheduler.launch({3: fourth}) == [("ended", 3)]  # it was retracted, and is back in its row
    scheduler.free(3)
    scheduler.req_to_token_pool.req_generation[3] -= 1  # as if SGLang had flushed its cache
    scheduler.take(3)
    assert scheduler.launch({3: first}) == [("ended", 3)]
    assert scheduler.launch({3: first}, extends=False) == [] and promised.keys() == {3}
    assert scheduler.pool.owners.keys() == {3}  # no other request is kept in memory


@pytest.mark.parametrize("asked, tokens", [(None, 1000), (0, 9), (1, 9), (8, 16), (5000, 1000)])
def test_a_request_is_promised_room_for_the_token_that_it_has_in_any_case(asked, tokens):
    """A step may be launched with it before its end is known."""
    made = request(8)
    made.sampling_params.max_new_tokens = asked
    assert prefill._longest_context(made, SimpleNamespace(staging_tokens=1000)) == tokens


def test_requests_become_partial_while_they_run():
    """Seven frames are for two rows of two pages, and a page in hand each. A partial row takes two, and one in hand."""
    scheduler, requests = Scheduler(num_frames=1 + 7), {1: request(100), 2: request(100)}
    residency = scheduler.pool.residency
    for row in requests:
        scheduler.take(row)
    assert not residency.in_place  # a pass that the scheduler does not know of
    assert scheduler.launch(requests, tokens=2 * PAGE) == [] and residency.in_place
    scheduler.tree_cache.evictable_size = lambda: 0
    assert scheduler.launch(requests, extends=False, tokens=2 * PAGE + 1) == [("lent", 2)]
    assert scheduler.launch(requests, tokens=3 * PAGE) == [] and not residency.in_place
    assert scheduler.launch({1: requests[1]}, tokens=4 * PAGE) == [("lent", 1)]


def test_nothing_is_resident_without_memory_for_it():
    scheduler = Scheduler()
    scheduler.frames.is_resident = False
    residency = scheduler.pool.residency = Residency(scheduler.frames, torch.zeros(6, 8 * PAGE, dtype=torch.int64), whole_pages=2)
    scheduler.take(4)
    assert scheduler.launch({4: request(8)}) == [("lent", 4)] and not residency.in_place


@pytest.mark.parametrize("scheduled", [True, False])
def test_prefixes_are_looked_up_in_the_rows_of_the_scheduler(scheduled):
    """SGLang's forward batch has its rows in a buffer that the stream of the pass fills: beside a graph it still has the graph's."""
    rows, looked_up = torch.tensor([3, 5]), []

    def prepare_extend(plan) -> None:
        if scheduled:
            forward_batch.req_pool_indices.fill_(1)
        looked_up.append(plan.prefixes.look_up().host_pages.tolist())

    backend = object.__new__(FreeKVAttnBackend)
    backend.token_to_kv_pool = SimpleNamespace(page_size=PAGE)
    tables = torch.arange(6)[:, None] * 1000 * PAGE + torch.arange(8 * PAGE)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=tables)
    backend.residency = Residency(make(9, 6000, 6, 1, PAGE), tables, whole_pages=2)
    engine = SimpleNamespace(prepare_extend=prepare_extend, complete_all_transfers=lambda: None)
    backend.retrieval, backend.planner = engine, ExtendPlanner(InlineStream(), PAGE)
    if scheduled:
        backend.planner.note_tables(rows)
    forward_batch = SimpleNamespace(
        req_pool_indices=rows.clone(), seq_lens=torch.tensor([3 * PAGE, 2 * PAGE]), seq_lens_cpu=torch.tensor([3 * PAGE, 2 * PAGE]),
        extend_prefix_lens_cpu=[2 * PAGE, PAGE], extend_seq_lens_cpu=[PAGE, PAGE], forward_mode=ForwardMode.EXTEND,
        extend_prefix_lens=torch.tensor([2 * PAGE, PAGE]),
    )  # fmt: skip
    backend._prepare(forward_batch)
    assert looked_up == [[3000, 3001, 5000]]
