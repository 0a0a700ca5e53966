"""The plan of slots: in lockstep with the reference over whole sequences, and by its properties for any logits, NaN too."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import plan, reference
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.seed import seed_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 40 if DEVICE == "cuda" else 6  # the interpreter takes 20 ms for a program
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter, of inf - inf
H, R, NEVER = 2, 5, -7
ROWS = [2, 0, 4, 1]  # 0 is padding; row 3 belongs to nobody here


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class State:
    """What a plan reads and writes, poisoned."""

    def __init__(self, capacity: int, budget: PageBudget) -> None:
        self.slot_pages = torch.full((R, H, capacity), NEVER, dtype=torch.int32, device=DEVICE)
        self.attended = torch.full((R, H, budget.total), NEVER, dtype=torch.int32, device=DEVICE)
        self.present = torch.full((len(ROWS), H), NEVER, dtype=torch.int32, device=DEVICE)
        self.counts = torch.zeros(R, 3, dtype=torch.int64, device=DEVICE)
        self.misses = Misses.allocate(len(ROWS) * H * budget.total, DEVICE)
        self.empty()

    def empty(self) -> None:
        """Poison what a plan writes without having read it."""
        self.misses.clear()
        self.attended.fill_(NEVER)
        self.present.fill_(NEVER)
        for column in (self.misses.host_pages, self.misses.heads, self.misses.slots):
            column.fill_(NEVER)

    def listed(self) -> set[tuple[int, ...]]:
        count = int(self.misses.length[0])
        for column in (self.misses.host_pages, self.misses.heads, self.misses.slots):
            assert (column[count:] == NEVER).all()
        units = set(zip(*(column.tolist() for column in self.misses.columns())))
        assert len(units) == count
        return units


class Sequences:
    """Requests that grow token by token, their logits, and calls with both."""

    def __init__(self, lens, budget, capacity, size, group, pooling="softmax-mean", steps=STEPS, kind="ties", ids=torch.int64) -> None:
        self.budget, self.size, self.group, self.pooling, self.kind = budget, size, group, pooling, kind
        self.rows = torch.tensor(ROWS, dtype=ids, device=DEVICE)
        self.seq_lens = torch.tensor(lens, dtype=ids, device=DEVICE)
        self.num_pages = (max(lens) + steps + size) // size
        host_pages = 1 + torch.randperm(len(lens) * self.num_pages).view(len(lens), -1)
        self.page_table = host_pages.to(dtype=ids, device=DEVICE)
        self.ours, self.theirs = State(capacity, budget), State(capacity, budget)

    def candidates(self, ahead: bool) -> torch.Tensor:
        """``[B, P]`` bool."""
        pages = torch.arange(self.num_pages, device=DEVICE)
        end = (self.seq_lens + ahead + self.size - 1) // self.size - self.budget.window
        return (pages >= self.budget.sink) & (pages < end[:, None])

    def weights(self, logits: torch.Tensor, ahead: bool) -> torch.Tensor:
        """``[B, H, P]`` float64, -inf where a page is no candidate."""
        grouped = logits.double().unflatten(1, (H, self.group)).masked_fill(~self.candidates(ahead)[:, None, None], -torch.inf)
        pooled = {"softmax-mean": grouped.log_softmax(-1).logsumexp(2), "mean": grouped.mean(2), "max": grouped.amax(2)}[self.pooling]
        return pooled.masked_fill(~self.candidates(ahead)[:, None], -torch.inf)

    def logits(self, ahead: bool) -> torch.Tensor:
        """Such as two correct programs must rank alike: many exact ties, or no two weights within rounding of each other."""
        shape = (len(ROWS), H, self.group, self.num_pages)
        if self.kind == "ties":  # the same for the group, or the order of summation would break them
            drawn = (torch.randint(-12, 12, (*shape[:2], 1, shape[3])) / 4).expand(shape).to(DEVICE)
        else:
            apart = False
            while not apart:
                drawn = 3 * torch.randn(shape, device=DEVICE)
                weights = self.weights(drawn.flatten(1, 2), ahead).sort(-1).values
                apart = not ((weights.diff(dim=-1) < 1e-4) & (weights[..., :-1] > -torch.inf)).any()
        return drawn.where(self.candidates(ahead)[:, None, None], torch.nan).flatten(1, 2).contiguous()

    def seed(self, logits: torch.Tensor) -> None:
        for seeding, state in ((seed_slots, self.ours), (reference.seed_slots, self.theirs)):
            seeding(logits, self.rows, self.seq_lens, self.budget, state.slot_pages, state.attended, self.size, self.pooling)

    def plan(self, module, state: State, logits: torch.Tensor, turned: torch.Tensor, ahead: bool) -> None:
        args = (logits, self.rows, self.seq_lens, self.page_table, self.budget, turned, ahead)
        written = state.slot_pages, state.attended, state.misses, state.counts
        module.plan_pages(*args, *written, self.size, self.pooling, None if ahead else state.present)

    def plan_both(self, logits: torch.Tensor, turned: torch.Tensor, ahead: bool) -> None:
        self.plan(plan, self.ours, logits, turned, ahead)
        self.plan(reference, self.theirs, logits, turned, ahead)

    def assert_alike(self) -> None:
        for name in ("slot_pages", "attended", "counts", "present"):
            assert torch.equal(getattr(self.ours, name), getattr(self.theirs, name)), name
        assert self.ours.listed() == self.theirs.listed()

    def assert_sound(self, ahead: bool, heads: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Properties of the tables of ``heads [B, H]``; the reference is not asked."""
        state, budget = self.ours, self.budget
        for b, h in heads.nonzero().tolist():
            table, attended = state.slot_pages[ROWS[b], h].tolist(), state.attended[ROWS[b], h].tolist()
            num_pages = -(-(int(self.seq_lens[b]) + ahead) // self.size)
            held = [page for page in table if page != -1]
            assert len(held) == len(set(held)) and all(0 <= page < num_pages for page in held)
            listed = [slot for slot in attended if slot != -1]
            assert len(listed) == len(set(listed)) and attended == listed + [-1] * (len(attended) - len(listed))
            assert all(0 <= slot < len(table) for slot in listed) and len(listed) == min(num_pages, budget.total)
            pages = {table[slot] for slot in listed}
            candidates = set(range(budget.sink, num_pages - budget.window))
            assert pages >= set(range(num_pages)) - candidates
            if weights is not None and candidates - pages:
                chosen, left = (weights[b, h, sorted(some)] for some in (candidates & pages, candidates - pages))
                assert chosen.min() >= left.max() - 1e-4

    def assert_only(self, heads: torch.Tensor, before: dict[str, torch.Tensor]) -> None:
        """Nothing but the rows of ``heads [B, H]`` differs from ``before``."""
        touched = torch.zeros(R, H, dtype=torch.bool, device=DEVICE)
        touched[self.rows.long()] = heads
        for name, table in before.items():
            assert torch.equal(getattr(self.ours, name)[~touched], table[~touched]), name

    def tables(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.ours, name).clone() for name in ("slot_pages", "attended")}


def turn(some: float = 0.5) -> torch.Tensor:
    """``[B, H]`` bool; never of padding."""
    return (torch.rand(len(ROWS), H) < some).to(DEVICE) & (torch.tensor(ROWS, device=DEVICE) > 0)[:, None]


REAL = (torch.tensor(ROWS, device=DEVICE) > 0)[:, None].expand(-1, H)
CASES = {
    "no-slack": SimpleNamespace(lens=[61, 9, 40, 18], budget=PageBudget(2, 4, 2), capacity=8, size=4, group=3),
    "slack": SimpleNamespace(lens=[61, 9, 40, 18], budget=PageBudget(2, 4, 2), capacity=11, size=4, group=3),
    "from-one-token": SimpleNamespace(lens=[1, 5, 15, 7], budget=PageBudget(1, 3, 1), capacity=7, size=2, group=1),
    "no-sink": SimpleNamespace(lens=[70, 1, 22, 33], budget=PageBudget(0, 1, 1), capacity=3, size=5, group=2),
    "one-token-pages": SimpleNamespace(lens=[30, 2, 11, 17], budget=PageBudget(3, 7, 5), capacity=20, size=1, group=4),
    "mean": SimpleNamespace(lens=[61, 9, 40, 18], budget=PageBudget(2, 4, 2), capacity=11, size=4, group=3, pooling="mean"),
    "max": SimpleNamespace(lens=[30, 2, 11, 17], budget=PageBudget(3, 7, 5), capacity=20, size=1, group=4, pooling="max"),
}


@pytest.mark.parametrize("kind", ["ties", "distinct"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sequences_go_as_with_the_reference(case, kind):
    run = Sequences(**vars(case), kind=kind, ids=torch.int32 if kind == "ties" else torch.int64)
    run.seed(run.logits(True))
    run.assert_alike()
    run.assert_sound(True, REAL)
    recalled = 0
    for _ in range(STEPS):
        run.seq_lens += 1
        turned = turn(0.4)
        for ahead in (False, True):
            for state in (run.ours, run.theirs):
                state.empty()
            before, logits = run.tables(), run.logits(ahead)
            run.plan_both(logits, turned, ahead)
            run.assert_alike()
            run.assert_sound(ahead, REAL & (turned | ahead), run.weights(logits, ahead))
            run.assert_only(REAL & (turned | ahead), before)
            recalled += len(run.ours.listed())
    assert recalled > 0 and run.ours.counts[ROWS, reference.RECALLED].sum() == recalled


def test_seeding_writes_its_rows_and_no_other():
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 11, 4, 3)
    before = run.tables()
    run.seed(run.logits(True))
    run.assert_only(REAL, before)
    assert (run.ours.slot_pages[REAL.new_tensor(ROWS, dtype=torch.long)][REAL] != NEVER).all()


@pytest.mark.parametrize("size, capacity", [(2, 64), (1, 96), (1, 256)])
def test_long_contexts_with_many_ties(size, capacity):
    run = Sequences([5000, 40, 900, 2100], PageBudget(16, 32, 16), capacity, size, 4, steps=2)
    run.seed(run.logits(True))
    run.assert_alike()
    run.seq_lens += 1
    run.plan_both(run.logits(True), turn(), True)
    run.assert_alike()
    assert len(run.ours.listed()) > 100


@pytest.mark.parametrize("lens", [[65536, 40, 4097, 20000]] if DEVICE == "cuda" else [[9000, 40, 4097, 8000]])
@pytest.mark.parametrize("size", [1, 3])
def test_longest_contexts_without_ties(lens, size):
    """Weights come as close as rounding here, so only properties can be asked for."""
    lens = [min(n, 32000 * size) for n in lens]
    run = Sequences(lens, PageBudget(16, 32, 16), 64, size, 4, steps=2)
    logits = torch.randn(len(ROWS), H * 4, run.num_pages, device=DEVICE)
    run.seed(logits)
    run.assert_sound(True, REAL, run.weights(logits, True))
    run.seq_lens += 1
    logits = torch.randn_like(logits)
    run.plan(plan, run.ours, logits, turn(), True)
    run.assert_sound(True, REAL, run.weights(logits, True))


@pytest.mark.parametrize("pooling", get_args(reference.Pooling))
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_tables_stay_sound_whatever_the_logits(poison, share, pooling):
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 10, 4, 3, pooling)

    def logits() -> torch.Tensor:
        drawn = 9 * torch.randn(len(ROWS), H * 3, run.num_pages)
        return drawn.masked_fill(torch.rand(drawn.shape) < share, poison).to(DEVICE)

    run.seed(logits())
    run.assert_sound(True, REAL)
    for ahead in (False, True):
        run.seq_lens += 1
        for state in (run.ours, run.theirs):
            state.empty()
        run.plan_both(logits(), REAL.contiguous(), ahead)
        run.assert_sound(ahead, REAL)
        run.ours.listed()
        if pooling != "softmax-mean":  # there what overflowed has no say, and nothing is left to rounding
            run.assert_alike()


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_zeros_of_both_signs_tie(pooling):
    run = Sequences([61, 61, 61, 61], PageBudget(2, 4, 2), 8, 4, 2, pooling)
    signs = torch.randint(2, (len(ROWS), 1, run.num_pages), device=DEVICE) * 2 - 1
    run.seed((0.0 * signs).expand(-1, 2 * H, -1).contiguous())
    run.assert_alike()
    assert run.ours.slot_pages[REAL.new_tensor(ROWS, dtype=torch.long)][REAL].tolist() == [[0, 1, 2, 3, 4, 5, 14, 15]] * 6


def test_a_kept_page_keeps_its_slot_and_the_missing_go_where_they_are_told():
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 11, 4, 3)
    run.seed(run.logits(True))
    run.seq_lens += 1
    before = run.ours.slot_pages.clone()
    run.plan(plan, run.ours, run.logits(True), turn(), True)
    moved, units = before != run.ours.slot_pages, run.ours.listed()
    kept = {(r, h, page) for r, h, c in (~moved).nonzero().tolist() if (page := int(before[r, h, c])) >= 0}
    b_of_row = {row: b for b, row in enumerate(ROWS)}
    for host_page, h, slot in units:
        row, c = divmod(slot, 11)
        page = int(run.ours.slot_pages[row, h, c])
        assert moved[row, h, c] and (row, h, page) not in kept and host_page == run.page_table[b_of_row[row], page]
    contents = run.seq_lens.new_zeros(R).index_copy_(0, run.rows.long(), run.seq_lens // run.size)
    assert len(units) == (moved & (run.ours.slot_pages < contents[:, None, None])).sum() > 0


@pytest.mark.parametrize("capacity", [8, 11])
def test_what_is_in_its_slot_is_listed_before_what_is_not(capacity):
    run, recalled = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), capacity, 4, 3), 0
    run.seed(run.logits(True))
    for _ in range(STEPS):
        run.seq_lens += 1
        before, turned = run.ours.slot_pages.clone(), turn()
        run.ours.empty()
        run.plan(plan, run.ours, run.logits(False), turned, False)
        into = {(head, slot) for _, head, slot in run.ours.listed()}
        for b, h in product(range(len(ROWS)), range(H)):
            present = int(run.ours.present[b, h])
            if not turned[b, h]:
                assert present == run.budget.total
                continue
            slots = [slot for slot in run.ours.attended[ROWS[b], h].tolist() if slot != -1]
            there, others = slots[:present], slots[present:]
            assert there == sorted(there) and others == sorted(others)
            table, old = run.ours.slot_pages[ROWS[b], h].tolist(), before[ROWS[b], h].tolist()
            assert all(table[slot] == old[slot] for slot in there) and all(table[slot] != old[slot] for slot in others)
            assert into.isdisjoint((h, ROWS[b] * capacity + slot) for slot in there)
            recalled += len(others)
        run.plan(plan, run.ours, run.logits(True), turned, True)
    assert recalled > 0


def test_what_does_not_fit_the_list_is_not_written():
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 8, 4, 3)
    run.seed(run.logits(True))
    run.seq_lens += 1
    whole = run.ours.misses
    run.ours.misses = Misses(whole.length, *(column[:3] for column in (whole.host_pages, whole.heads, whole.slots)))
    run.plan(plan, run.ours, run.logits(True), turn(), True)
    assert whole.length[0] > 3
    for column in (whole.host_pages, whole.heads, whole.slots):
        assert (column[:3] >= 0).all() and (column[3:] == NEVER).all()


def test_pages_of_the_past_are_ranked_by_weight_and_then_by_slot_for_eviction():
    """Slots 0..5 hold pages 0..5; pages 3 and 6 are wanted, the rest leaves from the lightest, of equal ones the first slot."""
    budget, one = PageBudget(0, 2, 1), torch.tensor([1], device=DEVICE)
    logits = torch.tensor([[[1.0, 0.0, 1.0, 7.0, 0.0, 2.0, 7.0, 9.0]]], device=DEVICE).repeat(1, H, 1)
    state, page_table = State(6, budget), torch.arange(10, 18, device=DEVICE)[None]
    state.slot_pages[1] = torch.arange(6, device=DEVICE)
    turned = torch.tensor([[True, False]], device=DEVICE)
    for listed in ([3, 1, 4], [1, 3, 4]):  # what comes is behind what is there, until it has come
        plan.plan_pages(logits, one, one * 8, page_table, budget, turned, False, *(
            state.slot_pages, state.attended, state.misses, state.counts, 1))  # fmt: skip
        assert state.slot_pages[1].tolist() == [[0, 6, 2, 3, 7, 5], [0, 1, 2, 3, 4, 5]]
        assert state.attended[1].tolist() == [listed, [NEVER] * 3]
    assert state.listed() == {(16, 0, 7), (17, 0, 10)}
    assert state.counts[1].tolist() == [0 + 2, 2, 0]
