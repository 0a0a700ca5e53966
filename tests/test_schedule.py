"""The schedule of a decode step: what is queued keeps each of its edges, and DESIGN and the controls name the same ones."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from edges import CONTROLS, scoring_before_the_comparison
from engine import CONFIGS, LAYERS, Engine
from sglang_freekv.decode_step import DecodeStep
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.schedule import EDGES, IN_FLIGHT, LAST_STEP, MAIN, ON_TURN, SCHEDULE, Work

DESIGN = Path(__file__).resolve().parents[1] / "DESIGN.md"
STEPS = 3


class Order:
    """Streams that do work at once and note what each work is ordered behind, as CUDA's events would order it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.known = [MAIN], {MAIN: set()}
        self.behind: dict[tuple, frozenset] = {}  # (work, layer, step) -> the same of all works that it is ordered behind
        self.streams: dict[tuple, str] = {}
        self.steps = Counter()
        for line in SCHEDULE:
            monkeypatch.setattr(DecodeStep, line.work, self._noting(line.work, getattr(DecodeStep, line.work)))

    def _noting(self, name: str, work):
        def noting(step: DecodeStep) -> None:
            key = name, step.layer, self.steps[name, step.layer]
            self.steps[name, step.layer] += 1
            stream = self.current[-1]
            self.behind[key], self.streams[key] = frozenset(self.known[stream]), stream
            work(step)
            self.known[stream].add(key)

        return noting

    def stream(self) -> Stream:
        return Stream(self, ("selection", "appends", "transfers")[len(self.known) - 1])


class Stream:
    def __init__(self, order: Order, name: str) -> None:
        self.order, self.name = order, name
        order.known[name] = set()

    def submit(self, work, behind=None):
        order, known = self.order, self.order.known
        for other in (known[order.current[-1]],) if behind is None else [handle.known for handle in behind]:
            known[self.name] |= other
        order.current.append(self.name)
        work()
        order.current.pop()
        return Handle(order, frozenset(known[self.name]))

    def mark(self):
        return Handle(self.order, frozenset(self.order.known[self.order.current[-1]]))


class Handle:
    def __init__(self, order: Order, known: frozenset) -> None:
        self.order, self.known = order, known

    def wait(self) -> None:
        self.order.known[self.order.current[-1]] |= self.known


SCHEDULES = {"every-step": SCHEDULE, "on-turn": ON_TURN}


def lines_of(schedule: tuple[Work, ...]) -> set[tuple[str, str]]:
    return {(before, line.work) for line in schedule for before in line.behind}


def edges_of(monkeypatch: pytest.MonkeyPatch, selection: str, control=None) -> tuple[set[tuple[str, str]], Order]:
    """The schedule's edges that a run keeps in every layer and step. Coded KV and a canary leave no work out."""
    order = Order(monkeypatch)
    engine = Engine(replace(CONFIGS["int8"], selection=selection), prompts=[64, 99], steps=STEPS, stream=order.stream)
    if control is not None:
        control(engine.retrieval)
    engine.run(STEPS)

    def kept(before: str, work: str, layer: int, step: int) -> bool:
        works = [(before, step)] if before != LAST_STEP else [(name, step - 1) for name in IN_FLIGHT if step]
        return all((name, layer, at) in order.behind[work, layer, step] for name, at in works)

    places = list(product(range(LAYERS), range(STEPS)))
    return {edge for edge in lines_of(SCHEDULES[selection]) if all(kept(*edge, *place) for place in places)}, order


@pytest.mark.parametrize("selection", SCHEDULES)
def test_a_step_keeps_all_edges_of_the_schedule(selection, monkeypatch):
    kept, order = edges_of(monkeypatch, selection)
    assert kept == lines_of(SCHEDULES[selection])
    streams = {line.work: line.stream for line in SCHEDULE}
    assert order.streams == {key: streams[key[0]] for key in product(streams, range(LAYERS), range(STEPS))}


def test_every_edge_between_streams_has_a_control():
    assert sorted(edge for edges in CONTROLS.values() for edge in edges) == sorted(EDGES)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_a_control_takes_away_the_edges_that_it_names(control, monkeypatch):
    selection = "on-turn" if control is scoring_before_the_comparison else "every-step"
    kept, _ = edges_of(monkeypatch, selection, control)
    assert lines_of(SCHEDULES[selection]) - kept == set(CONTROLS[control])


def test_design_has_the_schedule_and_all_edges():
    text = DESIGN.read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert [(work, stream, tuple(re.findall(r"`(\w+)`|(the last step)", behind))) for work, stream, behind in rows] == [
        (line.work, line.stream, tuple(("", name) if name == LAST_STEP else (name, "") for name in line.behind)) for line in SCHEDULE
    ]
    table = text[text.index("## Who may touch what") :]
    named = {(before.strip("`"), work) for before, work in re.findall(r"(`\w+`|the last step)(?= → `(\w+)`)", table)}
    assert named == set(EDGES)


class Kept(InlineStream):
    """Its handles keep their work, as a CUDA stream's do."""

    def submit(self, work, behind=None):
        handle = super().submit(work, behind)
        handle.work = work
        return handle


def test_a_step_in_flight_keeps_no_tensor_of_its_attention(monkeypatch):
    """In a graph these would take memory in every layer. Reference counts let them go, so no collection is waited for."""
    engine = Engine(CONFIGS["tight"], prompts=[64, 99], steps=STEPS, stream=Kept)
    engine.run(1)
    steps, tensors, finish = [], [], DecodeStep.finish

    def watch(step: DecodeStep) -> torch.Tensor:
        steps.append(weakref.ref(step))
        tensors.extend(map(weakref.ref, (step.queries, step.keys, step.values, *step.reads[:3], *step.shares)))
        return finish(step)

    monkeypatch.setattr(DecodeStep, "finish", watch)
    gc.disable()
    try:
        engine.decode(engine.requests)
        alive = [bool(step()) for step in steps], [tensor() for tensor in tensors if tensor() is not None]
        engine.retrieval.complete_all_transfers()
        left = [step() for step in steps if step() is not None]
    finally:
        gc.enable()
    assert alive == ([True] * LAYERS, []) and not left
