"""The plan of slots: in lockstep with the reference over whole sequences, and by its properties for any logits, NaN too."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from covering import covering
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import plan, preselect, reference, select
from sglang_freekv.kernels.candidates import Candidates, Heads, Tables
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads
from sglang_freekv.kernels.seed import seed_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 40 if DEVICE == "cuda" else 6  # the interpreter takes 20 ms for a program
pytestmark = pytest.mark.filterwarnings(  # the interpreter, of inf - inf and of log(0)
    "ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
H, R, NEVER = 2, 5, -7
ROWS = [2, 0, 4, 1]  # 0 is padding; row 3 belongs to nobody here


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class State:
    """What a plan reads and writes, poisoned."""

    def __init__(self, capacity: int, budget: PageBudget, attended: int | None = None) -> None:
        width = budget.total if attended is None else attended
        self.slot_pages = torch.full((R, H, capacity), NEVER, dtype=torch.int32, device=DEVICE)
        self.attended = torch.full((R, H, width), -1, dtype=torch.int32, device=DEVICE)
        self.row_frames = torch.arange(R * capacity, dtype=torch.int32, device=DEVICE).view(R, capacity)
        self.lost = torch.zeros(len(ROWS), H, dtype=torch.bool, device=DEVICE)
        self.reads = Reads.allocate(len(ROWS), H, width, DEVICE, budget.total)
        self.counts = torch.zeros(R, 3, dtype=torch.int64, device=DEVICE)
        self.misses_now, self.misses_ahead = (Misses.allocate(len(ROWS) * H * budget.total, DEVICE) for _ in range(2))
        self.empty()

    @property
    def tables(self) -> Tables:
        return Tables(self.slot_pages, self.attended, self.row_frames)

    def empty(self) -> None:
        """Poison what a plan writes without having read it."""
        for tensor in self.reads[:3]:
            tensor.fill_(NEVER)
        for misses in (self.misses_now, self.misses_ahead):
            misses.clear()
            for column in (misses.host_pages, misses.heads, misses.frames):
                column.fill_(NEVER)

    def listed(self) -> list[set[tuple[int, ...]]]:
        """Units to be recalled for this step, and for the next."""
        found = []
        for misses in (self.misses_now, self.misses_ahead):
            count = int(misses.length[0])
            for column in (misses.host_pages, misses.heads, misses.frames):
                assert (column[count:] == NEVER).all()
            units = set(zip(*(column.tolist() for column in misses.columns())))
            assert len(units) == count
            found.append(units)
        return found

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is read, without that which may be anything; and what is lost."""
        return self.reads.frames, self.reads.pages.where(self.reads.frames >= 0, -1), self.reads.present, self.lost


class Sequences:
    """Requests that grow token by token, their logits, and calls with both."""

    def __init__(
        self,
        lens,
        budget,
        capacity,
        size,
        group,
        pooling="softmax-mean",
        steps=STEPS,
        kind="ties",
        ids=torch.int64,
        ahead_first=True,
        residency=0.0,
        attended=None,
        hysteresis=0.0,
        on_turn=False,
    ) -> None:
        self.hysteresis, self.on_turn = hysteresis, on_turn
        self.budget, self.size, self.group, self.pooling, self.kind, self.ahead_first = budget, size, group, pooling, kind, ahead_first
        self.rows = torch.tensor(ROWS, dtype=ids, device=DEVICE)
        self.seq_lens = torch.tensor(lens, dtype=ids, device=DEVICE)
        self.num_pages = (max(lens) + steps + size) // size
        host_pages = 1 + torch.randperm(len(lens) * self.num_pages).view(len(lens), -1)
        self.page_table = host_pages.to(dtype=ids, device=DEVICE)
        self.ours, self.theirs = State(capacity, budget, attended), State(capacity, budget, attended)
        self.residency, self.tier = residency, R * capacity  # share of pages that are resident; the first frame that is no slot
        self.own_frames = (self.tier + torch.randperm(len(lens) * self.num_pages)).view(len(lens), -1).to(torch.int32).to(DEVICE)
        self.frames = torch.full_like(self.own_frames, -1)
        self.move(residency)

    def move(self, some: float) -> None:
        """Draw anew which pages are resident, of ``some`` of the full ones, and of each page that the next token begins."""
        pages = torch.arange(self.num_pages, device=DEVICE)
        full = (pages < ((self.seq_lens - 1) // self.size)[:, None]) & (torch.rand(self.frames.shape) < some).to(DEVICE)
        drawn = full | ((pages == (self.seq_lens // self.size)[:, None]) & self.begins)
        resident = drawn & (torch.rand(self.frames.shape) < self.residency).to(DEVICE)
        self.frames = self.frames.where(~drawn, self.own_frames.where(resident, -1))

    def candidates(self, ahead: bool) -> torch.Tensor:
        """``[B, P]`` bool."""
        pages = torch.arange(self.num_pages, device=DEVICE)
        end = (self.seq_lens + ahead + self.size - 1) // self.size - self.budget.window
        return (pages >= self.budget.sink) & (pages < end[:, None])

    def attended(self, b: int, num_pages: int) -> int:
        """Pages that a selection among ``num_pages`` attends to: all of at most A whose absent ones fit the slots, else the budget."""
        _, _, capacity, width = *self.ours.slot_pages.shape, self.ours.attended.shape[2]
        in_full = num_pages <= width and sum(frame < 0 for frame in self.frames[b, :num_pages].tolist()) <= capacity
        return num_pages if in_full else min(num_pages, self.budget.total)

    def weights(self, logits: torch.Tensor, ahead: bool) -> torch.Tensor:
        """``[B, H, P]`` float64, -inf where a page is no candidate."""
        grouped = logits.double().unflatten(1, (H, self.group)).masked_fill(~self.candidates(ahead)[:, None, None], -torch.inf)
        pooled = {"softmax-mean": grouped.log_softmax(-1).logsumexp(2), "mean": grouped.mean(2), "max": grouped.amax(2)}[self.pooling]
        return pooled.masked_fill(~self.candidates(ahead)[:, None], -torch.inf)

    def logits(self) -> torch.Tensor:
        """Such as two correct programs must rank alike: many exact ties, or no two weights within rounding of each other."""
        shape = (len(ROWS), H, self.group, self.num_pages)
        if self.kind == "ties":  # the same for the group, or the order of summation would break them
            drawn = (torch.randint(-12, 12, (*shape[:2], 1, shape[3])) / 4).expand(shape).to(DEVICE)
        else:
            apart = False
            while not apart:
                drawn = 3 * torch.randn(shape, device=DEVICE)
                weights = [self.weights(drawn.flatten(1, 2), ahead) for ahead in (False, True)]
                apart = all(self._apart(torch.cat([each, each + self.hysteresis], -1) if self.hysteresis else each) for each in weights)
        return drawn.where(self.candidates(True)[:, None, None], torch.nan).flatten(1, 2).contiguous()

    @staticmethod
    def _apart(weights: torch.Tensor) -> bool:
        weights = weights.sort(-1).values
        return not ((weights.diff(dim=-1) < 1e-4) & (weights[..., :-1] > -torch.inf)).any()

    @property
    def begins(self) -> torch.Tensor:
        """``[B, 1]`` bool: the next token begins a page."""
        return (self.seq_lens % self.size == 0)[:, None]

    @property
    def due(self) -> torch.Tensor:
        """``[B, 1]`` bool: kv heads that are not corrected select, too."""
        width = self.ours.attended.shape[2]
        by_memory = (width > self.budget.total) & (self.seq_lens <= width * self.size)
        return self.begins | by_memory[:, None] | (not self.on_turn)

    def selects(self, corrected: torch.Tensor) -> torch.Tensor:
        """``[B, H]`` bool: kv heads that need scores in this step; those that have lost a page among them."""
        entries = self.ours.attended[self.rows.long()]
        frames = self.frames[:, None].expand(-1, H, -1).gather(2, (-2 - entries).clamp(min=0).long())
        return REAL & (corrected | self.due | ((entries < -1) & (frames < 0)).any(-1))

    def given(self, logits: torch.Tensor) -> Candidates:
        where = logits, self.rows, self.seq_lens, self.page_table, self.frames, self.budget, self.size
        return Candidates(*where, self.pooling, self.hysteresis, self.on_turn)

    def seed(self, logits: torch.Tensor) -> None:
        for seeding, state in ((seed_slots, self.ours), (reference.seed_slots, self.theirs)):
            seeding(self.given(logits), state.tables)

    def plan(self, module, state: State, logits: torch.Tensor, corrected: torch.Tensor) -> None:
        """Both plans; what there is to each of them alone is asked for here."""
        heads, tables, order = Heads(corrected, state.lost), state.tables, {"ahead_first": self.ahead_first}
        args = self.given(logits), heads, tables
        before = [table.clone() for table in tables]
        module.plan_pages(*args, state.reads, state.misses_now, state.misses_ahead, state.counts, **order)
        self.assert_only_of(REAL & (corrected | state.lost | (self.due & self.ahead_first)), tables, before)
        before, reads, now = (
            [table.clone() for table in tables],
            [part.clone() for part in state.reads[:3]],
            int(state.misses_now.length[0]),
        )
        module.plan_rest(*args, state.misses_ahead, state.counts, **order)
        rest = corrected & self.begins | (~corrected if not self.ahead_first else state.lost)
        self.assert_only_of(REAL & rest & self.due, tables, before)
        assert int(state.misses_now.length[0]) == now and all(torch.equal(a, b) for a, b in zip(state.reads, reads))

    def assert_only_of(self, heads: torch.Tensor, tables: tuple[torch.Tensor, ...], before: list[torch.Tensor]) -> None:
        """Nothing but the rows of ``heads [B, H]`` differs from ``before``."""
        touched = torch.zeros(R, H, dtype=torch.bool, device=DEVICE)
        touched[self.rows.long()] = heads
        for table, old in zip(tables[:2], before):
            assert torch.equal(table[~touched], old[~touched])

    def plan_both(self, logits: torch.Tensor, corrected: torch.Tensor) -> None:
        self.plan(plan, self.ours, logits, corrected)
        self.plan(reference, self.theirs, logits, corrected)

    def assert_alike(self) -> None:
        for name in ("slot_pages", "attended", "counts"):
            assert torch.equal(getattr(self.ours, name), getattr(self.theirs, name)), name
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(self.ours.read(), self.theirs.read())), "reads"
        assert self.ours.listed() == self.theirs.listed()

    def assert_read_is_sound(self, corrected: torch.Tensor, before: dict[str, torch.Tensor], weights: torch.Tensor | None = None) -> None:
        """A corrected kv head reads the best pages of now, and another what was selected a step ago; the reference is not asked."""
        reads, budget = self.ours.reads, self.budget
        capacity, width = before["slot_pages"].shape[2], before["attended"].shape[2]
        for b, h in product(range(len(ROWS)), range(H)):
            frames = [frame for frame in reads.frames[b, h].tolist() if frame != -1]
            pages, present = reads.pages[b, h].tolist()[: len(frames)], int(reads.present[b, h])
            assert reads.frames[b, h].tolist() == frames + [-1] * (width - len(frames))
            if not REAL[b, h]:
                assert not frames and present == width
                continue
            num_pages, old = -(-int(self.seq_lens[b]) // self.size), before["slot_pages"][ROWS[b], h].tolist()
            entries = [entry for entry in before["attended"][ROWS[b], h].tolist() if entry != -1]
            was = [old[entry] if entry >= 0 else -2 - entry for entry in entries]
            resident = self.frames[b].tolist()
            first = ROWS[b] * capacity
            own = [frame - first for frame in frames if frame < self.tier]
            assert len(set(pages)) == len(pages) and all(0 <= page < num_pages for page in pages)
            assert len(set(frames)) == len(frames) and all(0 <= slot < capacity for slot in own)
            assert all(frame == resident[page] for frame, page in zip(frames, pages) if frame >= self.tier)
            lost = any(entry < -1 and resident[-2 - entry] < 0 for entry in entries)
            assert bool(self.ours.lost[b, h]) == (lost and not corrected[b, h])
            if not corrected[b, h] and not lost:
                assert [first + entry if entry >= 0 else resident[-2 - entry] for entry in entries] == frames
                assert pages == was and present == width
                continue
            there = [frame >= self.tier or old[frame - first] == page for frame, page in zip(frames, pages)]
            assert there == [True] * present + [False] * (len(frames) - present)
            in_frames, kept, missing = frames[: len(frames) - len(own)], own[: present - len(frames) + len(own)], frames[present:]
            assert all(frame >= self.tier for frame in in_frames) and kept == sorted(kept) and missing == sorted(missing)
            assert {page for page in pages if resident[page] >= 0} == set(pages[: len(in_frames)])
            candidates = set(range(budget.sink, num_pages - budget.window))
            assert set(pages) >= set(range(num_pages)) - candidates
            assert len(pages) == self.attended(b, num_pages)
            if not corrected[b, h] and num_pages > width:
                assert set(pages) == set(was)
            elif weights is not None and candidates - set(pages):
                chosen, left = (weights[b, h, sorted(some)] for some in (candidates & set(pages), candidates - set(pages)))
                assert chosen.min() >= left.max() - 1e-4 - self.hysteresis

    def assert_sound(self, heads: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Properties of the tables of ``heads [B, H]``, which are those of the next step; the reference is not asked."""
        state, budget = self.ours, self.budget
        for b, h in heads.nonzero().tolist():
            table, attended = state.slot_pages[ROWS[b], h].tolist(), state.attended[ROWS[b], h].tolist()
            num_pages = -(-(int(self.seq_lens[b]) + 1) // self.size)
            held = [page for page in table if page != -1]
            assert len(held) == len(set(held)) and all(0 <= page < num_pages for page in held)
            listed = [entry for entry in attended if entry != -1]
            assert attended == listed + [-1] * (len(attended) - len(listed))
            assert all(entry < len(table) for entry in listed) and len(listed) == self.attended(b, num_pages)
            in_frames = {-2 - entry for entry in listed if entry < 0}
            pages = in_frames | {table[entry] for entry in listed if entry >= 0}
            assert len(pages) == len(listed) and all((self.frames[b, page] >= 0) == (page in in_frames) for page in pages)
            candidates = set(range(budget.sink, num_pages - budget.window))
            assert pages >= set(range(num_pages)) - candidates
            if weights is not None and candidates - pages:
                chosen, left = (weights[b, h, sorted(some)] for some in (candidates & pages, candidates - pages))
                assert chosen.min() >= left.max() - 1e-4 - self.hysteresis

    def tables(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.ours, name).clone() for name in ("slot_pages", "attended")}


def some_heads(some: float = 0.5) -> torch.Tensor:
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
    "in-full-if-it-fits": SimpleNamespace(lens=[46, 9, 48, 33], budget=PageBudget(2, 4, 2), capacity=9, size=4, group=3, attended=12),
}
CASES |= {f"{name}-hysteresis": SimpleNamespace(**vars(CASES[name]), hysteresis=1.4) for name in ("slack", "max", "in-full-if-it-fits")}
ON_TURN = ("no-slack", "slack", "from-one-token", "one-token-pages", "in-full-if-it-fits", "in-full-if-it-fits-hysteresis")
CASES |= {f"{name}-on-turn": SimpleNamespace(**vars(CASES[name]), on_turn=True) for name in ON_TURN}


LOGITS = {"ties": ("ties", 0.6), "distinct": ("distinct", 0.3)}
NOTHING_RESIDENT = {"ties, nothing resident": ("ties", 0.0)}
ORDER = {"ahead first": True, "ahead last": False}
PLAIN = {name: CASES[name] for name in ("slack", "one-token-pages", "in-full-if-it-fits-hysteresis-on-turn")}


@pytest.mark.parametrize("case, logits, ahead_first", covering(CASES, LOGITS, ORDER) + covering(PLAIN, NOTHING_RESIDENT, ORDER))
def test_sequences_go_as_with_the_reference(case, logits, ahead_first):
    kind, residency = logits
    ids = torch.int32 if kind == "ties" else torch.int64
    run = Sequences(**vars(case), kind=kind, ids=ids, ahead_first=ahead_first, residency=residency)
    run.seed(run.logits())
    for name in ("slot_pages", "attended"):
        assert torch.equal(getattr(run.ours, name), getattr(run.theirs, name)), name
    run.assert_sound(REAL)
    recalled = lost = kept = 0
    for _ in range(STEPS):
        run.seq_lens += 1
        run.move(0.4)
        for state in (run.ours, run.theirs):
            state.empty()
        before, corrected, logits = run.tables(), some_heads(0.4), run.logits()
        selects = run.selects(corrected)
        logits = logits.where(selects.repeat_interleave(run.group, 1)[..., None], torch.nan)
        run.plan_both(logits, corrected)
        run.assert_alike()
        run.assert_read_is_sound(corrected, before, run.weights(logits, False))
        run.assert_sound(REAL & (corrected | run.due), run.weights(logits, True))
        run.assert_sound(selects)
        run.assert_only_of(selects, tuple(run.tables().values()), list(before.values()))
        kept += int((REAL & ~selects).sum())
        recalled += sum(len(units) for units in run.ours.listed())
        lost += int(run.ours.lost.sum())
    assert (kept > 0) == (case.size > 1 and run.on_turn)
    assert recalled > 0 and (lost > 0) == (residency > 0) and run.ours.counts[ROWS, reference.RECALLED].sum() == recalled


@pytest.mark.parametrize(
    "name, blocks, programs",
    [
        ("slack", (4, 8), 2),
        ("mean", (4, 8), 1),
        ("slack-hysteresis", (4, 8), 1),
        ("in-full-if-it-fits-on-turn", (4, 8), 3),
        ("in-full-if-it-fits", (2, 4), 99),  # whose parts have fewer pages than are chosen of all
    ],
)
def test_contexts_of_more_pages_than_a_program_holds_go_as_with_the_reference(name, blocks, programs, monkeypatch):
    monkeypatch.setattr(select, "BLOCKS", blocks)
    monkeypatch.setattr(preselect, "PROGRAMS", programs * len(ROWS) * H)
    test_sequences_go_as_with_the_reference(CASES[name], ("distinct", 0.3), True)
    test_sequences_go_as_with_the_reference(CASES[name], ("ties", 0.6), False)


def test_hits_and_what_is_recalled_are_all_that_the_first_selections_choose():
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 11, 4, 3)
    run.seed(run.logits())
    for _ in range(STEPS):
        run.seq_lens += 1
        run.ours.empty()
        before, corrected = run.ours.counts.clone(), some_heads(0.4)
        run.plan(plan, run.ours, run.logits(), corrected)
        again = (corrected & run.begins)[torch.tensor([ROWS.index(unit[2] // 11) for unit in run.ours.listed()[1]], dtype=torch.long),
                                      torch.tensor([unit[1] for unit in run.ours.listed()[1]], dtype=torch.long)].sum()  # fmt: skip
        candidates = torch.stack([run.candidates(False).sum(-1), run.candidates(True).sum(-1)], -1).clamp(max=run.budget.selected)
        chosen = torch.where(corrected, candidates[:, :1], candidates[:, 1:])[REAL].sum()
        added = (run.ours.counts - before)[ROWS].sum(0)
        assert added[reference.HITS] + added[reference.RECALLED] - again == chosen


def test_seeding_writes_its_rows_and_no_other():
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 11, 4, 3)
    before = run.tables()
    run.seed(run.logits())
    run.assert_only_of(REAL, tuple(run.tables().values()), list(before.values()))
    assert (run.ours.slot_pages[REAL.new_tensor(ROWS, dtype=torch.long)][REAL] != NEVER).all()


@pytest.mark.parametrize("size, capacity, hysteresis", [(2, 64, 0.0), (1, 96, 1.4), (1, 256, 0.0)])
def test_long_contexts_with_many_ties(size, capacity, hysteresis):
    run = Sequences([5000, 40, 900, 2100], PageBudget(16, 32, 16), capacity, size, 4, steps=2, hysteresis=hysteresis)
    run.seed(run.logits())
    run.seq_lens += 1
    run.plan_both(run.logits(), some_heads())
    run.assert_alike()
    assert min(len(units) for units in run.ours.listed()) > 20


@pytest.mark.parametrize("lens", [[65536, 40, 4097, 20000]] if DEVICE == "cuda" else [[9000, 40, 4097, 8000]])
@pytest.mark.parametrize("size", [1, 3])
def test_longest_contexts_without_ties(lens, size):
    """Weights come as close as rounding here, so only properties can be asked for."""
    lens = [min(n, 32000 * size) for n in lens]
    run = Sequences(lens, PageBudget(16, 32, 16), 64, size, 4, steps=2)
    logits = torch.randn(len(ROWS), H * 4, run.num_pages, device=DEVICE)
    run.seed(logits)
    run.assert_sound(REAL, run.weights(logits, True))
    run.seq_lens += 1
    before, corrected, logits = run.tables(), some_heads(), torch.randn_like(logits)
    run.plan(plan, run.ours, logits, corrected)
    run.assert_read_is_sound(corrected, before, run.weights(logits, False))
    run.assert_sound(REAL, run.weights(logits, True))


POISONS = {str(value): value for value in (torch.nan, torch.inf, -torch.inf, 3e38, -3e38)}
SHARES = {"some": (0.1, select.BLOCKS), "all": (1.0, select.BLOCKS), "some in parts": (0.1, (4, 8))}


@pytest.mark.parametrize("poison, share, pooling", covering(POISONS, SHARES, {name: name for name in get_args(reference.Pooling)}))
def test_tables_stay_sound_whatever_the_logits(poison, share, pooling, monkeypatch):
    some, blocks = share
    monkeypatch.setattr(select, "BLOCKS", blocks)
    run = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 10, 4, 3, pooling)

    def logits() -> torch.Tensor:
        drawn = 9 * torch.randn(len(ROWS), H * 3, run.num_pages)
        return drawn.masked_fill(torch.rand(drawn.shape) < some, poison).to(DEVICE)

    run.seed(logits())
    run.assert_sound(REAL)
    for corrected in (REAL.contiguous(), some_heads()):
        run.seq_lens += 1
        for state in (run.ours, run.theirs):
            state.empty()
        before = run.tables()
        run.plan_both(logits(), corrected)
        run.assert_read_is_sound(corrected, before)
        run.assert_sound(REAL)
        run.ours.listed()
        if pooling != "softmax-mean":  # there what overflowed has no say, and nothing is left to rounding
            run.assert_alike()


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_zeros_of_both_signs_tie(pooling):
    run = Sequences([61, 61, 61, 61], PageBudget(2, 4, 2), 8, 4, 2, pooling)
    signs = torch.randint(2, (len(ROWS), 1, run.num_pages), device=DEVICE) * 2 - 1
    run.seed((0.0 * signs).expand(-1, 2 * H, -1).contiguous())
    assert torch.equal(run.ours.slot_pages, run.theirs.slot_pages) and torch.equal(run.ours.attended, run.theirs.attended)
    assert run.ours.slot_pages[REAL.new_tensor(ROWS, dtype=torch.long)][REAL].tolist() == [[0, 1, 2, 3, 4, 5, 14, 15]] * 6


@pytest.mark.parametrize("corrected", [False, True])
def test_a_kept_page_keeps_its_slot_and_the_missing_go_where_they_are_told(corrected):
    run = Sequences([61, 9, 41, 18], PageBudget(2, 4, 2), 11, 4, 3)
    run.seed(run.logits())
    run.seq_lens += 1  # nobody's next token begins a page
    before = run.ours.slot_pages.clone()
    run.plan(plan, run.ours, run.logits(), REAL & corrected)
    moved, (now, ahead) = before != run.ours.slot_pages, run.ours.listed()
    units = now if corrected else ahead
    assert not (ahead if corrected else now)
    kept = {(r, h, page) for r, h, c in (~moved).nonzero().tolist() if (page := int(before[r, h, c])) >= 0}
    b_of_row = {row: b for b, row in enumerate(ROWS)}
    for host_page, h, slot in units:
        row, c = divmod(slot, 11)
        page = int(run.ours.slot_pages[row, h, c])
        assert moved[row, h, c] and (row, h, page) not in kept and host_page == run.page_table[b_of_row[row], page]
    contents = run.seq_lens.new_zeros(R).index_copy_(0, run.rows.long(), run.seq_lens // run.size)
    assert len(units) == (moved & (run.ours.slot_pages < contents[:, None, None])).sum() > 0


@pytest.mark.parametrize("capacity", [8, 11])
def test_nothing_is_recalled_into_what_is_there_already(capacity):
    """A slot that both lists name holds one page for the attention, and another one behind it."""
    run, recalled = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), capacity, 4, 3), 0
    run.seed(run.logits())
    for _ in range(STEPS):
        run.seq_lens += 1
        run.ours.empty()
        corrected = some_heads()
        run.plan(plan, run.ours, run.logits(), corrected)
        now, ahead = run.ours.listed()
        into = {(head, slot) for _, head, slot in now}
        for b, h in product(range(len(ROWS)), range(H)):
            slots = [slot for slot in run.ours.reads.frames[b, h].tolist() if slot != -1]
            assert into.isdisjoint((h, slot) for slot in slots[: int(run.ours.reads.present[b, h])])
            assert corrected[b, h] or into.isdisjoint((h, slot) for slot in slots)
        both = into & {(head, slot) for _, head, slot in ahead}
        assert all(run.begins[ROWS.index(slot // capacity)] for _, slot in both)
        recalled += len(into)
    assert recalled


@pytest.mark.parametrize("corrected", [False, True])
def test_what_does_not_fit_a_list_is_not_written(corrected):
    run = Sequences([61, 9, 41, 18], PageBudget(2, 4, 2), 8, 4, 3)
    run.seed(run.logits())
    run.seq_lens += 1
    name = "misses_now" if corrected else "misses_ahead"
    whole = getattr(run.ours, name)
    setattr(run.ours, name, Misses(whole.length, *(column[:3] for column in (whole.host_pages, whole.heads, whole.frames))))
    run.plan(plan, run.ours, run.logits(), REAL & corrected)
    assert whole.length[0] > 3
    for column in (whole.host_pages, whole.heads, whole.frames):
        assert (column[:3] >= 0).all() and (column[3:] == NEVER).all()


def test_pages_of_the_past_are_ranked_by_weight_and_then_by_slot_for_eviction():
    """Slots 0..5 hold pages 0..5; pages 3 and 6 are wanted, and 7, the last. The rest leaves from the lightest, of equal ones the first
    slot. Then 8 begins, and 7 competes: with 9 for a weight it stays, and of 3 and 6 the earlier."""
    budget, one = PageBudget(0, 2, 1), torch.tensor([1], device=DEVICE)
    logits = torch.tensor([[[1.0, 0.0, 1.0, 7.0, 0.0, 2.0, 7.0, 9.0, 0.0]]], device=DEVICE).repeat(1, H, 1)
    state, page_table = State(6, budget), torch.arange(10, 19, device=DEVICE)[None]
    state.reads = Reads.allocate(1, H, budget.total, DEVICE)
    state.slot_pages[1], state.attended[1] = torch.arange(6, device=DEVICE), torch.tensor([2, 4, 5], device=DEVICE)
    corrected, absent = torch.tensor([[True, False]], device=DEVICE), torch.full_like(page_table, -1, dtype=torch.int32)
    heads = Heads(corrected, torch.empty_like(corrected))
    where = Candidates(logits, one, one * 8, page_table, absent, budget, 1), heads, state.tables
    plan.plan_pages(*where, state.reads, state.misses_now, state.misses_ahead, state.counts, ahead_first=True)
    plan.plan_rest(*where, state.misses_ahead, state.counts, ahead_first=True)
    assert state.reads.frames.tolist() == [[[6 + 3, 6 + 1, 6 + 4], [6 + 2, 6 + 4, 6 + 5]]]
    assert state.reads.pages.tolist() == [[[3, 6, 7], [2, 4, 5]]] and state.reads.present.tolist() == [[1, 3]]
    assert state.listed() == [{(16, 0, 7), (17, 0, 10)}, {(17, 1, 7)}]
    assert state.slot_pages[1].tolist() == [[8, 6, 2, 3, 7, 5], [0, 7, 2, 3, 8, 5]]
    assert state.attended[1].tolist() == [[3, 4, 0], [3, 1, 4]]
    assert state.counts[1].tolist() == [0 + 1, 2 + 1, 0]


@pytest.mark.parametrize("ahead_first", [True, False])
def test_a_row_without_slots_attends_to_resident_pages_only(ahead_first):
    run, row = Sequences([61, 9, 40, 18], PageBudget(2, 4, 2), 11, 4, 3, ahead_first=ahead_first, residency=0.6), ROWS[0]
    for state in (run.ours, run.theirs):
        state.row_frames[row] = -1
    run.seed(run.logits())
    for _ in range(STEPS):
        run.seq_lens += 1
        run.move(0.4)
        for state in (run.ours, run.theirs):
            state.empty()
        run.plan_both(run.logits(), some_heads(0.4))
        run.assert_alike()
        assert (run.ours.slot_pages[row] == -1).all() and (run.ours.attended[row] < 0).all() and (run.ours.attended[row] < -1).any()
        assert all(unit[2] >= 0 for units in run.ours.listed() for unit in units)
