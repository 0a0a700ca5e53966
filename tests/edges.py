"""Controls: each takes edges of the decode step's schedule away from an engine, as a mistake would."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from sglang_freekv.decode_step import DecodeStep
from sglang_freekv.kernels import Reads
from sglang_freekv.retrieval import Retrieval
from sglang_freekv.schedule import LAST_STEP


def without_waiting_for_the_last_step(retrieval: Retrieval) -> None:
    """A step uses slots and tables that the last step's recall still writes. What that reads is kept, so that nothing else breaks."""
    kept = []

    def pass_over(layer: int) -> None:
        kept.extend(retrieval.in_flight[layer])
        retrieval.in_flight[layer].clear()

    retrieval.complete_transfers = pass_over


def planning_before_the_comparison(retrieval: Retrieval) -> None:
    """A plan reads which kv heads are corrected before that is known."""
    _unordered(retrieval.streams.selection, "plan")


def scoring_before_the_comparison(retrieval: Retrieval) -> None:
    """On turn a score reads which kv heads select before that is known. The pages that it reads are known: main wrote them before."""
    appends, selection = retrieval.streams.appends, retrieval.streams.selection
    submit_append, submit, before = appends.submit, selection.submit, []

    def noting(work, behind=None):
        before[:] = (appends.mark(),)  # the append is submitted before the comparison
        return submit_append(work, behind)

    appends.submit = noting
    selection.submit = lambda work, behind=None: submit(work, before if work.__name__ == "score" else behind)


def appending_before_the_rotation(retrieval: Retrieval) -> None:
    """Coded KV is written of keys that are still being rotated. The score is submitted before the rotation."""
    appends, selection = retrieval.streams.appends, retrieval.streams.selection
    submit_score, submit, before = selection.submit, appends.submit, []

    def noting(work, behind=None):
        if work.__name__ == "score":
            before[:] = (selection.mark(),)
        return submit_score(work, behind)

    selection.submit = noting
    appends.submit = lambda work, behind=None: submit(work, before if work.__name__ == "append" else behind)


def attending_before_the_append(retrieval: Retrieval) -> None:
    """Attention reads the slot of a token that has yet to be written."""
    _unawaited(retrieval.streams.appends, "append")


def attending_before_the_plan(retrieval: Retrieval) -> None:
    """Attention reads lists that are still being written. These begin as lists of slots that are there, so that nothing else breaks."""
    _unawaited(retrieval.streams.selection, "plan")
    decode, allocate = retrieval.decode, Reads.allocate

    def with_slots_that_are_there(*args):
        def zeros(*shape) -> Reads:
            made = allocate(*shape)
            return Reads(*(part.zero_() for part in made[:3]), made.budget)

        with mock.patch.object(Reads, "allocate", zeros):
            return decode(*args)

    retrieval.decode = with_slots_that_are_there


def merging_before_the_correction(retrieval: Retrieval) -> None:
    """The merge reads shares of corrected kv heads before they are written. The step keeps its tensors, so that nothing else breaks."""
    _unawaited(retrieval.streams.selection, "correct")
    decode = retrieval.decode

    def keeping(*args):
        with mock.patch.object(DecodeStep, "finish", lambda step: step.output):
            return decode(*args)

    retrieval.decode = keeping


def planning_ahead_before_the_merge(retrieval: Retrieval) -> None:
    """The recall for the next step overwrites slots that this step's attention has yet to read."""
    _unordered(retrieval.streams.selection, "plan_ahead")


def recalling_before_the_plan_ahead(retrieval: Retrieval) -> None:
    """Recall reads a list that is still being written."""
    _unordered(retrieval.streams.transfers, "recall_ahead")


CONTROLS: dict[Callable[[Retrieval], None], tuple[tuple[str, str], ...]] = {
    without_waiting_for_the_last_step: tuple((LAST_STEP, work) for work in ("score", "rotate", "append", "compare")),
    planning_before_the_comparison: (("compare", "plan"),),
    scoring_before_the_comparison: (("compare", "score"),),
    appending_before_the_rotation: (("rotate", "append"),),
    attending_before_the_append: (("append", "attend"),),
    attending_before_the_plan: (("plan", "attend"),),
    merging_before_the_correction: (("correct", "merge"),),
    planning_ahead_before_the_merge: (("merge", "plan_ahead"),),
    recalling_before_the_plan_ahead: (("plan_ahead", "recall_ahead"),),
}  # and the edges of each


class _Ignored:
    def wait(self) -> None:
        return


def _unawaited(stream, name: str) -> None:
    """The handle of the work of that name waits for nothing. It is kept, because it keeps tensors alive."""
    submit, kept = stream.submit, []

    def unawaited(work, behind=None):
        handle = submit(work, behind)
        if work.__name__ != name:
            return handle
        kept.append(handle)
        return _Ignored()

    stream.submit = unawaited


def _unordered(stream, name: str) -> None:
    """The work of that name is submitted behind nothing. Other work is not: it may store wherever numbers point that are not there yet."""
    submit = stream.submit
    stream.submit = lambda work, behind=None: submit(work, () if work.__name__ == name else behind)
