"""Kernels that take their place while the one before still runs: what it has yet to write they wait for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import Candidates, Heads, Misses, Reads, Tables, attend, merge, plan, preselect, recall, score, select
from sglang_freekv.kernels.follow import can_follow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or not can_follow(torch.device("cuda")), reason="needs a Hopper")

H, G, D, S, PAGES, REQUESTS, RUNS = 8, 4, 128, 32, 4096, 8, 20
NONSENSE = {torch.float32: torch.nan, torch.int32: 0}  # of pages and weights: no page lies elsewhere
PARTS = (1024, 1024)  # of candidates, as BLOCKS: each kv head has four
EACH, SHARED = REQUESTS * H * 4, REQUESTS * H * 2  # programs, one for each part or for every second
WAYS = {"at once": (select.BLOCKS, EACH), "in parts": (PARTS, EACH), "in turns": (PARTS, SHARED)}  # in which a plan selects
BUDGET = PageBudget(sink=16, selected=32, window=16)
SLOTS = BUDGET.sink + BUDGET.selected + BUDGET.window


@triton.jit
def passes_on(FOLLOWS: tl.constexpr):
    pass


class Correction:
    """Score, plan, recall, the attention to what came and the merge of requests whose kv heads are all corrected, one behind the other.

    The host pool is on the device, for nothing here asks for a link.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rows = torch.arange(1, REQUESTS + 1, device="cuda")
        self.lens = torch.full((REQUESTS,), PAGES * S - 5, device="cuda")
        self.queries = torch.randn(REQUESTS, H * G, D, dtype=torch.bfloat16, device="cuda")
        self.table = torch.stack([torch.randperm(PAGES, device="cuda") for _ in range(REQUESTS)]).int()
        self.digests = torch.randn(PAGES, H, 2, D, dtype=torch.bfloat16, device="cuda")
        self.host = torch.randn(PAGES, H, 2, S, D, dtype=torch.bfloat16, device="cuda")
        self.corrected = torch.ones(REQUESTS, H, dtype=torch.bool, device="cuda")
        self.counts = torch.zeros(REQUESTS + 1, 3, dtype=torch.int64, device="cuda")
        self.scratch: dict[tuple, torch.Tensor] = {}

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """In the place of ``torch.empty``: what ``run`` has filled with nonsense before, so that no kernel does so in between."""
        key = shape, dtype
        if key not in self.scratch:
            self.scratch[key] = torch.full(shape, NONSENSE[dtype], dtype=dtype, device=device)
        return self.scratch[key]

    def run(self, between=lambda: None) -> list[torch.Tensor]:
        """What the kernels leave, with ``between`` them. All of them are given to the device before the first one begins, and what one
        writes for another held nonsense before."""
        row_frames = torch.arange((REQUESTS + 1) * SLOTS, dtype=torch.int32, device="cuda").view(-1, SLOTS)
        tables = Tables(*torch.full((2, REQUESTS + 1, H, SLOTS), -1, dtype=torch.int32, device="cuda"), row_frames)
        frames, heads = torch.full_like(self.table, -1), Heads(self.corrected, torch.zeros_like(self.corrected))
        keys, values = torch.zeros(2, (REQUESTS + 1) * SLOTS, S, H, D, dtype=torch.bfloat16, device="cuda")
        reads = Reads(*(tensor.zero_() for tensor in Reads.allocate(REQUESTS, H, SLOTS, torch.device("cuda"))[:3]))
        shares = attend.allocate_shares(self.queries, keys, reads)
        attending = self.queries, keys, values, self.lens, reads, D**-0.5, shares
        attend.attend_present(*attending)  # to nothing, as reads are
        now, ahead = (Misses.allocate(REQUESTS * H * SLOTS, "cuda") for _ in range(2))
        for (_, dtype), tensor in self.scratch.items():
            tensor.fill_(NONSENSE[dtype])
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        with mock.patch.object(torch, "empty", lambda *shape, **options: torch.full(shape, torch.nan, **options)):
            logits = score.score_pages(self.queries, self.digests, self.rows, self.lens, self.table, BUDGET, S, scale=D**-0.5)
        between()
        candidates = Candidates(logits, self.rows, self.lens, self.table, frames, BUDGET, S)
        with mock.patch.object(torch, "empty", self.empty):
            plan.plan_pages(candidates, heads, tables, reads, now, ahead, self.counts, ahead_first=True)
        between()
        recall.recall_pages(self.host, now, keys, values, 64, closely=True)
        between()
        attend.attend_rest(*attending)
        between()
        output = merge.merge_shares(*shares, self.queries.dtype)
        torch.cuda.synchronize()
        return [*tables, keys, values, output]


@pytest.fixture(scope="module", params=WAYS)
def correction(request) -> Correction:
    blocks, programs = WAYS[request.param]
    with mock.patch.object(select, "BLOCKS", blocks), mock.patch.object(preselect, "PROGRAMS", programs):
        yield Correction()


@pytest.fixture(scope="module")
def expected(correction) -> list[torch.Tensor]:
    correction.run(torch.cuda.synchronize)
    outputs = correction.run(torch.cuda.synchronize)
    assert all(torch.equal(a, b) for a, b in zip(outputs, correction.run(torch.cuda.synchronize)))
    assert outputs[-1].isfinite().all()
    return outputs


def differ(correction, expected) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(correction.run(), expected))


def test_what_follows_closely_finds_what_was_written(correction, expected):
    assert not any(differ(correction, expected) for _ in range(RUNS))


ALWAYS, IN_PARTS = [(plan, "_plan_pages"), (recall, "_recall_kernel")], [(preselect, "_norm_parts"), (preselect, "_preselect")]
CONTROLS = [(way, *control) for way in WAYS for control in (ALWAYS if way == "at once" else ALWAYS + IN_PARTS)]


@pytest.mark.parametrize("correction, module, kernel", CONTROLS, indirect=["correction"])
def test_a_kernel_that_does_not_wait_is_caught(module, kernel, correction, expected, monkeypatch):
    """The negative control. Before these comes a kernel that lets them in early."""
    monkeypatch.setattr(module, "await_previous", passes_on)
    monkeypatch.setattr(module, kernel, triton.jit(getattr(module, kernel).fn))
    correction.run(torch.cuda.synchronize)  # compiles
    assert any(differ(correction, expected) for _ in range(RUNS))
