"""What a capture is shielded from, with stand-ins for the calls that need a GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_freekv.seeding import captured


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
