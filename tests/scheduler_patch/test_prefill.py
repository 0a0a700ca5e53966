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
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.memory_pool.frames import Frames
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.residency import Residency
from sglang_freekv.scheduler_patch import prefill
from sglang_freekv.scheduler_patch.prefill import _context_end

PAGE = 32


@pytest.fixture
def adder():
    """SGLang's adder when 1,024 tokens are free and a running request may take 770.7 of them."""
    adder = object.__new__(PrefillAdder)
    pool = SimpleNamespace(staging_tokens=1000, residency=SimpleNamespace(fits=lambda pages, rows: False))
    allocator = SimpleNamespace(size=1024, available_size=lambda: 1024, get_kvcache=lambda: pool, page_size=PAGE)
    tree = SimpleNamespace(evictable_size=lambda: 0, supports_mamba=lambda: False)
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
    req = MagicMock(full_untruncated_fill_ids=range(tokens), prefix_indices=range(prefix), prefix_len=prefix, sampling_params=sampling)
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


def test_contexts_of_a_batch_fit_the_context_buffers_together(adder):
    def admit(adder, req):
        end = req.extend_end = len(req.full_untruncated_fill_ids)
        req.extend_range = SimpleNamespace(end=end, length=end - req.prefix_len)
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    results = [prefill.bounded_contexts(admit, adder, request(tokens, prefix=tokens - 8)) for tokens in (1200,)]
    assert results == [AddReqResult.CONTINUE]  # alone, a context is bounded by --context-length
    adder.can_run_list.clear()
    results = [prefill.bounded_contexts(admit, adder, request(tokens, prefix=tokens - 8)) for tokens in (400, 500, 101, 100)]
    assert results == [AddReqResult.CONTINUE, AddReqResult.CONTINUE, AddReqResult.OTHER, AddReqResult.CONTINUE]


@pytest.mark.parametrize("frames", [13, 14])
def test_contexts_that_do_not_fit_a_staging_buffer_fit_frames(adder, frames):
    """Requests hold four pages, and one row decodes. Then come contexts of 16, 13 and 4 pages, all but one page of which are hits."""
    asked = []

    def admit(adder, req):
        end = req.extend_end = len(req.full_untruncated_fill_ids)
        req.extend_range = SimpleNamespace(end=end, length=end - req.prefix_len)
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    allocator = adder.token_to_kv_pool_allocator
    allocator.available_size, adder.running_batch = (lambda: 1024 - 4 * PAGE), SimpleNamespace(reqs=["one"])
    residency = Residency(make(6 + frames, 99, 6, 1, PAGE), torch.zeros(6, 8 * PAGE, dtype=torch.int64))
    allocator.get_kvcache().residency = SimpleNamespace(fits=lambda *need: (asked.append(need), residency.fits(*need))[1])
    requests = [request(pages * PAGE, prefix=(pages - 1) * PAGE) for pages in (16, 13, 4)]
    results = [prefill.bounded_contexts(admit, adder, each) is AddReqResult.CONTINUE for each in requests]
    assert asked == [(4 + 1 + 1 + 4, 1 + 3)] and results == [True, True, frames == 14]


def scheduler_of(planner) -> tuple[SimpleNamespace, Frames]:
    """A scheduler with five rows, of which none is free, and its frames. Of nine pages three are free, and two may be evicted."""
    frames = make(8, 9, 6, 1, PAGE)
    pool = SimpleNamespace(planner=planner, residency=Residency(frames, torch.zeros(6, 8 * PAGE, dtype=torch.int64)))
    sizes = {"size": 9 * PAGE, "page_size": PAGE, "available_size": lambda: 3 * PAGE}
    allocator, rows = SimpleNamespace(get_kvcache=lambda: pool, **sizes), SimpleNamespace(size=5, free_slots=[])
    tree = SimpleNamespace(evictable_size=lambda: 2 * PAGE)
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, req_to_token_pool=rows, tree_cache=tree), frames


@pytest.mark.parametrize("extends", [True, False])
def test_the_scheduler_s_tables_are_marked_for_the_pass_that_reads_prefixes(extends):
    planner = ExtendPlanner(SimpleNamespace(mark=lambda: "here"), PAGE)
    scheduler, _ = scheduler_of(planner)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: extends), req_pool_indices="rows")
    prefill.mark_tables(scheduler, batch)
    assert planner.tables == (("here", "rows") if extends else None)


def test_rows_that_have_become_free_have_ended_by_the_next_batch():
    scheduler, frames = scheduler_of(planner=None)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False))
    for free, expected in (([4, 5], []), ([5], []), ([2, 4, 5], [2, 4]), ([3, 4, 5], [3])):
        scheduler.req_to_token_pool.free_slots = free
        prefill.mark_tables(scheduler, batch)
        assert frames._take(frames._ended).tolist() == expected


@pytest.mark.parametrize("resident", [4, 5, 6, 9])
def test_an_extend_is_in_place_if_the_pages_of_all_requests_have_room(resident):
    """Four of nine pages belong to requests, and two requests may each want one more in hand."""
    scheduler, _ = scheduler_of(planner=None)
    frames = make(6 + resident, 10, 6, 1, PAGE)
    residency = scheduler.token_to_kv_pool_allocator.get_kvcache().residency = Residency(
        frames, torch.zeros(6, 8 * PAGE, dtype=torch.int64)
    )
    scheduler.req_to_token_pool.free_slots = [1, 3, 4]
    assert not residency.has_room  # a pass that the scheduler does not know of
    prefill.mark_tables(scheduler, SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False)))
    assert residency.has_room == (resident >= 6)
    rows, lens = torch.tensor([2]), torch.tensor([PAGE])
    residency.begin_decode(rows, lens, *torch.empty((2, 1, 8), dtype=torch.int32), 1)
    assert not residency.has_room  # each pass is told anew


def test_nothing_is_reclaimed_again_while_running_rows_have_every_frame():
    """Four rows of one page each fill four frames, and want another one each in every step. When one ends, its page may give way."""
    tables = (torch.arange(6 * 8 * PAGE, dtype=torch.int64) + PAGE).view(6, -1)
    frames, reclaimed = make(1 + 4 + 4, 60, 6, 1, PAGE), []
    residency, reclaim = Residency(frames, tables), frames.reclaim
    frames.reclaim = lambda *wanted: (reclaimed.append(frames.now), reclaim(*wanted))

    def step(rows: list[int]) -> None:
        residency.note_requests(set(rows), len(rows))
        table = torch.empty((2, len(rows), 8), dtype=torch.int32)
        residency.begin_decode(torch.tensor(rows), torch.full((len(rows),), PAGE), *table, len(rows))

    residency.note_requests({1, 2, 3, 4}, 4)
    residency.begin_in_place(
        torch.arange(1, 5), torch.full((4,), PAGE - 1), *torch.empty((2, 4, 8), dtype=torch.int32), torch.zeros(4), [PAGE - 1] * 4
    )
    reclaimed.clear()
    for _ in range(5):
        step([1, 2, 3, 4])
    assert not reclaimed  # nobody has ended, so no page is without a request
    for _ in range(5):
        step([1, 2, 3])
    assert reclaimed and reclaimed[0] == 7 and len(reclaimed) <= 2 and frames.counts.unserved == 1
    assert sum(int(hand) >= 0 for hand in frames.tables.in_hand) == 2 and len(residency.taken) <= 2  # what has been counted is forgotten


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
    backend.residency = Residency(make(9, 6000, 6, 1, PAGE), tables)
    backend.retrieval, backend.planner = (
        SimpleNamespace(prepare_extend=prepare_extend, complete_all_transfers=lambda: None),
        ExtendPlanner(InlineStream(), PAGE),
    )
    if scheduled:
        backend.planner.note_tables(rows)
    forward_batch = SimpleNamespace(
        req_pool_indices=rows.clone(), seq_lens=torch.tensor([3 * PAGE, 2 * PAGE]), seq_lens_cpu=torch.tensor([3 * PAGE, 2 * PAGE]),
        extend_prefix_lens_cpu=[2 * PAGE, PAGE], extend_seq_lens_cpu=[PAGE, PAGE], forward_mode=ForwardMode.EXTEND,
        extend_prefix_lens=torch.tensor([2 * PAGE, PAGE]),
    )  # fmt: skip
    backend._prepare(forward_batch)
    assert looked_up == [[3000, 3001, 5000]]
