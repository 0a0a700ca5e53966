"""Requests that come, decode, share pages and go, and what their passes ask of the frames: for tests of the tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_freekv.kernels.frame_tables import FrameCounts
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.device_cache import DeviceCache, Slots
from sglang_freekv.memory_pool.frames import Frames
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape

ROWS, PAGE, CONTEXT, HOST_PAGES = 6, 4, 48, 60
FRAMES, SLOTS = 28, 3


def make(
    frames: int = FRAMES,
    host_pages: int = HOST_PAGES,
    rows: int = ROWS,
    slots: int = SLOTS,
    page: int = PAGE,
    device: str = "cpu",
    **options,
) -> Frames:
    """Frames of a device cache of one layer."""
    shape = KVShape(LayerTable.uniform(1), 1, 1, 1, (1,), KVFormat.plain(torch.float32))
    return Frames(DeviceCache(shape, page, Slots(rows, slots, 1, frames), device), host_pages, **options)


class Pass(NamedTuple):
    """One pass: its kind, rows, tokens of context and of prefix; the rows that ended before it or are lent slots; the frames that it wants.

    ``must`` is a bound of what whole rows lack. Without it the pass counts on the device. ``refill`` is for decode.
    """

    kind: str  # decode, in place or staged
    rows: list[int]
    seq_lens: list[int]
    prefix_lens: list[int]
    ended: list[int] = []
    lent: list[int] = []
    must: int | None = 0
    may: int = 0
    keep: int = 0
    refill: bool = False


@dataclass
class Row:
    pages: list[int]
    length: int
    rewritten: bool = False  # its table has pages of the tree, since the last pass that it was in


class Traffic:
    """A scheduler in small. Pages of requests that ended stay in ``tree``, to be hit, until they are evicted.

    It makes rows partial until all others find frames; without ``honest`` it does so at random.
    """

    def __init__(self, seed: int, *, honest: bool = True) -> None:
        self.random, self.honest = random.Random(seed), honest
        self.rows: dict[int, Row] = {}
        self.partial: set[int] = set()
        self.tree: list[list[int]] = []
        self.unused = list(range(1, HOST_PAGES))
        self.random.shuffle(self.unused)
        self.owners = [0] * HOST_PAGES  # how often a host page has changed hands
        self.slots = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)

    @property
    def shares_a_page(self) -> bool:
        """Whether two running rows have a page in common."""
        pages = [page for row in self.rows.values() for page in row.pages]
        return len(pages) > len(set(pages))

    def next(self) -> Pass:
        ended = self._end()
        kind, rows, prefix_lens = self._decode() if self.rows and self.random.random() < 0.7 else self._extend()
        lent = self._lend()
        whole = [row for row in rows if row and row not in self.partial]
        if kind == "extend":
            kind = "in place" if len(whole) == len(rows) and self.random.random() < 0.7 else "staged"
        refill = any(self.rows[row].rewritten for row in whole) or self.random.random() < 0.1
        for row in rows:
            if row:
                self.rows[row].rewritten = False
        return Pass(
            kind,
            rows,
            [self.rows[row].length if row else 1 for row in rows],
            prefix_lens,
            ended,
            lent,
            self.random.choice([None, sum(len(self.rows[row].pages) + 1 for row in whole) + SLOTS * len(lent)]),
            self.random.choice([0, 0, 0, 2, 8]),
            self.random.choice([0, 2, FRAMES]),
            refill and kind == "decode",
        )

    def _decode(self) -> tuple[str, list[int], list[int]]:
        if self.tree and self.random.random() < 0.2:
            self._rewrite(self.random.choice(list(self.rows)))
        rows = [row for row in self.rows if self.rows[row].length < CONTEXT and self._may_grow(row, 1)]
        for row in rows:
            self._grow(row, 1)
        self.random.shuffle(rows)
        rows = rows + [0] * self.random.randrange(3)
        return "decode", rows, [0] * len(rows)

    def _extend(self) -> tuple[str, list[int], list[int]]:
        growing = [row for row in self.rows if self.rows[row].length % PAGE == 0 and self.rows[row].length + 9 < CONTEXT]
        idle = [row for row in range(1, ROWS) if row not in self.rows]
        rows, prefix_lens = [], []
        for row in self.random.sample(idle, min(len(idle), 2)) + growing[:1]:
            if row not in self.rows:
                shared = self.random.choice(self.tree)[:8] if self.tree and self.random.random() < 0.6 else []
                self.rows[row] = Row(list(shared), PAGE * len(shared))
                self._write(row)
            prefix, count = self.rows[row].length, self.random.choice([3, 4, 8, 9])
            if self._may_grow(row, count):
                self._grow(row, count)
                rows.append(row)
                prefix_lens.append(prefix)
            elif not self.rows[row].length or row in idle:
                del self.rows[row]
        return "extend", rows, prefix_lens

    def _lend(self) -> list[int]:
        """Rows that become partial, those with most pages first, and now and then one more or one that is partial already."""
        lent = []

        def load() -> int:
            return sum(len(state.pages) for row, state in self.rows.items() if row not in self.partial) + (SLOTS + 1) * len(self.partial)

        while self.honest and load() + len(self.rows) > FRAMES - SLOTS:
            lent.append(max(self.rows.keys() - self.partial, key=lambda row: len(self.rows[row].pages)))
            self.partial.add(lent[-1])
        if self.rows and self.random.random() < 0.1:
            lent.append(self.random.choice(list(self.rows)))
        self.partial.update(lent)
        return list(dict.fromkeys(lent))

    def _rewrite(self, row: int) -> None:
        """SGLang finds pages of the row in the tree: its table names those of the tree from now on."""
        state, shared = self.rows[row], self.random.choice(self.tree)
        for p in range(min(len(shared), (state.length - 1) // PAGE)):
            if shared[p] not in state.pages:
                state.pages[p], state.rewritten = shared[p], True
        self._write(row)

    def _end(self) -> list[int]:
        ended = [row for row in self.rows if self.random.random() < 0.06 or self.rows[row].length >= CONTEXT - 1]
        for row in ended:
            gone = self.rows.pop(row)
            self.partial.discard(row)
            full = gone.pages[: gone.length // PAGE]
            if full and self.random.random() < 0.8:
                self.tree.append(full)
        if len(self.unused) < 15:
            self.tree = self.tree[len(self.tree) // 2 + 1 :]
        kept = {page for pages in (*self.tree, *(row.pages for row in self.rows.values())) for page in pages}
        self.unused = [page for page in self.unused if page not in kept]
        self.unused += [page for page in range(1, HOST_PAGES) if page not in kept and page not in self.unused]
        return ended

    def _may_grow(self, row: int, tokens: int) -> bool:
        state = self.rows[row]
        return -(-(state.length + tokens) // PAGE) - len(state.pages) <= len(self.unused) and state.length + tokens <= CONTEXT

    def _grow(self, row: int, tokens: int) -> None:
        state = self.rows[row]
        state.length += tokens
        while len(state.pages) * PAGE < state.length:
            page = self.unused.pop(self.random.randrange(len(self.unused)))
            self.owners[page] += 1
            state.pages.append(page)
        self._write(row)

    def _write(self, row: int) -> None:
        pages = torch.tensor(self.rows[row].pages, dtype=torch.int32)
        self.slots[row, : len(pages) * PAGE] = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten().int()


class Asked(NamedTuple):
    """What a pass gave: its page table, frames, and the frames given to absent pages; ``[B, P]`` each."""

    page_table: torch.Tensor
    frames: torch.Tensor
    given: torch.Tensor


def ask(frames: Frames, each: Pass, slots: torch.Tensor, integer: torch.dtype = torch.int64, *, within=nullcontext) -> Asked:
    """Begin a pass as the backend does, all that follows its inputs ``within`` a context."""
    device = frames.tables.page_of.device
    rows, seq_lens, prefix_lens = (torch.tensor(x, dtype=integer, device=device) for x in (each.rows, each.seq_lens, each.prefix_lens))
    page_table, found, given = torch.full((3, len(rows), slots.shape[1] // frames.page_size + 1), -7, dtype=torch.int32, device=device)
    slots = slots.to(device)
    with within():
        frames.rows_ended(each.ended)
        frames.lend(each.lent)
        if each.kind == "decode":
            frames.begin_decode(slots, rows, seq_lens, must=each.must, may=each.may, given=given if each.refill else None)
        elif each.kind == "in place":
            frames.begin_extend_in_place(slots, rows, seq_lens, prefix_lens, given, must=each.must)
        else:
            where = slots, rows, seq_lens, prefix_lens, given
            frames.begin_extend_by_staging(*where, must=each.must, may=each.may, keep=each.keep)
        frames.snapshot(slots, rows, seq_lens, page_table, found)
    return Asked(page_table, found, given)


@dataclass
class Model:
    """The tables in plain Python."""

    frame_of: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(FRAMES - 1, SLOTS - 1, -1)))
    in_hand: dict[int, int] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)
    lens: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, tuple[int, bool, int]] = field(default_factory=dict)
    now: int = 0
    in_use: int = 0
    unserved: int = 0
    brought: int = 0
    given_up: int = 0

    def step(self, each: Pass, page_of: Callable[[int, int], int]) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
        """Begin a pass. Returns the frame of each page of each context, and the frames given to absent pages."""
        contexts = [(b, row, n) for b, (row, n) in enumerate(zip(each.rows, each.seq_lens)) if row]
        partial = self.slots.keys() - set(each.ended) | set(each.lent)
        contexts.sort(key=lambda context: context[1] in partial)  # whole rows first
        lent = [row for row in each.lent if row not in self.slots or row in each.ended]
        self._note(each, lent, page_of)
        self._reclaim(self._must(each, contexts, len(lent), page_of), 0 if each.kind == "in place" else each.may)
        for row in lent:
            self.slots[row] = self._pop(SLOTS)
        if each.kind == "staged":
            for b, row, n in sorted(contexts):
                for p in range(each.prefix_lens[b] // PAGE, -(-n // PAGE)):
                    if (page := page_of(row, p)) in self.frame_of:
                        self.free.append(self.frame_of.pop(page))
        given = {} if each.kind == "decode" and not each.refill else self._hold(each, contexts, page_of)
        self.unserved = 0
        if each.kind == "decode":
            for _, row, n in sorted(contexts):
                if (n - 1) % PAGE == 0:
                    self._begin(row, page_of(row, n // PAGE))
        for _, row, n in contexts:
            if n % PAGE == 0 and row not in self.in_hand:
                if self.free:
                    self.in_hand[row] = self.free.pop()
                self.unserved += row not in self.in_hand
        frames = [
            [self.frame_of.get(page_of(row, p), -1) for p in range(-(-n // PAGE))] if row else []
            for row, n in zip(each.rows, each.seq_lens)
        ]
        return frames, given

    @property
    def counts(self) -> FrameCounts:
        """But for the absent pages of the batch."""
        return FrameCounts(self.in_use, 0, len(self.free), self.unserved, 0, self.brought, self.given_up)

    def _pop(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def _hold(self, each: Pass, contexts: list[tuple[int, int, int]], page_of: Callable[[int, int], int]) -> dict[tuple[int, int], int]:
        given = {}
        for b, row, n in contexts:
            pages = range((n - 1) // PAGE if each.kind == "decode" else -(-n // PAGE))
            keep = each.keep + len(each.rows) if each.kind == "staged" else FRAMES if each.kind == "decode" else 0
            for p in pages:
                page = page_of(row, p)
                if page not in self.frame_of and len(self.free) > keep * (row in self.slots):
                    given[b, p] = self.frame_of[page] = self.free.pop()
                    self.brought += each.kind == "decode" or p < each.prefix_lens[b] // PAGE
        return given

    def _begin(self, row: int, page: int) -> None:
        if page in self.frame_of and row not in self.in_hand:
            self.free.append(self.frame_of.pop(page))
        elif page not in self.frame_of and row in self.in_hand:
            self.frame_of[page] = self.in_hand.pop(row)

    def _note(self, each: Pass, lent: list[int], page_of: Callable[[int, int], int]) -> None:
        self.now += 1
        for row in each.ended:
            self.lens.pop(row)
            if row in self.in_hand:
                self.free.append(self.in_hand.pop(row))
        for row in each.ended:
            self.free += self.slots.pop(row, [])
        self.lens |= {row: n for row, n in zip(each.rows, each.seq_lens) if row}
        used = set()
        for row, n in self.lens.items():
            for p in range(-(-n // PAGE)):
                used.add(page := page_of(row, p))
                pinned = row not in self.slots and row not in lent or p == (n - 1) // PAGE
                self.last_use[page] = max(self.last_use.get(page, (0, False, 0)), (self.now, pinned, -p))
        self.in_use = len(used & self.frame_of.keys())

    def _must(self, each: Pass, contexts: list[tuple[int, int, int]], lent: int, page_of: Callable[[int, int], int]) -> int:
        """What the pass itself counts, if it is not told."""
        if each.must is not None:
            return each.must
        lacking = 0
        for _, row, n in contexts:
            if (each.kind != "decode" or each.refill) and row not in self.slots and row not in each.lent:
                lacking += sum(page_of(row, p) not in self.frame_of for p in range(-(-n // PAGE)))
        return lacking + len(each.rows) + len(each.lent) * SLOTS

    def _reclaim(self, must: int, may: int) -> None:
        idle = [page for page in self.frame_of if self.last_use[page][0] < self.now]
        partial = [page for page in self.frame_of if self.last_use[page][:2] == (self.now, False)]
        goal = max(must, may) + FRAMES // 64 if max(must, may) > len(self.free) else 0
        for page in sorted(idle, key=lambda page: (self.last_use[page], self.frame_of[page])):
            self._give_up(page, goal)
        for page in sorted(partial, key=lambda page: (-self.last_use[page][2], self.frame_of[page])):
            self._give_up(page, must)

    def _give_up(self, page: int, goal: int) -> None:
        if len(self.free) < goal:
            self.free.append(self.frame_of.pop(page))
            self.given_up += 1


class Contents:
    """What is written to frames: the owner of the page, and how many of its tokens. Checks that a pass reads what its requests wrote."""

    def __init__(self) -> None:
        self.frames: dict[int, tuple[int, int, int]] = {}
        self.host: dict[int, int] = {}  # owner of each page that is full
        self.begun: dict[int, int] = {}  # the frame of each page of which the host has nothing, unless it is in slots

    def run(self, each: Pass, traffic: Traffic, asked: Asked) -> None:
        """Copy what is absent, check the pages of the prefix, write the new tokens."""
        pages = [(b, row, p, page) for b, row in enumerate(each.rows) for p, page in enumerate(traffic.rows[row].pages if row else ())]
        for b, row, p, page in pages:
            had, has = self._tokens(each, b, p)
            if (given := int(asked.given[b, p])) >= 0 and (had or each.kind == "staged"):
                assert not had or self.host.get(page) == traffic.owners[page], (
                    f"row {row}, page {p}: brought, though the host has nothing of it"
                )
                self.frames[given] = page, traffic.owners[page], has if each.kind == "staged" else had
        for b, row, p, page in pages:
            frame, owner, (had, has) = int(asked.frames[b, p]), traffic.owners[page], self._tokens(each, b, p)
            if frame >= 0 and had and each.kind != "staged":
                assert self.frames.get(frame) == (page, owner, had), f"row {row}, page {p}: the KV of another page"
            if 0 < had < PAGE and page in self.begun:
                assert frame == self.begun[page], f"row {row}, page {p}: given up before it was full"
            if frame >= 0 and has > had and each.kind != "staged":
                self.frames[frame] = page, owner, has
            if frame >= 0 and has:
                assert self.frames.get(frame) == (page, owner, has), f"row {row}, page {p}: not written"
            assert frame >= 0 or row in traffic.partial or not has, f"row {row}, page {p}: absent, and the row has no slots"
            if has == PAGE:
                self.host[page] = owner
            self.begun.pop(page, None)
            if frame >= 0 and 0 < has < PAGE:
                self.begun[page] = frame

    def _tokens(self, each: Pass, b: int, p: int) -> tuple[int, int]:
        """Tokens of a page before the pass and behind it."""
        before = each.seq_lens[b] - 1 if each.kind == "decode" else each.prefix_lens[b]
        had, has = (min(max(tokens - p * PAGE, 0), PAGE) for tokens in (before, each.seq_lens[b]))
        return had, has
