"""Frames under random traffic, against a model in plain Python. No pass is shown a frame with the KV of another page."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from frame_traffic import CONTEXT, FRAMES, HOST_PAGES, PAGE, Contents, Model, Traffic, ask, make
from sglang_freekv.kernels import frame_tables
from sglang_freekv.kernels.frame_tables import FrameTables
from sglang_freekv.memory_pool import frames as owner
from sglang_freekv.memory_pool.frames import Frames
from sglang_freekv.memory_pool.reclaim import reclaim

PASSES = 400


def assert_like(model: Model, frames: Frames) -> None:
    tables = frames.tables
    assert {page: frame for page, frame in enumerate(tables.frame_of.tolist()) if frame >= 0} == model.frame_of
    assert tables.free[: int(tables.free_count)].tolist() == model.free
    assert {row: frame for row, frame in enumerate(tables.in_hand.tolist()) if frame >= 0} == model.in_hand
    assert {row: length for row, length in enumerate(tables.row_lens.tolist()) if length} == model.lens
    assert {row: slots for row, slots in enumerate(tables.row_frames.tolist()) if row and slots[0] >= 0} == model.slots
    assert frames.counts._replace(absent=0) == model.counts


@pytest.mark.parametrize("seed", range(3))
def test_traffic(seed):
    traffic, frames, model, contents = Traffic(seed), make(), Model(), Contents()
    seen = Counter()
    for _ in range(PASSES):
        each, before, partial = traffic.next(), model.counts, set(model.slots)
        expected, given = model.step(each, lambda row, p: traffic.rows[row].pages[p])
        asked = ask(frames, each, traffic.slots)
        frames.check_integrity()
        assert_like(model, frames)
        for b, (row, n, line) in enumerate(zip(each.rows, each.seq_lens, expected)):
            in_hand = [model.in_hand.get(row, -1)] if row and n % PAGE == 0 else []
            shown = (line + in_hand)[: CONTEXT // PAGE]
            assert asked.frames[b].tolist() == shown + [-1] * (asked.frames.shape[1] - len(shown))
        assert {(b, p): int(asked.given[b, p]) for b, p in (asked.given >= 0).nonzero().tolist()} == given
        assert frames.counts.absent == sum(line.count(-1) for line in expected)
        contents.run(each, traffic, asked)
        of_partial = sum(each.rows[b] in traffic.partial for b, _ in given)
        seen.update({
            each.kind: 1,
            "refilled": each.kind == "decode" and len(given) > 0,
            "kept of whole rows": each.kind == "staged" and len(given) > of_partial,
            "kept of partial rows": each.kind == "staged" and of_partial > 0,
            "lent": len(each.lent) > 0,
            "taken back": not partial.isdisjoint(each.ended),
            "brought": model.brought > before.brought,
            "given up": model.given_up > before.given_up,
            "unserved": model.unserved > 0,
            "shared": traffic.shares_a_page,
        })  # fmt: skip
    assert len(seen) == 12 and min(seen.values()) > 3, seen


def put(table: torch.Tensor, place: int | torch.Tensor, value: int | torch.Tensor) -> None:
    table[place] = value


def lend_the_top_of_the_stack(tables: FrameTables) -> None:
    tables.free_count.sub_(1)
    tables.page_of[tables.free[tables.free_count]] = frame_tables.LENT


@pytest.mark.parametrize(
    "fault, damage",
    [
        ("in no known state", lambda t: put(t.page_of, FRAMES - 1, HOST_PAGES)),
        ("frames whose page has another", lambda t: put(t.frame_of, t.frame_of.argmax(), -1)),
        ("pages whose frame has another", lambda t: put(t.frame_of, t.frame_of.argmin(), t.frame_of.max())),
        ("pages whose frame has another", lambda t: put(t.frame_of, 0, t.free[0])),
        ("on the stack once", lambda t: t.free_count.sub_(1)),
        ("on the stack once", lambda t: put(t.free, 0, t.free[1])),
        ("on the stack once", lambda t: put(t.free, 0, t.in_hand.max())),
        ("in hand of the rows", lambda t: put(t.in_hand, t.in_hand.argmax(), -1)),
        ("in hand of the rows", lambda t: t.in_hand.fill_(int(t.in_hand.max()))),
        ("that are not lent", lend_the_top_of_the_stack),
        ("padding rows", lambda t: put(t.row_lens, 0, 1)),
    ],
)
def test_damage_is_found(fault, damage):
    traffic, frames = Traffic(0), make()
    while frames.now < 20 or int(frames.tables.free_count) < 2 or frames.tables.in_hand.max() < 0:
        ask(frames, traffic.next(), traffic.slots)
    frames.check_integrity()
    damage(frames.tables)
    with pytest.raises(RuntimeError, match=f"frames: .*{fault}.*, expected none"):
        frames.check_integrity()


def giving_up_pinned_pages(frames: Frames, monkeypatch) -> None:
    monkeypatch.setattr(owner, "reclaim", lambda tables, now, *wanted: reclaim(tables, now + 1, *wanted))


def keeping_slots_of_rows_that_ended(frames: Frames, monkeypatch) -> None:
    note = owner.kernels.note_rows

    def without_slots(ended, lent, rows, seq_lens, tables) -> None:
        kept = tables.row_frames.clone()
        tables.row_frames[1:] = frame_tables.WHOLE
        note(ended, lent, rows, seq_lens, tables)
        tables.row_frames.copy_(kept)

    monkeypatch.setattr(owner.kernels, "note_rows", without_slots)


def copying_nothing(kind: str):
    """What passes of that kind give absent pages is never written."""

    def sabotage(frames: Frames, monkeypatch) -> None:
        run = Contents.run

        def without(contents: Contents, each, traffic: Traffic, asked) -> None:
            given = torch.full_like(asked.given, -1) if each.kind == kind else asked.given
            run(contents, each, traffic, asked._replace(given=given))

        monkeypatch.setattr(Contents, "run", without)

    sabotage.__name__ = f"copying_nothing_{kind}"
    return sabotage


@pytest.mark.parametrize("sabotage", [
    giving_up_pinned_pages, keeping_slots_of_rows_that_ended, copying_nothing("staged"), copying_nothing("decode"), copying_nothing("in place"),
])  # fmt: skip
def test_a_broken_pass_is_found(sabotage, monkeypatch):
    """The negative control: the contents of frames tell what goes wrong, without the model."""
    traffic, frames, contents = Traffic(0), make(), Contents()
    sabotage(frames, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        for _ in range(PASSES):
            each = traffic.next()
            contents.run(each, traffic, ask(frames, each, traffic.slots))
            assert frames.counts.stranded == 0
