"""Requests that come, decode, share pages and go, and what their passes ask of the frames: for tests of the tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_freekv.memory_pool.frames import Frames

ROWS, PAGE, CONTEXT, HOST_PAGES = 6, 4, 48, 60
FRAMES, LENT = 28, 6


class Pass(NamedTuple):
    """One pass: its kind, rows, tokens of context and of prefix, the rows that ended before it, and the free frames that it wants."""

    kind: str  # decode, in place or staged
    rows: list[int]
    seq_lens: list[int]
    prefix_lens: list[int]
    ended: list[int]
    need: int


@dataclass
class Row:
    pages: list[int]
    length: int


class Traffic:
    """A scheduler in small. Pages of requests that ended stay in ``tree``, to be hit, until they are evicted."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: dict[int, Row] = {}
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
        growing = [row for row in self.rows if self.rows[row].length % PAGE == 0 and self.rows[row].length + 9 < CONTEXT]
        idle = [row for row in range(1, ROWS) if row not in self.rows]
        need = self.random.choice([0, 0, 0, 0, 0, 0, 2, 8])
        if self.rows and self.random.random() < 0.7:
            rows = [row for row in self.rows if self.rows[row].length < CONTEXT and self._may_grow(row, 1)]
            for row in rows:
                self._grow(row, 1)
            self.random.shuffle(rows)
            rows = rows + [0] * self.random.randrange(3)
            return Pass("decode", rows, [self.rows[row].length if row else 1 for row in rows], [0] * len(rows), ended, need)
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
        return Pass(self.random.choice(["in place", "staged"]), rows, [self.rows[row].length for row in rows], prefix_lens, ended, need)

    def _end(self) -> list[int]:
        ended = [row for row in self.rows if self.random.random() < 0.06 or self.rows[row].length >= CONTEXT - 1]
        for row in ended:
            gone = self.rows.pop(row)
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
        if each.ended:
            frames.rows_ended(each.ended)
        if each.kind == "decode":
            frames.begin_decode(slots, rows, seq_lens, need=each.need)
        elif each.kind == "in place":
            frames.begin_extend_in_place(slots, rows, seq_lens, given, need=each.need)
        else:
            frames.begin_extend_by_staging(slots, rows, seq_lens, prefix_lens, need=each.need)
        frames.snapshot(slots, rows, seq_lens, page_table, found)
    return Asked(page_table, found, given)


@dataclass
class Model:
    """The tables in plain Python."""

    frame_of: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(FRAMES - 1, LENT - 1, -1)))
    in_hand: dict[int, int] = field(default_factory=dict)
    lens: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, tuple[int, int]] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    now: int = 0

    def step(self, each: Pass, page_of: Callable[[int, int], int]) -> tuple[list[list[int]], dict[tuple[int, int], int]]:
        """Begin a pass. Returns the frame of each page of each context, and the frames given to absent pages."""
        self._note(each, page_of)
        if each.need > len(self.free):
            self._reclaim(each.need + FRAMES // 64)
        given, missed = {}, 0
        contexts = [(b, row, n) for b, (row, n) in enumerate(zip(each.rows, each.seq_lens)) if row]
        for b, row, n in contexts:
            if each.kind == "decode" and (n - 1) % PAGE == 0:
                page = page_of(row, n // PAGE)
                if page in self.frame_of and row not in self.in_hand:
                    self.free.append(self.frame_of.pop(page))
                elif page not in self.frame_of and row in self.in_hand:
                    self.frame_of[page] = self.in_hand.pop(row)
            for p in range(-(-n // PAGE)):
                page = page_of(row, p)
                if each.kind == "in place" and page not in self.frame_of:
                    missed += not self.free
                    if self.free:
                        given[b, p] = self.frame_of[page] = self.free.pop()
                if each.kind == "staged" and page in self.frame_of and p >= each.prefix_lens[b] // PAGE:
                    self.free.append(self.frame_of.pop(page))
        for _, row, n in contexts:
            if n % PAGE == 0 and row not in self.in_hand:
                missed += not self.free
                if self.free:
                    self.in_hand[row] = self.free.pop()
        frames = [
            [self.frame_of.get(page_of(row, p), -1) for p in range(-(-n // PAGE))] if row else []
            for row, n in zip(each.rows, each.seq_lens)
        ]
        self.counts[1:] = sum(line.count(-1) for line in frames), len(self.free), missed
        return frames, given

    def _note(self, each: Pass, page_of: Callable[[int, int], int]) -> None:
        self.now += 1
        for row in each.ended:
            self.lens.pop(row)
            if row in self.in_hand:
                self.free.append(self.in_hand.pop(row))
        self.lens |= {row: n for row, n in zip(each.rows, each.seq_lens) if row}
        used = set()
        for row, n in self.lens.items():
            for p in range(-(-n // PAGE)):
                used.add(page_of(row, p))
                self.last_use[page_of(row, p)] = max(self.last_use.get(page_of(row, p), (0, 0)), (self.now, -p))
        self.counts = [len(used & self.frame_of.keys())]

    def _reclaim(self, goal: int) -> None:
        idle = [page for page in self.frame_of if self.last_use[page][0] < self.now]
        for page in sorted(idle, key=lambda page: (self.last_use[page], self.frame_of[page])):
            if len(self.free) < goal:
                self.free.append(self.frame_of.pop(page))


class Contents:
    """What is written to frames: the owner of the page, and how many of its tokens. Checks that a pass reads what its requests wrote."""

    def __init__(self) -> None:
        self.frames: dict[int, tuple[int, int, int]] = {}

    def run(self, each: Pass, traffic: Traffic, asked: Asked) -> None:
        """Copy what is absent, check the pages of the prefix, write the new tokens."""
        for b, row in enumerate(each.rows):
            for p, page in enumerate(traffic.rows[row].pages if row else ()):
                before = each.seq_lens[b] - 1 if each.kind == "decode" else each.prefix_lens[b]
                frame, owner = int(asked.frames[b, p]), traffic.owners[page]
                had, has = (min(max(tokens - p * PAGE, 0), PAGE) for tokens in (before, each.seq_lens[b]))
                if each.kind == "in place" and asked.given[b, p] >= 0 and had:
                    self.frames[int(asked.given[b, p])] = page, owner, had
                if frame >= 0 and had:
                    assert self.frames[frame] == (page, owner, had), f"row {row}, page {p}: the KV of another page"
                if frame >= 0 and has > had:
                    self.frames[frame] = page, owner, has
