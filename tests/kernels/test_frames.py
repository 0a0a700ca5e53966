"""The kernels by which frames change hands against their references: passes of every kind leave the same tables, in blocks of any size."""

from __future__ import annotations

from itertools import combinations_with_replacement
from unittest import mock

import pytest
import torch

from frame_traffic import ROWS, Pass, Traffic, ask, make
from sglang_freekv.kernels import frames as kernels
from sglang_freekv.kernels import hold, on_gpu, page_table, reference, running_rows
from sglang_freekv.kernels.frame_tables import STRANDED, UNSERVED, WHOLE, FrameTables
from sglang_freekv.memory_pool import frames as owner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PASSES = 300


def happened(each: Pass, resident: bool, before: FrameTables, after: FrameTables) -> set[tuple[str, str, str]]:
    """What happens together in a pass: its kind, and each pair of facts."""
    facts = {
        "begins": True,
        "holds nothing for partial rows": not resident,
        "frees": (before.frame_of > after.frame_of).any(),
        "holds": (before.frame_of < after.frame_of).any(),
        "takes in hand": (before.in_hand < after.in_hand).any(),
        "gives back": (before.in_hand[each.ended] >= 0).any(),
        "finds none": after.counts[UNSERVED] > 0,
        "is stranded": after.counts[STRANDED] > before.counts[STRANDED],
        "lends": (before.row_frames[each.lent, 0] == WHOLE).any(),
        "takes back": (before.row_frames[each.ended] >= 0).any(),
        "refills": each.refill,
    }
    true = [fact for fact, holds in facts.items() if holds]
    return {(each.kind, *pair) for pair in combinations_with_replacement(true, 2)}


@pytest.mark.parametrize("honest", [True, False])
def test_traffic(honest, monkeypatch):
    monkeypatch.setattr(running_rows, "PROGRAMS", 2 * ROWS)
    traffic = Traffic(0, honest=honest)
    ours, theirs = (make(device=DEVICE) for _ in range(2))
    seen: set[tuple[str, str, str]] = set()
    for number in range(PASSES):
        each, integer, block = traffic.next(), (torch.int32, torch.int64)[number % 2], (2, 64)[number % 3 % 2]
        ours.is_resident = theirs.is_resident = number % 4 > 0
        before = FrameTables(*(table.clone() for table in theirs.tables))
        with mock.patch.object(owner, "kernels", reference):
            expected = ask(theirs, each, traffic.slots, integer)
        new = happened(each, theirs.is_resident, before, theirs.tables) - seen
        if not new and DEVICE == "cpu":
            continue  # the interpreter takes 100 ms for a pass
        seen |= new
        for module, name in ((kernels, "REQUESTS"), (hold, "PAGES"), (running_rows, "BLOCK"), (page_table, "BLOCK")):
            monkeypatch.setattr(module, name, block)
        ours.tables, ours.now = before, theirs.now - 1
        ours.cache.row_frames = before.row_frames
        with mock.patch.object(owner, "kernels", on_gpu):
            found = ask(ours, each, traffic.slots, integer)
        for name, table in ours.tables._asdict().items():
            assert torch.equal(table, getattr(theirs.tables, name)), (each, name)
        assert all(map(torch.equal, found, expected)), each
    expected = {(name, "begins", fact) for name in ("decode", "in place", "staged") for fact in ("lends", "takes back", "holds", "frees")}
    assert expected | {("decode", "begins", fact) for fact in ("refills", "is stranded" if not honest else "finds none")} <= seen, seen
