"""Random inputs for the kernels at the shapes of real models, and what a plan of slots must satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from benchmarks import profiles
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import Candidates, Heads, Misses, Reads, Tables, reference

CACHED_BYTES = 256 << 20  # several times an H200's L2: rotating among sets of so many bytes, none is in it
MISSED = profiles.MISSED
CORRECTED = profiles.CORRECTED[0.8]
DTYPE = torch.bfloat16
CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement: heads of a model, tokens of context, requests, and FreeKV's pages."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    page_size: int = 32
    budget: PageBudget = PageBudget(16, 32, 16)

    @property
    def capacity(self) -> int:
        return self.budget.total

    @property
    def unit_bytes(self) -> int:
        return 2 * self.page_size * self.head_dim * DTYPE.itemsize

    @property
    def new_pages(self) -> int:
        """Selected pages of a kv head that a step finds missing."""
        return max(1, round(MISSED * self.budget.selected))


@dataclass
class Layer:
    """What the kernels of one layer read and write, named as in ``kernels.reference``."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: Tables
    previous: torch.Tensor
    digests: torch.Tensor
    queries: torch.Tensor
    new_keys: torch.Tensor
    new_values: torch.Tensor
    corrected: torch.Tensor
    reads: Reads  # those of corrected kv heads as if a share were not there at first
    logits: tuple[torch.Tensor, torch.Tensor]  # planned in turn, each makes ``new_pages`` of every kv head missing


class Inputs:
    """Tensors of a case on a device."""

    def __init__(self, case: Case, device: str, host: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.host_memory = case, device, host
        self.num_rows, self.num_pages = case.batch + 2, case.context // case.page_size + 2
        self.rows = torch.randperm(case.batch + 1, device=device)[: case.batch] + 1
        self.seq_lens = case.context - 37 * torch.arange(case.batch, device=device) % (case.context // 2)
        order = torch.randperm(case.batch * self.num_pages, device=device) + 1
        self.page_table = order.to(torch.int32).view(case.batch, self.num_pages)
        self.frames = torch.full_like(self.page_table, -1)  # nothing is resident
        self.counts = torch.zeros(self.num_rows, 3, dtype=torch.int64, device=device)
        self.misses_now, self.misses_ahead = (Misses.allocate(1 << (22 if device == "cuda" else 16), device) for _ in range(2))
        layer_bytes = case.batch * case.kv_heads * case.capacity * case.unit_bytes
        count = min(32, max(2, -(-CACHED_BYTES // layer_bytes))) if device == "cuda" else 2
        self.layers = [self._layer() for _ in range(count)]

    @cached_property
    def host(self) -> torch.Tensor:
        """``[n_page, H, 2, S, D]`` in pinned memory, full of random numbers."""
        case = self.case
        page = case.kv_heads * case.unit_bytes // DTYPE.itemsize
        pages = self.host_memory.numel() // page
        return self.host_memory[: pages * page].view(pages, case.kv_heads, 2, case.page_size, case.head_dim)

    def candidates(self, logits: torch.Tensor) -> Candidates:
        return Candidates(logits, self.rows, self.seq_lens, self.page_table, self.frames, self.case.budget, self.case.page_size)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device)

    def _layer(self) -> Layer:
        case, device = self.case, self.device
        slots = (self.num_rows * case.capacity, case.page_size, case.kv_heads, case.head_dim)
        previous = self.draw(self.num_rows, case.query_heads, case.head_dim)
        queries = previous[self.rows] + self.draw(case.batch, case.query_heads, case.head_dim) / 2  # a cosine near 0.9
        slot_pages = torch.full((self.num_rows, case.kv_heads, case.capacity), -1, dtype=torch.int32, device=device)
        row_frames = torch.arange(slots[0], dtype=torch.int32, device=device).view(self.num_rows, -1)
        tables, logits = Tables(slot_pages, slot_pages.clone(), row_frames), self._logits()
        reference.seed_slots(self.candidates(logits[0]), tables)
        corrected = torch.rand(case.batch, case.kv_heads, device=device) < CORRECTED
        corrected[0, 0] = True
        present = torch.where(corrected, case.budget.total - case.new_pages, case.budget.total).to(torch.int32)
        return Layer(
            keys=self.draw(*slots),
            values=self.draw(*slots),
            tables=tables,
            previous=previous,
            digests=self.draw(case.batch * self.num_pages + 1, case.kv_heads, 2, case.head_dim),
            queries=queries,
            new_keys=self.draw(case.batch, case.kv_heads, case.head_dim),
            new_values=self.draw(case.batch, case.kv_heads, case.head_dim),
            corrected=corrected,
            reads=Reads.of(self.rows, tables, self.frames)._replace(present=present),
            logits=logits,
        )

    def _logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two sets ``[B, Hq, P]`` of logits whose selections differ in ``new_pages`` pages of every kv head."""
        case = self.case
        group = case.query_heads // case.kv_heads
        first = torch.randn(case.batch, case.kv_heads, 1, self.num_pages, device=self.device)
        first = first + torch.randn(case.batch, case.kv_heads, group, self.num_pages, device=self.device) / 8
        first = first.flatten(1, 2)
        _, order, _ = reference.select_pages(first, self.seq_lens + 1, case.budget, case.kv_heads, case.page_size)
        chosen, new = case.budget.selected, case.new_pages
        leaves = order[..., chosen - new : chosen].repeat_interleave(group, 1)
        comes = order[..., chosen : chosen + new].repeat_interleave(group, 1)
        second = first.clone()
        second.scatter_(2, comes, first.gather(2, leaves)).scatter_(2, leaves, first.gather(2, comes))
        return first, second


class Pages(NamedTuple):
    """Full pages in token rows, and the host pages that they go to."""

    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    host_pages: torch.Tensor


def full_pages(inputs: Inputs, chunk: bool) -> list[Pages]:
    """For each layer, pages that a chunk of an extend fills, or that one decode step does if every request fills one."""
    case, found = inputs.case, []
    for layer in inputs.layers:
        keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
        places = torch.randperm(len(keys) // case.page_size, device=inputs.device) * case.page_size
        places = places[: CHUNK_TOKENS // case.page_size if chunk else case.batch]
        hosts = torch.randperm(min(len(inputs.host), len(layer.digests)) - 1, device=inputs.device)[: len(places)] + 1
        count = min(len(places), len(hosts))
        found.append(Pages(keys, values, places[:count, None].expand(-1, case.kv_heads), hosts[:count]))
    return found


def check_plans(inputs: Inputs, layer: Layer, logits: torch.Tensor, module, ahead_first: bool, tolerance: float = 1e-4) -> torch.Tensor:
    """Both plans of ``module`` on copies of a layer's tables; raises AssertionError on the first property that does not hold.

    Returns:
        ``[B, H]`` bool: kv heads whose pages are the reference's; others may be where weights all but tie.
    """
    case, rows, corrected = inputs.case, inputs.rows, layer.corrected
    outcome = []
    for plans in (module, reference):
        tables, counts = Tables(*(table.clone() for table in layer.tables)), inputs.counts.clone()
        reads = Reads.allocate(case.batch, case.kv_heads, case.budget.total, inputs.device)
        misses = [Misses.allocate(1 << 16, inputs.device) for _ in range(2)]
        where = inputs.candidates(logits), Heads(corrected, torch.empty_like(corrected)), tables
        plans.plan_pages(*where, reads, *misses, counts, ahead_first=ahead_first)
        plans.plan_rest(*where, misses[1], counts, ahead_first=ahead_first)
        outcome.append(
            (tables.slot_pages[rows].long(), tables.attended[rows].long(), reads, [each.columns() for each in misses], counts[rows])
        )
    (pages, attended, reads, (now, ahead), counts), (expected_pages, expected, expected_reads, _, expected_counts) = outcome
    begins = corrected & (inputs.seq_lens % case.page_size == 0)[:, None]

    def marked(found: torch.Tensor) -> torch.Tensor:
        """``[B, H, P]`` which pages are in a list ``[B, H, N]`` of pages, -1 for none."""
        marks = torch.zeros(case.batch, case.kv_heads, inputs.num_pages + 1, dtype=torch.bool, device=inputs.device)
        return marks.scatter_(2, found.where(found >= 0, inputs.num_pages).long(), True)[..., :-1]

    def listed(table: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return marked(table.gather(2, which.clamp(min=0)).where(which >= 0, -1))

    def check_choice(chosen: torch.Tensor, tokens: torch.Tensor, heads: torch.Tensor) -> None:
        weights, _, required = reference.select_pages(logits, tokens, case.budget, case.kv_heads, case.page_size)
        assert torch.equal(chosen.sum(-1)[heads], required.sum(-1)[heads]), "another number of pages is attended to"
        lightest = weights.masked_fill(~(required & (weights > float("-inf"))), float("inf")).amin(-1, keepdim=True)
        too_light = chosen & ~required & ~(weights >= lightest - tolerance)
        assert not too_light[heads].any(), "pages were chosen that are lighter than others"
        assert not (required & ~chosen & ~(weights <= lightest + tolerance))[heads].any(), "required pages are missing"

    ordered = pages.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(), "a page is in two slots"
    read, right = (marked(each.pages.where(each.frames >= 0, -1)) for each in (reads, expected_reads))
    chosen = listed(pages, attended)
    check_choice(read, inputs.seq_lens, corrected)
    check_choice(chosen, inputs.seq_lens + 1, ~corrected | begins)
    assert torch.equal(chosen[corrected & ~begins], read[corrected & ~begins]), "the next step attends to other pages than this one"
    before = layer.tables.slot_pages[rows].long()
    old = before.gather(2, layer.tables.attended[rows].clamp(min=0).long()).where(layer.tables.attended[rows] >= 0, -1)
    assert torch.equal(read[~corrected], marked(old)[~corrected]), "what was selected a step ago is not attended to"
    slots = reads.frames.long() - (rows * case.capacity)[:, None, None]
    there = (before.gather(2, slots.clamp(0, case.capacity - 1)) == reads.pages) & (reads.frames >= 0)
    first = torch.arange(slots.shape[2], device=inputs.device) < reads.present[..., None]
    assert torch.equal((there & first).sum(-1)[corrected], reads.present.long()[corrected]), "a list does not begin with what is there"
    assert (reads.present[~corrected] == slots.shape[2]).all(), "a list that was not planned is not whole"
    assert torch.equal((reads.frames >= 0).sum(-1), read.sum(-1)), "a page is read twice"

    request = torch.full((inputs.num_rows,), -1, device=inputs.device).scatter_(0, rows, torch.arange(case.batch, device=inputs.device))
    held = torch.full((*corrected.shape, case.capacity + 1), -1, device=inputs.device)
    held = held.scatter_(2, slots.where(reads.frames >= 0, case.capacity), reads.pages.long())[..., :-1]
    held = held.where(corrected[..., None] & (held >= 0), before)  # between the two selections of a corrected kv head
    full = (inputs.seq_lens // case.page_size)[:, None, None]
    for (host_pages, heads, into), was, table, planned in ((now, before, held, corrected), (ahead, held, pages, ~corrected | begins)):
        changed = int(((table != was) & (table < full))[planned].sum())
        assert len(into) == changed, f"{len(into)} units are to be recalled, expected {changed}"
        b, h, slot = request[into.long() // case.capacity], heads.long(), into.long() % case.capacity
        assert planned[b, h].all(), "a unit is recalled for a kv head that was not planned"
        assert torch.equal(inputs.page_table[b, table[b, h, slot]], host_pages), "a unit is recalled from another page's place"
    same = ((read == right) & (chosen == listed(expected_pages, expected))).all(-1)
    if bool(same.all()):
        assert torch.equal(counts, expected_counts), "the counts are not the reference's"
    return same
