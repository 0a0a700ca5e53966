"""Trials of the kernels that begin a pass: what they take by the rows that run, and by the pages of these.

Between two passes a step reads more than any cache holds. So each launch is behind one that empties the cache, and that puts the tables back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from benchmarks.kernel_inputs import CACHED_BYTES
from benchmarks.trial import Trial
from sglang_freekv import kernels
from sglang_freekv.kernels import FrameTables, reference

ELEMENT_BYTES = 4  # of a token slot, and of a page's frame
MARK_BYTES = 16  # of a page's last use, read and written


@dataclass(frozen=True)
class Running:
    """So many ``rows`` run whole, and each has a context of ``context`` tokens, in whole pages."""

    name: str
    rows: int
    context: int
    page_size: int = 32
    slots: int = 64


class Scheduled(NamedTuple):
    """What a pass is given, as in ``reference_frames``. Each row has a page behind its context, too, and all but its last page is a prefix."""

    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    given: torch.Tensor
    nobody: torch.Tensor
    page_size: int

    def on(self, device: str) -> Scheduled:
        return Scheduled(*(tensor.to(device, copy=True) for tensor in self[:-1]), self.page_size)

    def with_tokens(self, more: int) -> Scheduled:
        return self._replace(seq_lens=self.seq_lens + more)


Work = Callable[[ModuleType, Scheduled, FrameTables], None]


class Frames:
    """The tables of rows that run, in host memory, and the device that trials run on."""

    def __init__(self, case: Running, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        size, each = case.page_size, case.context // case.page_size + 1
        pages = (torch.randperm(case.rows * each) + 1).view(case.rows, each, 1)
        slots = (pages * size + torch.arange(size)).flatten(1)
        self.scheduled = Scheduled(
            req_to_token=torch.cat([torch.zeros_like(slots[:1]), slots]).to(torch.int32),
            rows=torch.randperm(case.rows) + 1,
            seq_lens=torch.full((case.rows,), case.context),
            prefix_lens=torch.full((case.rows,), case.context - size),
            given=torch.full((case.rows, each), -1, dtype=torch.int32),
            nobody=torch.zeros(0, dtype=torch.int64),
            page_size=size,
        )
        row_frames = torch.full((case.rows + 1, case.slots), -1, dtype=torch.int32)
        row_frames[0] = torch.arange(case.slots)
        self.tables = FrameTables.allocate(case.slots + case.rows * (each + 1), case.rows * each + 1, row_frames)
        note(reference, self.scheduled, self.tables)
        self.flushed = torch.zeros(CACHED_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)

    def resident(self) -> FrameTables:
        """The tables of a pass in which all pages are resident, and each row has a frame in hand."""
        tables, each = FrameTables(*(table.clone() for table in self.tables)), self.scheduled
        hold(reference, each.on("cpu"), tables)
        reference.take_in_hand(each.rows, each.seq_lens, tables, each.page_size)
        note(reference, each, tables)
        return tables

    def trial(self, work: Work, tables: FrameTables, more: int = 0, page_bytes: int = 0) -> Trial:
        """``work`` on ``tables`` and contexts with ``more`` tokens; it moves ``page_bytes`` for each page of all contexts."""
        outcome = []
        for module, device in ((kernels, self.device), (reference, "cpu")):
            each, live = self.scheduled.with_tokens(more).on(device), FrameTables(*(table.to(device, copy=True) for table in tables))
            work(module, each, live)
            outcome.append((each, live))
        (each, live), (expected, right) = outcome
        assert torch.equal(each.given.cpu(), expected.given), "given: not the reference's"
        for name, table in live._asdict().items():
            assert torch.equal(table.cpu(), getattr(right, name)), f"{name}: not the reference's"
        changed = [(now, was.to(self.device)) for now, was, then in zip(live, tables, right) if not torch.equal(was, then)]

        def put_back() -> None:
            for now, was in changed:
                now.copy_(was)
            self.flushed.zero_()

        pages = self.case.rows * self.case.context // self.case.page_size
        return Trial([lambda: work(kernels, each, live)], pages * page_bytes, before=put_back)


def note(module: ModuleType, each: Scheduled, tables: FrameTables) -> None:
    """Nobody ends, and no row becomes partial."""
    module.note_rows(each.nobody, each.nobody, each.rows, each.seq_lens, tables)


def mark(module: ModuleType, each: Scheduled, tables: FrameTables) -> None:
    module.mark_pages(each.req_to_token, tables, each.page_size, 1)


def begin(module: ModuleType, each: Scheduled, tables: FrameTables) -> None:
    module.begin_pages(each.req_to_token, each.rows, each.seq_lens, tables, each.page_size)


def hold(module: ModuleType, each: Scheduled, tables: FrameTables) -> None:
    module.hold_pages(each.req_to_token, each.rows, each.seq_lens, each.prefix_lens, tables, each.page_size, each.given)


KERNELS: dict[str, Callable[[Frames], Trial]] = {
    "note_rows": lambda frames: frames.trial(note, frames.resident(), more=5),
    "mark_pages": lambda frames: frames.trial(mark, frames.resident(), page_bytes=2 * ELEMENT_BYTES + MARK_BYTES),
    "begin_pages": lambda frames: frames.trial(begin, frames.resident(), more=5),
    "begin_pages-all": lambda frames: frames.trial(begin, frames.resident(), more=1),
    "hold_pages": lambda frames: frames.trial(hold, frames.resident(), page_bytes=2 * ELEMENT_BYTES),
    "hold_pages-absent": lambda frames: frames.trial(hold, frames.tables, page_bytes=6 * ELEMENT_BYTES),
}  # with -all each row begins a page, with -absent no page is resident
