"""Figure 7: whole answers by method, and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path

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
    section.aims += _aims(answers, _shares_of_bound(cells), section.shape)
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
    fast = [cell for cell in cells if not cell.method.endswith("-copies")]  # the others would leave no room for these
    bars = {cell.method: [part * 1e3 for part in cell.parts[:4]] for cell in fast}
    marks = {cell.method: cell.parts.bound * 1e3 for cell in fast}
    names = ("compute", "select", "recall exposed", "recall hidden")
    section.picture(f"{name}-split", plots.stacks, f"{name}: a step at batch {batch}, {context} tokens", "milliseconds", names, bars, marks)


def _shares_of_bound(cells: list[latency.Cell]) -> dict[tuple[str, int], float]:
    """Of an answer by FreeKV, by scenario and batch: what its bytes take at least over what it took."""
    steps: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for cell in cells:
        if cell.method == "freekv":
            steps.setdefault((cell.scenario, cell.batch), {})[cell.context] = (cell.parts.bound, cell.seconds)
    shares = {}
    for (scenario, batch), mine in steps.items():
        bound, took = (SCENARIOS[scenario].decoding_seconds({context: pair[which] for context, pair in mine.items()}) for which in (0, 1))
        shares[scenario, batch] = bound / took
    return shares


def _aims(answers: list[latency.Answer], shares: dict[tuple[str, int], float], shape: str) -> list[Aim]:
    """None is held against a part of what it asks for."""
    by = {answer[:3]: answer for answer in answers}
    few, many = ([batch for batch in BATCHES if sign * batch <= sign * bound] for sign, bound in ((1, 8), (-1, 4)))
    floor = [by.get((scenario, batch, "freekv")) for scenario in SCENARIOS for batch in few]
    worst = at_bound = None
    if all(each and each.window for each in floor):
        worst = max(each.window for each in floor)
        at_bound = max(each.window * shares[each[:2]] for each in floor)
    aims = [Aim(f"{shape}: FreeKV / floor, worst of batches up to 8", worst, 1.15, False, at_bound)]
    for method, aim in (("arkvale", 10), ("arkvale-copies", 10), ("infinigen", 5), ("infinigen-copies", 5), ("shadowkv", 5)):
        mine = [by.get(("long-generation", batch, method)) for batch in many]
        least = at_bound = None
        if all(each and each.freekv for each in mine):
            least = min(each.freekv for each in mine)
            at_bound = min(each.freekv / shares[each[:2]] for each in mine)
        aims.append(Aim(f"{shape}: {method} / FreeKV, long generation, least of batches from 4", least, aim, True, at_bound))
    return aims
