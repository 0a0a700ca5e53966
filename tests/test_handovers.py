"""Slots and frames that change hands between passes: each history is right however late transfers are, and without its edge it is not."""

from __future__ import annotations

import pytest

from handovers import HANDOVERS, Late
from sglang_freekv.memory_pool.transfer import InlineStream
from test_retrieval import DeferredStream


class LateStream(DeferredStream):
    def __init__(self, late: Late) -> None:
        super().__init__()
        self.late = late

    def submit(self, work, behind=None):
        self.late.is_due(work)
        return super().submit(work, behind)


@pytest.mark.parametrize("name", HANDOVERS)
def test_frames_change_hands_behind_what_is_in_flight(name):
    handover = HANDOVERS[name]
    for stream, remove_edge in ((lambda _: InlineStream(), None), (LateStream, None), (LateStream, handover.remove_edge)):
        engine = handover.make(stream)
        if remove_edge is not None:
            remove_edge(engine)
        handover.history(engine)
        assert engine.is_right() == (remove_edge is None)
    assert engine.late.left == 0, "on a GPU nothing would be late"
