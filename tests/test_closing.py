"""Which extends are closed in all layers together, and by which works; and what a capture is shielded from, with stand-ins for a GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.batch import DecodeBatch, ExtendBatch
from sglang_freekv.closing import Closing, captured

LAYERS, ROWS, PAGES = 2, 30, 6  # PAGES: the width of page tables


class Engine:
    """It awaits collection, because it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


class Recording:
    """Stands in for ``torch.cuda``, and sees at each step of a capture whether the collector is on, and whether an old engine is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.seen = weakref.ref(Engine()), []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="the replay"))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.see("begin")
        try:
            yield
        finally:
            self.see("end")

    def see(self, step: str) -> None:
        self.seen.append((step, gc.isenabled(), self.engine() is not None))


@pytest.fixture(autouse=True)
def collector():
    """The engine of a test is not collected by chance, and later tests have the collector on."""
    threshold = gc.get_threshold()
    gc.set_threshold(1 << 30)
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.mark.parametrize("on", [True, False], ids=["the collector is on", "the collector is off"])
@pytest.mark.parametrize("fails", [False, True], ids=["recorded", "the work raises"])
def test_nothing_is_collected_inside_a_capture(monkeypatch, on, fails):
    recording = Recording(monkeypatch)

    def work() -> None:
        recording.see("work")
        if fails and len(recording.seen) > 1:
            raise RuntimeError("the work raises")

    if not on:
        gc.disable()
    with pytest.raises(RuntimeError, match="the work raises") if fails else nullcontext():
        assert captured(work) == "the replay"
    assert recording.seen == [("work", on, True), *((step, False, False) for step in ("begin", "work", "end"))]
    assert gc.isenabled() == on


class Noted:
    """A Closing of pages of 16 tokens, so of at most 32 pages, that notes its works."""

    def __init__(self, requests: int) -> None:
        self.works: list[tuple] = []
        self.closing = Closing(
            self.start,
            self.of_pages("digest"),
            self.of_pages("offload"),
            previous_queries=[torch.full((ROWS, 4, 8), float(layer)) for layer in range(LAYERS)],
            scales=[0.5, 0.25],
            requests=requests,
            pages=PAGES,
            page_size=16,
            record=self.record,
        )
        self.recorded, self.works = self.works, []

    def record(self, work):
        work()
        return work

    def start(self, layer: int, queries: torch.Tensor, batch: DecodeBatch, scale: float) -> None:
        assert (queries == layer).all() and scale == [0.5, 0.25][layer]
        self.works.append(("start", layer, *(each.tolist() for each in (batch.rows, batch.seq_lens, batch.page_table, batch.frames))))

    def of_pages(self, name: str):
        return lambda layer, starts, pages: self.works.append((name, layer, starts.tolist(), pages.tolist()))


def batch_of(requests: int, pages: int, in_place: bool = True) -> ExtendBatch:
    """Of so many requests, which fills so many pages."""
    rows, nothing = torch.arange(1, requests + 1), torch.zeros(0)
    table = torch.arange(requests * PAGES, dtype=torch.int32).reshape(requests, PAGES)
    full = torch.arange(1, pages + 1, dtype=torch.int32)
    starts = None if in_place else rows
    return ExtendBatch(rows, rows + 40, table, table + 1, [], [], starts, None, nothing, full, full.long() * 16, nothing)


@pytest.mark.parametrize("pages, size", [(1, 4), (4, 4), (5, 32), (32, 32)])
@pytest.mark.parametrize("requests, recorded", [(1, 1), (3, 4), (5, 6), (6, 6)])
def test_each_layer_has_the_pages_and_the_rows_of_the_batch_and_padding_behind(pages, size, requests, recorded):
    """A smaller batch follows a larger one, of which nothing is left."""
    noted = Noted(6)
    noted.closing.offload(batch_of(6, 32))
    noted.closing.run(batch_of(6, 32))
    noted.works.clear()
    batch = batch_of(requests, pages)
    assert noted.closing.takes(batch)
    noted.closing.offload(batch)
    noted.closing.run(batch)
    order = [(name, layer) for name in ("offload", "digest", "start") for layer in range(LAYERS)]
    assert [work[:2] for work in noted.works] == order
    for _, _, starts, host_pages in noted.works[: 2 * LAYERS]:
        assert host_pages == [*range(1, pages + 1), *[-1] * (size - pages)] and starts[:pages] == [16 * page for page in host_pages[:pages]]
    for _, _, rows, seq_lens, table, frames in noted.works[2 * LAYERS :]:
        assert rows == [*range(1, requests + 1), *[0] * (recorded - requests)] and len(rows) == len(table)
        assert seq_lens[:requests] == (batch.rows + 40).tolist() and all(seq_lens)
        assert table[:requests] == batch.page_table.tolist() and frames[:requests] == batch.frames.tolist()


def test_an_extend_that_fills_no_page_starts_its_rows_alone():
    noted = Noted(6)
    noted.closing.run(batch_of(2, 0))
    assert {name for name, *_ in noted.works} == {"start"}


def test_what_is_recorded_is_of_nobody():
    """It runs when it is recorded, and a server has requests by then."""
    for name, _, *tables in Noted(6).recorded:
        nobody = tables[0] if name == "start" else [page + 1 for page in tables[1]]
        assert not any(nobody) and (name != "start" or all(frame == -1 for row in tables[3] for frame in row))


@pytest.mark.parametrize("requests, pages, in_place, takes", [
    (16, 32, True, True), (17, 1, True, False), (1, 33, True, False), (1, 1, False, False), (16, 0, True, True),
])  # fmt: skip
def test_extends_that_are_long_staged_or_of_many_requests_are_left_to_the_layers(requests, pages, in_place, takes):
    assert Noted(20).closing.takes(batch_of(requests, pages, in_place)) == takes


def test_few_rows_are_as_many_requests_as_are_taken():
    assert not Noted(3).closing.takes(batch_of(4, 1))
