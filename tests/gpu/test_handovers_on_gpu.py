"""Slots and frames that change hands between passes, with the transfer that orders them late by more than the host needs for a history."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

from delays import delayed_streams
from handovers import HANDOVERS, Late
from sglang_freekv.memory_pool.transfer import CudaStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run on one with `bash launch/test.sh tests/gpu`")

CYCLES = 2_000_000_000  # a second


class LateStream(CudaStream):
    """Starts the work late that is due to."""

    def __init__(self, late: Late) -> None:
        super().__init__("cuda")
        self.late = late

    def submit(self, work, behind=None):
        @wraps(work)
        def after_a_while() -> None:
            torch.cuda._sleep(CYCLES)
            work()

        return super().submit(after_a_while if self.late.is_due(work) else work, behind)


@pytest.mark.parametrize("name", HANDOVERS)
def test_frames_change_hands_behind_what_is_late(name):
    """The first run loads kernels and pins memory, for which the driver has the host wait."""
    handover = HANDOVERS[name]
    for remove_edge in (None, None, handover.remove_edge):
        engine = handover.make(LateStream, "cuda")
        if remove_edge is not None:
            remove_edge(engine)
        torch.cuda.synchronize()
        handover.history(engine)
        assert engine.is_right() == (remove_edge is None)
        torch.cuda.synchronize()
        assert engine.late.left == 0 or remove_edge is None


@pytest.mark.parametrize(
    "handover", {handover.history: handover for handover in HANDOVERS.values()}.values(), ids=lambda handover: handover.history.__name__
)
def test_delays_on_any_stream_leave_a_history_right(handover):
    for seed in range(20):
        stream = delayed_streams(seed)
        engine = handover.make(lambda late, stream=stream: stream(), "cuda")
        handover.history(engine)
        assert engine.is_right(), f"run {seed} differs"
