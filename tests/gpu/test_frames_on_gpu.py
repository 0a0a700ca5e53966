"""Frames on a GPU: the tables are those of a CPU, and the host waits for nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from frame_traffic import FRAMES, Pass, Traffic, ask, make
from sglang_freekv.memory_pool.frames import Frames

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@contextmanager
def no_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(ours: Frames, theirs: Frames) -> None:
    for name, table in ours.tables._asdict().items():
        assert torch.equal(table.cpu(), getattr(theirs.tables, name)), name
    assert ours.counts == theirs.counts


@pytest.mark.parametrize("seed", range(3))
def test_traffic(seed):
    traffic = Traffic(seed)
    ours, theirs = (make(device=device) for device in ("cuda", "cpu"))
    for each in (Pass("decode", [0], [1], [0], [1], [2], FRAMES, refill=True), Pass("staged", [0], [1], [0], must=None)):
        ask(ours, each, traffic.slots)  # compiles, and gets memory
    ours = make(device="cuda")
    for _ in range(400):
        each = traffic.next()
        found, expected = ask(ours, each, traffic.slots, within=no_wait), ask(theirs, each, traffic.slots)
        torch.cuda.synchronize()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected)), each
        assert_same(ours, theirs)


def test_many_rows_and_long_contexts():
    """More requests and pages than a program has at once, with a prefix that all share."""
    generator = torch.Generator().manual_seed(0)
    rows, size, pages = 601, 8, 3000
    ours, theirs = (make(60_000, 200_000, rows, 7, size, device) for device in ("cuda", "cpu"))
    host_pages = (1 + torch.randperm(199_999, generator=generator)).int()
    held = torch.zeros(rows, pages, dtype=torch.int32)
    held[1:20], held[20:, :8] = host_pages[: 19 * pages].view(19, pages), host_pages[-8 * (rows - 20) :].view(-1, 8)
    held[1:20, :1200] = held[1, :1200].clone()
    slots = (held[:, :, None] * size + torch.arange(size, dtype=torch.int32)).flatten(1)
    long, many = list(range(1, 20)), list(range(rows - 1, 19, -1))
    lens, short = [size * (2500 + row) - row % 3 for row in long], [size * (row % 5 + 1) + row % 2 for row in many]
    passes = [
        Pass("in place", long, lens, [0] * 19),
        Pass("staged", long[:9], lens[:9], [1600 * size] * 9, [3, 4], long[:5], keep=20),
        Pass("decode", many, short, [0] * len(many), long, many[::3]),
        Pass("decode", many, [length + 1 for length in short], [0] * len(many), many[::2], may=40_000, refill=True),
        Pass("in place", long, lens, [0] * 19, [], [], 50_000),
    ]
    for each in passes:
        found, expected = ask(ours, each, slots), ask(theirs, each, slots)
        torch.cuda.synchronize()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected)), each.kind
        assert_same(ours, theirs)
        theirs.check_integrity()


@pytest.mark.parametrize("slots", [64, 256, 1024])
def test_slots_are_lent_and_come_back(slots):
    """More slots than a program has threads. One that lost a slot of a row would lose frames, until others find none."""
    chance, rows, running = random.Random(slots), 9, set[int]()
    ours, theirs = (make(rows * slots, 60, rows, slots, device=device, resident=False) for device in ("cuda", "cpu"))
    unused = torch.zeros(rows, 48, dtype=torch.int32)
    for _ in range(60):
        ended = [row for row in running if chance.random() < 0.4]
        running.difference_update(ended)
        lent = [row for row in range(1, rows) if row not in running and chance.random() < 0.4]
        running.update(lent)
        each = Pass("decode", sorted(running) or [0], [4] * max(len(running), 1), [0], ended, lent)
        ask(ours, each, unused), ask(theirs, each, unused)
        assert_same(ours, theirs)
