"""Lending: random requests come, grow, are retracted and end, and the frames that they need are counted one by one."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from sglang_freekv.lending import Lending

ROWS, SLOTS, CHUNK = 12, 4, 6


@dataclass
class Request:
    """A request with all pages that it will ever have; the first ones may be those of another request."""

    pages: list[int]
    prompt: int
    begun: int = 0  # pages of its context
    row: int = 0

    @property
    def longest(self) -> int:
        return len(self.pages)


@dataclass
class Scheduler:
    """SGLang's scheduler in small: first come, first served, a chunked prompt at a time, rows that are reused at once."""

    lending: Lending
    random: random.Random
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    chunked: Request | None = None
    made: int = 0
    stayed_whole: int = 0  # batches of which this was known beforehand

    @property
    def rows(self) -> list[Request]:
        return self.running + [self.chunked] * (self.chunked is not None)

    def come(self) -> None:
        longest = self.random.choice((1, 2, 3, SLOTS, SLOTS + 1, 9, 20, 40, 90))
        documents = [[1000 * kind + page for page in range(60)] for kind in (1, 2)]
        shared = self.random.choice((*documents, []))[: self.random.randrange(longest)]
        own = [100_000 + self.made * 1000 + page for page in range(longest - len(shared))]
        self.made += 1
        self.waiting.append(Request(shared + own, self.random.randint(min(len(shared) + 1, longest), longest)))

    def extend(self) -> None:
        """The next chunk of the chunked prompt, and who is admitted beside it."""
        batch = [self.chunked] if self.chunked is not None else []
        used = {request.row for request in self.rows}
        free = sorted(set(range(1, ROWS)) - used)
        new: list[Request] = []
        while self.waiting and free and self.random.random() < 0.8:
            request, lending = self.waiting[0], self.lending
            others = [lending.promised[row] for row in used] + [lending.promise(other.longest) for other in new]
            if others and not lending.admits(others, request.longest):
                break
            new.append(self.waiting.popleft())
        batch += new
        for request in batch:
            request.begun = min(request.prompt, request.begun + CHUNK if request is batch[-1] else request.prompt)
        numbered = {request.row or ROWS + place: request.begun for place, request in enumerate(batch)}
        stays_whole = self.lending.keeps_whole(numbered, self.held(batch), free)
        for request in new:
            request.row = free.pop(self.random.choice((0, -1)))
            self.lending.begin(request.row, request.longest)
        self.chunked = None
        for request in batch:
            if request.begun < request.prompt:
                self.chunked = request
            else:
                self.running.append(request)
        self.grow(batch)
        assert not stays_whole or self.lending.partial.isdisjoint(request.row for request in batch)
        self.stayed_whole += stays_whole and bool(batch)

    def decode(self) -> None:
        for request in self.running:
            request.begun += request.begun < request.longest and self.random.random() < 0.5
        self.grow(self.running)

    def end(self) -> None:
        for request in [request for request in self.running if request.begun == request.longest or self.random.random() < 0.02]:
            self.running.remove(request)
            self.lending.end([request.row])
        if self.running and self.random.random() < 0.03:
            request = self.random.choice(self.running)
            self.running.remove(request)
            self.lending.end([request.row])
            request.prompt, request.begun, request.row = max(request.begun, 1), 0, 0
            self.waiting.appendleft(request)

    def held(self, batch: list[Request] = ()) -> int:
        return len({page for request in (*self.rows, *batch) for page in request.pages[: request.begun]})

    def grow(self, batch: list[Request]) -> None:
        lending = self.lending
        partial = set(lending.partial)
        chosen = lending.grow([(request.row, request.begun) for request in batch], self.held())
        whole = [request for request in self.rows if request.row in lending.pages]
        assert {request.row for request in self.rows} == lending.pages.keys() | lending.partial == lending.promised.keys()
        assert partial.isdisjoint(chosen) and lending.partial == partial | set(chosen)
        assert all(request.begun > lending.most_whole for request in self.rows if request.row in chosen) or not lending.resident
        taken = {page for request in whole for page in request.pages[: request.begun]}
        last = {request.pages[request.begun - 1] for request in self.rows if request.row in lending.partial and lending.resident}
        need = len(taken | last) + SLOTS * len(lending.partial) + len(self.rows) * lending.resident
        assert need <= lending.frames  # every page of a whole row, every slot, every page in the making and every page to come has a frame


@pytest.mark.parametrize("most_whole, resident", [(SLOTS + 1, True), (10, True), (SLOTS + 1, False)])
@pytest.mark.parametrize("frames", [11, 30, 100, 400])
def test_frames_suffice_for_whoever_is_admitted(frames, most_whole, resident):
    seen = 0
    for seed in range(12):
        lending = Lending(frames, SLOTS, most_whole, resident=resident)
        scheduler = Scheduler(lending, random.Random(seed))
        for _ in range(150):
            scheduler.end()
            if scheduler.random.random() < 0.3:
                scheduler.come()
            if scheduler.chunked or scheduler.waiting and scheduler.random.random() < 0.5:
                scheduler.extend()
            else:
                scheduler.decode()
            seen += len(lending.partial)
        for _ in range(100 * scheduler.made):  # nobody waits for ever
            if not (scheduler.waiting or scheduler.rows):
                break
            scheduler.end()
            scheduler.extend() if scheduler.chunked or scheduler.waiting and scheduler.random.random() < 0.5 else scheduler.decode()
        assert not scheduler.waiting and not lending.promised
        assert (scheduler.stayed_whole > 0) == resident
    assert (seen > 0) == (frames < 400 or not resident)


def test_the_longest_row_gives_way_first_and_only_once():
    lending = Lending(100, slots=4, most_whole=10)
    for row in (1, 2, 3):
        lending.begin(row, 200)
    assert lending.grow([(1, 30), (2, 60), (3, 7)], held=200) == []  # 97 pages, and three in hand
    assert not lending.keeps_whole({2: 61}, held=200) and lending.keeps_whole({3: 8}, held=200)
    assert lending.keeps_whole({2: 61}, held=97)  # they share pages
    assert lending.grow([(3, 8)], held=200) == [2]
    assert lending.grow([(1, 60), (2, 900), (3, 29)], held=200) == []  # 89 pages, four slots and a page, and three in hand
    lending.end([2])
    lending.begin(2, 200)
    assert lending.grow([(2, 61)], held=200) == [2] and lending.pages == {1: 60, 3: 29}


def test_a_broken_promise_is_told_with_the_numbers():
    lending = Lending(20, slots=4, most_whole=10)
    for row in (1, 2):
        lending.begin(row, 10)
    with pytest.raises(RuntimeError, match="2 whole and 0 partial requests need 22, expected at most 20"):
        lending.grow([(1, 10), (2, 10)], held=20)
