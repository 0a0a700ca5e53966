"""Figure 7: whole answers by method, and where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.paper import latency, plots
from benchmarks.paper.scenarios import BATCHES, SCENARIOS
from benchmarks.report import markdown

from .names import METHODS
from .names import SCENARIOS as TITLES
from .section import Aim, Section, ms

SPLIT_BATCH = 8  # whose steps are split in the tables and pictures
OURS = METHODS["freekv"]


def of_latency(path: Path, directory: Path) -> Section:
    """Figure 7 of a shape."""
    section = Section.of("Whole answers by method", path, directory)
    answers, cells = latency.answers(section.results), latency.cells(section.results, section.written["runs"])
    limits = _limits(cells)
    section.facts |= {"answers": answers, "methods": " with earlier code" * section.is_earlier}
    for name, scenario in SCENARIOS.items():
        mine = [answer for answer in answers if answer.scenario == name]
        if mine:
            _whole(section, name, mine)
            split = [cell for cell in cells if cell[:3] == (name, SPLIT_BATCH, scenario.at[-1])]
            if split:
                _split(section, name, split)
    _over_window(section, answers, cells, limits)
    section.aims += _aims(answers, limits, section.shape)
    return section


def _whole(section: Section, name: str, answers: list[latency.Answer]) -> None:
    """A scenario's answers, method by method and batch by batch."""
    scenario = SCENARIOS[name]
    batches, methods = (list(dict.fromkeys(getattr(each, what) for each in answers)) for what in ("batch", "method"))
    by = {(answer.method, answer.batch): answer for answer in answers}
    section.add(
        f"### {TITLES[name]}",
        f"{scenario.prompt:,} tokens in, {scenario.answer:,} out, at tau {scenario.tau:g}.{_load(section, name)}{_prefill(answers)}",
        markdown(
            ("method", *(f"batch {batch}" for batch in batches)),
            [(METHODS[method], *(_step(by.get((method, batch))) for batch in batches)) for method in methods],
        ),
    )
    seconds = {
        f"batch {batch}": {
            METHODS[method]: by[method, batch].step * 1e3
            for method in methods
            if (method, batch) in by and method not in latency.BY_HOST  # which would leave no room for the others
        }
        for batch in batches
    }
    section.picture(name, plots.bars, f"{section.shape}, {TITLES[name].lower()}: a decode step", "ms", seconds, OURS)


def _load(section: Section, name: str) -> str:
    """The shares that were replayed, as the results of FreeKV have them."""
    mine = [result for key, result in section.results.items() if key.startswith(f"{name}/") and key.split("/")[2] == "freekv"]
    if not all("missed" in result for result in mine):
        return ""
    corrected = sorted({result["corrected"] for result in mine})
    missed = dict(sorted({(result["context"], round(result["missed"], 3)) for result in mine}))
    told = ", ".join(f"{share:g} at {context:,}" for context, share in missed.items())
    return f" Replayed: c {' and '.join(f'{share:g}' for share in corrected)}; x {told} tokens."


def _prefill(answers: list[latency.Answer]) -> str:
    seconds = {answer.batch: answer.prefill for answer in answers if answer.prefill is not None}
    told = ", ".join(f"{each:.2f} s at batch {batch}" for batch, each in seconds.items())
    return f" Prefill takes {told}." if seconds else ""


def _step(answer: latency.Answer | None) -> str | None:
    if answer is None or not answer.freekv:
        return answer and f"{answer.step * 1e3:.2f}"
    whole = "-" if answer.freekv_whole is None else f"{answer.freekv_whole:.2f}"
    return f"{answer.step * 1e3:.2f} ({answer.freekv:.2f} / {whole})"


def _split(section: Section, name: str, cells: list[latency.Cell]) -> None:
    """Where the time of a step goes."""
    batch, context = cells[0].batch, cells[0].context
    section.add(
        f"One step at batch {batch} and {context:,} tokens, in milliseconds:",
        markdown(
            ("method", "step", "compute", "select", "recall exposed", "recall hidden", "least time", "step / least time"),
            [(METHODS[cell.method], *map(ms, (cell.seconds, *cell.parts)), cell.seconds / cell.parts.bound) for cell in cells],
        ),
    )
    for cell in (cell for cell in cells if cell.method == "freekv"):
        section.add(
            f"A window alone, followed by the recall that corrected kv heads wait for, takes {ms(cell.serial)} ms. "
            f"That is {cell.serial / cell.seconds:.2f} of FreeKV's step."
        )
    fast = [cell for cell in cells if cell.method not in latency.BY_HOST]
    bars = {METHODS[cell.method]: [part * 1e3 for part in cell.parts[:4]] for cell in fast}
    marks = {METHODS[cell.method]: cell.parts.bound * 1e3 for cell in fast}
    names = ("compute", "select", "recall exposed", "recall hidden")
    title = f"{section.shape}, {TITLES[name].lower()}: one step at batch {batch} and {context:,} tokens"
    section.picture(f"{name}-split", plots.stacks, title, "ms", names, bars, marks, OURS)


class Limits(NamedTuple):
    """What an answer by FreeKV cannot be shorter than, over what it took.

    Args:
        least: each step takes as long as its bytes, and as a window alone.
        serial: each step is a window's and, behind it, the link's time for what corrected kv heads wait for.
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
        least = decoding({context: max(cell.window, cell.parts.bound) for context, cell in mine.items()})
        serial = decoding({context: cell.serial for context, cell in mine.items()})
        limits[name, batch] = Limits(least / took, serial / took)
    return limits


def _over_window(section: Section, answers: list[latency.Answer], cells: list[latency.Cell], limits: dict[tuple[str, int], Limits]) -> None:
    """What retrieval adds to a window alone, at every batch that was measured."""
    ours = {answer[:2]: answer for answer in answers if answer.method == "freekv" and answer.window}
    batches = list(dict.fromkeys(batch for _, batch in ours))
    if not ours:
        return
    names = [name for name in SCENARIOS if any((name, batch) in ours for batch in batches)]
    rows = [(TITLES[name], *(_beside(ours.get((name, batch)), limits) for batch in batches)) for name in names]
    section.add(
        f"### FreeKV beside a window alone: {section.shape}",
        "The aims cover batches up to 8. " + _above(cells, batches[-1]),
        markdown(("answer", *(f"batch {batch}" for batch in batches)), rows),
    )


def _above(cells: list[latency.Cell], batch: int) -> str:
    """What the largest batch is held up by."""
    mine = [cell for cell in cells if (cell.method, cell.batch) == ("freekv", batch) and cell.context == SCENARIOS[cell.scenario].at[-1]]
    if not mine:
        return ""
    link, window = max(cell.link for cell in mine), min(cell.window for cell in mine)
    told = "Recall cannot hide behind that" if link > window else "Recall can hide behind that, but for corrected kv heads"
    return f"At batch {batch} the link is busy for up to {ms(link)} ms of a step, and a window's step takes {ms(window)} ms. {told}."


def _beside(answer: latency.Answer | None, limits: dict[tuple[str, int], Limits]) -> str | None:
    return answer and f"{answer.window:.2f} ({answer.window * max(limits[answer[:2]]):.2f})"


def _aims(answers: list[latency.Answer], limits: dict[tuple[str, int], Limits], shape: str) -> list[Aim]:
    """None is held against a part of what it asks for."""
    by, aims = {answer[:3]: answer for answer in answers}, []
    few, many = ([batch for batch in BATCHES if sign * batch <= sign * bound] for sign, bound in ((1, 8), (-1, 4)))
    for name, scenario in SCENARIOS.items():
        mine = [by.get((name, batch, "freekv")) for batch in few]
        worst = possible = None
        if all(each and each.window for each in mine):
            worst = max(each.window for each in mine)
            possible = max(each.window * limits[each[:2]].serial for each in mine)
        what = f"{shape}: FreeKV / a window alone, {name} at tau {scenario.tau:g}, worst of batches up to 8"
        aims.append(Aim(what, worst, 1.15, False, possible))
    for method, aim in (("arkvale", 10), ("infinigen", 5), ("shadowkv", 5)):  # in this engine, so that the same work is compared
        mine = [by.get(("long-generation", batch, method)) for batch in many]
        least = possible = None
        if all(each and each.freekv for each in mine):
            least = min(each.freekv for each in mine)
            possible = min(each.freekv / limits[each[:2]].least for each in mine)
        aims.append(Aim(f"{shape}: {METHODS[method]} / FreeKV, long generation, least of batches from 4", least, aim, True, possible))
    return aims
