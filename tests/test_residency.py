"""Residency: how passes begin, by what the host knows."""

from __future__ import annotations

import torch

from frame_traffic import make
from sglang_freekv.memory_pool import frames as frames_module
from sglang_freekv.residency import Residency

PAGE = 4


def test_nothing_is_reclaimed_again_while_running_rows_have_every_frame(monkeypatch):
    """Four partial rows fill twelve frames: a slot, a page in hand, and the page before it. Each page more finds none, and nothing is idle.

    When a request has ended, its frames may give way.
    """
    tables = torch.arange(6 * 8 * PAGE, dtype=torch.int64).view(6, -1) + PAGE
    frames, reclaimed, reclaim = make(1 + 12, 60, 6, 1, PAGE), [], frames_module.reclaim
    monkeypatch.setattr(frames_module, "reclaim", lambda *wanted: (reclaimed.append(frames.now), reclaim(*wanted)))
    residency = Residency(frames, tables, whole_pages=2)

    def begin(rows: list[int], tokens: int, prefix: int | None = None) -> None:
        held = len(rows) * -(-tokens // PAGE)
        residency.note_requests(set(rows), held, [(row, tokens) for row in rows], {} if prefix is None else dict.fromkeys(rows, 8 * PAGE))
        where = torch.tensor(rows), torch.full((len(rows),), tokens), *torch.empty((2, len(rows), 8), dtype=torch.int32)
        if prefix is None:
            residency.begin_decode(*where, len(rows) * (tokens % PAGE == 0))
        else:
            residency.begin_extend(*where, torch.full((len(rows),), prefix), [tokens] * len(rows), in_place=residency.in_place)

    begin([1, 2, 3, 4], 3 * PAGE, prefix=0)
    assert residency.lending.partial == {1, 2, 3, 4} and not reclaimed
    for tokens in range(3 * PAGE + 1, 5 * PAGE):
        begin([1, 2, 3, 4], tokens)
    for _ in range(5):
        begin([1, 2, 3, 4], 5 * PAGE)
    assert frames.counts.unserved == 4 and not reclaimed  # nobody has ended, so no page is without a request
    for _ in range(5):
        begin([1, 2, 3], 5 * PAGE)
    assert reclaimed and frames.counts.unserved == 0 and frames.counts.given_up == 2
    assert len(residency.taken) <= 2  # what has been counted is forgotten
    frames.check_integrity()
