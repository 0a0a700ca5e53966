"""Figures of speed: FreeKV's 1 on the right, 7 and 8, and LouisKV's 7."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.paper import ablation, latency
from benchmarks.paper.scenarios import BATCHES
from benchmarks.paper.scenarios import SCENARIOS as ASKED
from benchmarks.paper.sections.names import ABLATION, METHODS, SCENARIOS, SHAPES
from benchmarks.report import markdown

from .published import BATCH_4, FACTORS, GAINS, LOUISKV_FACTORS, LOUISKV_SHARES, MACHINES, SHARES, Number

COPIES = "-copies"
FIGURE_1 = ("full", "arkvale", "arkvale-copies", "shadowkv", "infinigen", "infinigen-copies", "freekv")
FIGURE_7 = ("full", "raas", "razor", "quest", "arkvale", "arkvale-copies", "shadowkv", "freekv")
FIGURE_7_LOUISKV = ("full", "arkvale", "arkvale-copies", "louiskv")
STACK = ("base", *(f"+{name}" for name in ablation.ORDER[: ablation.ORDER.index("graph") + 1]))
AHEAD = "-speculation"
SPLIT_BATCH = 8


class Speed:
    """What a shape's latency file says: answers by scenario, batch and method, and steps with the context before the method."""

    def __init__(self, results: Path, shape: str) -> None:
        written = json.loads((results / f"paper-latency-{shape}.json").read_text())
        self.answers = {answer[:3]: answer for answer in latency.answers(written["results"])}
        self.cells = {cell[:4]: cell for cell in latency.cells(written["results"], written["runs"])}
        self.runs = [written["runs"][number] for number in sorted({result["run"] for result in written["results"].values()})]

    def seconds(self, scenario: str, batch: int, method: str) -> float | None:
        """Of a batch of answers, prompts included."""
        answer = self.answers.get((scenario, batch, method))
        return None if answer is None or answer.prefill is None else answer.prefill + answer.decoding

    def factor(self, scenario: str, batch: int, method: str, over: str) -> float | None:
        mine, other = self.seconds(scenario, batch, method), self.seconds(scenario, batch, over)
        return None if mine is None or other is None else mine / other

    def like(self, told: Number, scenario: str, method: str, over: str) -> float | None:
        """The factor at the batch that a paper names, or the most of all batches."""
        batches = (4,) if told.at == BATCH_4 else BATCHES
        return max(filter(None, (self.factor(scenario, batch, method, over) for batch in batches)), default=None)


@cache
def speed(results: Path, shape: str) -> Speed:
    return Speed(results, shape)


def _pairs(results: Path, published: dict[tuple[str, str, str], Number], over: str) -> dict[tuple[str, str, str], list[float | None]]:
    """In one engine and with host copies, beside each published factor."""
    return {
        key: [speed(results, key[0]).like(told, key[1], method, over) for method in (key[2], key[2] + COPIES)]
        for key, told in published.items()
    }


def factors(results: Path, published: dict[tuple[str, str, str], Number], over: str) -> str:
    rows = [
        (f"{METHODS[key[2]]} / {METHODS[over]}", SHAPES[key[0]], SCENARIOS[key[1]].lower(), published[key].shown(), *map(_times, ours))
        for key, ours in _pairs(results, published, over).items()
    ]
    return markdown(("latency of", "model", "scenario", "published", "one engine", "host copies"), rows, words=4)


def reached(results: Path) -> str:
    """How many of the published factors ours come up to."""
    found = [
        (key[2], published[key].value, *both)
        for published, over in ((FACTORS, "freekv"), (LOUISKV_FACTORS, "louiskv"))
        for key, both in _pairs(results, published, over).items()
    ]

    def count(ours: int, *methods: str) -> str:
        those = [row[ours] >= row[1] for row in found if row[0] in methods and row[ours]]
        return f"{sum(those)} of {len(those)}"

    between = [one < told < copies for method, told, one, copies in found if method == "arkvale"]
    return (
        f"In one engine ours come up to {count(2, 'arkvale')} published factors over ArkVale, {count(2, 'shadowkv')} over ShadowKV and "
        f"{count(2, 'infinigen')} over InfiniGen. With host copies they come up to {count(3, 'arkvale', 'infinigen')}. Over ArkVale the "
        f"published factor lies between our two in {sum(between)} of {len(between)} cases."
    )


def whole_answers(results: Path, shape: str, scenarios: Sequence[str], methods: Sequence[str]) -> str:
    """Seconds of a batch of answers, and in brackets how many times those of the last method."""
    mine, last, where = speed(results, shape), methods[-1], [(name, batch) for name in scenarios for batch in BATCHES]
    rows = [(METHODS[method], *(_answer(mine.seconds(*at, method), mine.factor(*at, method, last)) for at in where)) for method in methods]
    several = len(scenarios) > 1
    heads = (f"{name.removeprefix('long-')}, {batch}" if several else f"batch {batch}" for name, batch in where)
    return markdown((SHAPES[shape], *heads), rows)


def _answer(seconds: float | None, factor: float | None) -> str | None:
    return None if seconds is None or factor is None else f"{seconds:.{int(seconds < 100)}f} ({factor:.2f})"


def parts(results: Path, shape: str, where: tuple[str, int, int], methods: Sequence[str], told: dict[str, Number]) -> list[tuple]:
    """Rows of a step's milliseconds, shares of retrieval, and the published share."""
    rows = []
    for method in methods:
        cell = speed(results, shape).cells[(*where, method)]
        split = (f"{part * 1e3:.2f}" for part in (cell.seconds, *cell.parts[:3]))
        shares = (f"{part / cell.seconds:.0%}" for part in (cell.parts.select + cell.parts.exposed, cell.parts.exposed))
        rows.append((METHODS[method], *split, *shares, told[method].shown(".0%") if method in told else "-"))
    return rows


PARTS = ("step", "compute", "select", "recall", "select and recall", "recall alone", "published")


def breakdown(results: Path) -> str:
    return markdown(("method", *PARTS), parts(results, "llama-3.1-8b", ("long-input", 1, 32768), FIGURE_1, SHARES))


def breakdown_of_louiskv(results: Path) -> str:
    rows = [
        (f"{SHAPES[shape]}, {context // 1024}K", *row)
        for shape, name, _ in LOUISKV_FACTORS
        for context in ASKED[name].at[-1:]
        for row in parts(results, shape, (name, SPLIT_BATCH, context), FIGURE_7_LOUISKV[1:], LOUISKV_SHARES)
    ]
    return markdown(("step", "method", *PARTS), rows, words=2)


def ablated(results: Path) -> str:
    """The paper's parts, then ours, and last what selection ahead is worth to the whole."""
    written = json.loads((results / "paper-ablation-llama-3.1-8b.json").read_text())
    seconds = {(row.system, row.batch): row.seconds for row in ablation.rows(written["results"], written["runs"])}
    batches = sorted({batch for _, batch in seconds})
    rows = []
    for before, system in (*zip((None, *STACK), STACK), (AHEAD, ablation.WHOLE)):
        gains = [seconds[before, batch] / seconds[system, batch] for batch in batches] if before else []
        label, shown = (ABLATION[AHEAD], GAINS["+speculation"]) if before == AHEAD else (ABLATION[system], GAINS.get(system))
        times = (f"{seconds[AHEAD if before == AHEAD else system, batch] * 1e3:.1f}" for batch in batches)
        rows.append((label, *times, " / ".join(map(_times, gains)) or "-", shown and shown.shown()))
    return markdown(("system", *(f"batch {batch}, ms" for batch in batches), "gain", "published gain"), rows)


def machine(results: Path, shapes: Iterable[str]) -> str:
    runs = [run for shape in shapes for run in speed(results, shape).runs]
    link = median(run["ceilings"]["to_device"] for run in runs)
    rows = [*MACHINES, ("here", ", ".join(dict.fromkeys(run["device"] for run in runs)), f"{link / 1e9:.0f} GB/s in copies")]
    return markdown(("figures of speed", "GPU", "link from the host"), rows, words=3)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
