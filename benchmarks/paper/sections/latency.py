"""Figure 7: whole answers by method, and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paper import latency, plots
from paper.scenarios import BATCHES, SCENARIOS
from report import markdown

from .section import Aim, Section, ms

SPLIT_BATCH = 8  # whose steps are split in the tables and pictures


def of_latency(path: Path, directory: Path) -> Section:
    """Figure 7 of a shape."""
    section = Section.of("Latency of whole answers", path, directory)
    answers, cells = latency.answers(section.results), latency.cells(section.results, section.written["runs"])
    for name, scenario in SCENARIOS.items():
        mine = [answer for answer in answers if answer.scenario == name]
        if not mine:
            continue
        batches, methods = (list(dict.fromkeys(getattr(each, what) for each in mine)) for what in ("batch", "method"))
        by = {(answer.method, answer.batch): answer for answer in mine}
        section.add(
            f"### {name}: {scenario.prompt} tokens in, {scenario.answer} out, load of tau {scenario.tau:g}",
            "Milliseconds of a step, in the mean over the answer; in brackets how often FreeKV's fits in it.",
            markdown(
                ("method", *(f"batch {batch}" for batch in batches)),
                [(method, *(_step(by.get((method, batch))) for batch in batches)) for method in methods],
            ),
        )
        prefill = {answer.batch: answer.prefill for answer in mine if answer.prefill is not None}
        if prefill:
            told = ", ".join(f"{seconds:.2f} s at batch {batch}" for batch, seconds in prefill.items())
            section.add(f"Prefill comes on top, counted as dense for all: {told}.")
        seconds = {method: {f"batch {b}": by[method, b].decoding for b in batches if (method, b) in by} for method in methods}
        section.picture(name, plots.groups, f"{name}: decoding of an answer", "seconds", seconds)
        split = [cell for cell in cells if cell[:3] == (name, SPLIT_BATCH, scenario.at[-1])]
        if split:
            _split(section, name, split)
    section.aims += _aims(answers, _limits(cells), section.shape)
    return section


def _step(answer: latency.Answer | None) -> str | None:
    return answer and f"{answer.step * 1e3:.2f}" + (f" ({answer.freekv:.2f})" if answer.freekv else "")


def _split(section: Section, name: str, cells: list[latency.Cell]) -> None:
    """Where the time of a step goes."""
    batch, context = cells[0].batch, cells[0].context
    section.add(
        f"Milliseconds of a step at batch {batch} and {context} tokens. Recall exposed is what the step is longer by than without its "
        "copies, hidden the rest of the link's time for them. The bound is the link's or the device memory's time for the bytes that the "
        "method moves at least.",
        markdown(
            ("method", "step", "compute", "select", "recall exposed", "recall hidden", "bound", "step / bound"),
            [(cell.method, *(ms(part) for part in (cell.seconds, *cell.parts)), cell.seconds / cell.parts.bound) for cell in cells],
        ),
    )
    for cell in (cell for cell in cells if cell.method == "freekv"):
        section.add(
            "The floor's step and, behind it, the link's time for what kv heads that turned wait for take "
            f"{ms(cell.serial)} ms together, {cell.serial / cell.seconds:.2f} of FreeKV's step."
        )
    fast = [cell for cell in cells if not cell.method.endswith("-copies")]  # the others would leave no room for these
    bars = {cell.method: [part * 1e3 for part in cell.parts[:4]] for cell in fast}
    marks = {cell.method: cell.parts.bound * 1e3 for cell in fast}
    names = ("compute", "select", "recall exposed", "recall hidden")
    section.picture(f"{name}-split", plots.stacks, f"{name}: a step at batch {batch}, {context} tokens", "milliseconds", names, bars, marks)


class Limits(NamedTuple):
    """What an answer by FreeKV cannot be shorter than, over what it took.

    Args:
        least: each step takes as long as its bytes, and as the floor's.
        serial: each step is the floor's and, behind it, the link's time for what kv heads that turned wait for.
    """

    least: float
    serial: float


def _limits(cells: list[latency.Cell]) -> dict[tuple[str, int], Limits]:
    """By scenario and batch."""
    steps: dict[tuple[str, int], dict[int, latency.Cell]] = {}
    for cell in cells:
        if cell.method == "freekv":
            steps.setdefault((cell.scenario, cell.batch), {})[cell.context] = cell
    limits = {}
    for (name, batch), mine in steps.items():
        decoding = SCENARIOS[name].decoding_seconds
        took = decoding({context: cell.seconds for context, cell in mine.items()})
        least = decoding({context: max(cell.floor, cell.parts.bound) for context, cell in mine.items()})
        serial = decoding({context: cell.serial for context, cell in mine.items()})
        limits[name, batch] = Limits(least / took, serial / took)
    return limits


def _aims(answers: list[latency.Answer], limits: dict[tuple[str, int], Limits], shape: str) -> list[Aim]:
    """None is held against a part of what it asks for."""
    by, aims = {answer[:3]: answer for answer in answers}, []
    few, many = ([batch for batch in BATCHES if sign * batch <= sign * bound] for sign, bound in ((1, 8), (-1, 4)))
    for name, scenario in SCENARIOS.items():
        mine = [by.get((name, batch, "freekv")) for batch in few]
        worst = at_bound = None
        if all(each and each.window for each in mine):
            worst = max(each.window for each in mine)
            at_bound = max(each.window * limits[each[:2]].serial for each in mine)
        what = f"{shape}: FreeKV / floor, {name} at tau {scenario.tau:g}, worst of batches up to 8"
        aims.append(Aim(what, worst, 1.15, False, at_bound))
    for method, aim in (("arkvale", 10), ("arkvale-copies", 10), ("infinigen", 5), ("infinigen-copies", 5), ("shadowkv", 5)):
        mine = [by.get(("long-generation", batch, method)) for batch in many]
        least = at_bound = None
        if all(each and each.freekv for each in mine):
            least = min(each.freekv for each in mine)
            at_bound = min(each.freekv / limits[each[:2]].least for each in mine)
        aims.append(Aim(f"{shape}: {method} / FreeKV, long generation, least of batches from 4", least, aim, True, at_bound))
    return aims
