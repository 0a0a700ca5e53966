"""The kernels by which frames change hands against their references: passes of every kind leave the same tables, in blocks of any size."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import torch

from frame_traffic import FRAMES, HOST_PAGES, LENT, PAGE, ROWS, Pass, Traffic, ask
from sglang_freekv.kernels import frames as kernels
from sglang_freekv.kernels import on_gpu, page_table, reference, running_rows
from sglang_freekv.kernels.frame_tables import UNSERVED, FrameTables
from sglang_freekv.memory_pool import frames as owner
from sglang_freekv.memory_pool.frames import Frames

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PASSES, OF_A_KIND = 300, 1 << 10 if DEVICE == "cuda" else 1  # the interpreter takes 60 ms for a pass


def kind(each: Pass, before: FrameTables, after: FrameTables) -> tuple[str, frozenset[str]]:
    """What happens in a pass."""
    facts = {
        "reclaims": before.free_count < each.need,
        "frees": (before.frame_of > after.frame_of).any(),
        "holds": (before.frame_of < after.frame_of).any(),
        "takes in hand": (before.in_hand < after.in_hand).any(),
        "gives back": (before.in_hand[each.ended] >= 0).any(),
        "finds none": after.counts[UNSERVED] > 0,
    }
    return each.kind, frozenset(fact for fact, true in facts.items() if true)


def test_traffic(monkeypatch):
    monkeypatch.setattr(running_rows, "PROGRAMS", 2 * ROWS)
    traffic = Traffic(seed=0)
    ours, theirs = (Frames(FRAMES, HOST_PAGES, ROWS, LENT, PAGE, DEVICE) for _ in range(2))
    kinds: Counter[tuple] = Counter()
    for number in range(PASSES):
        each, integer, block = traffic.next(), (torch.int32, torch.int64)[number % 2], (2, 64)[number % 3 % 2]
        before = FrameTables(*(table.clone() for table in theirs.tables))
        with mock.patch.object(owner, "kernels", reference):
            expected = ask(theirs, each, traffic.slots, integer)
        kinds[happened := kind(each, before, theirs.tables)] += 1
        if kinds[happened] > OF_A_KIND or "reclaims" in happened[1]:  # which no kernel does
            continue
        for module, name in ((kernels, "REQUESTS"), (kernels, "PAGES"), (running_rows, "BLOCK"), (page_table, "BLOCK")):
            monkeypatch.setattr(module, name, block)
        ours.tables, ours.now = before, theirs.now - 1
        with mock.patch.object(owner, "kernels", on_gpu):
            found = ask(ours, each, traffic.slots, integer)
        for name, table in ours.tables._asdict().items():
            assert torch.equal(table, getattr(theirs.tables, name)), (each, name)
        assert all(map(torch.equal, found, expected)), each
    assert {("decode", True), ("staged", True)} <= {(name, {"frees", "reclaims"} & facts == {"frees"}) for name, facts in kinds}, kinds
