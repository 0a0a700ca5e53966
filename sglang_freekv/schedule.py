# SPDX-License-Identifier: Apache-2.0
"""The schedule of a decode step: each piece of work, its stream, and what it comes behind."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sglang_freekv.memory_pool.transfer import Handle, Streams

MAIN, SELECTION, APPENDS, TRANSFERS = "main", "selection", "appends", "transfers"
LAST_STEP = "the last step"  # of the same layer: what it left in flight


class Work(NamedTuple):
    """One piece of work.

    Args:
        work: a method of ``DecodeStep``.
        stream: MAIN, or a field of ``Streams``.
        behind: works that it comes behind, in the order in which MAIN waits for them.
    """

    work: str
    stream: str
    behind: tuple[str, ...]


SCHEDULE = (
    #    work            stream      comes behind
    Work("score",        SELECTION,  (LAST_STEP,)),
    Work("rotate",       MAIN,       (LAST_STEP,)),
    Work("append",       APPENDS,    (LAST_STEP, "rotate")),
    Work("compare",      MAIN,       (LAST_STEP,)),
    Work("plan",         SELECTION,  ("score", "compare")),
    Work("correct",      SELECTION,  ("plan",)),
    Work("verify",       SELECTION,  ("correct",)),
    Work("attend",       MAIN,       ("append", "plan")),
    Work("merge",        MAIN,       ("attend", "correct")),
    Work("plan_ahead",   SELECTION,  ("merge",)),
    Work("recall_ahead", TRANSFERS,  ("plan_ahead",)),
)  # fmt: skip
ON_TURN = (*SCHEDULE[1:4], Work("score", SELECTION, ("compare",)), *SCHEDULE[4:])  # which kv heads score is known by then
IN_FLIGHT = ("plan_ahead", "recall_ahead")  # what a step leaves; the next step of the layer comes behind it
STREAMS = {line.work: line.stream for line in SCHEDULE}
LINES = dict.fromkeys((*SCHEDULE, *ON_TURN))  # of both, each once
EDGES = tuple((before, line.work) for line in LINES for before in line.behind if STREAMS.get(before) != line.stream)
CHAINED = {line.work: line for line in SCHEDULE if line.stream != MAIN and STREAMS.get(line.behind[0], MAIN) not in (MAIN, line.stream)}


def run(step: object, streams: Streams, in_flight: list[Handle], without: Collection[str] = (), *, on_turn: bool = False) -> None:
    """Queue the works of one step of one layer. MAIN has waited for the last step.

    MAIN waits for the handle of each work that a line of its own comes behind. A work that MAIN submits comes behind all that MAIN was
    given. A chained work comes behind one of another side stream, and is submitted by it.

    Args:
        step: a ``DecodeStep``, which has a method for each work.
        streams: the side streams.
        in_flight: takes the handles of ``IN_FLIGHT``.
        without: works that are left out.
        on_turn: whether ``ON_TURN`` is run, in the place of ``SCHEDULE``.
    """
    handles: dict[str, Handle] = {}
    for line in ON_TURN if on_turn else SCHEDULE:
        if line.work in without or line.work in CHAINED:
            continue
        if line.stream != MAIN:
            handles[line.work] = _submit(line, step, streams, in_flight)
            continue
        for before in line.behind:
            if STREAMS.get(before, MAIN) != MAIN:
                handles[before].wait()
        getattr(step, line.work)()


def _submit(line: Work, step: object, streams: Streams, in_flight: list[Handle]) -> Handle:
    def work() -> None:
        getattr(step, line.work)()
        for chained in CHAINED.values():
            if line.work in chained.behind:
                _submit(chained, step, streams, in_flight)

    work.__name__ = line.work
    handle = getattr(streams, line.stream).submit(work)
    if line.work in IN_FLIGHT:
        in_flight.append(handle)
    return handle
