"""Results of the crossover side by side: FreeKV's cell, and stock SGLang's by the faster of its backends."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks.paper.scenarios import SCENARIOS
from benchmarks.report import table

LONG = SCENARIOS["long-generation"]


class Compared(NamedTuple):
    """A cell by two systems, as far as both have it.

    Args:
        slower: the figures in which FreeKV is.
        among: the systems that FreeKV is held against here; theirs are the figures of the fastest.
        by: whose TPOT and TTFT theirs are, one name or two; empty where nobody's.
        tpot, ttft: seconds of ours and of theirs, and their ratio.
        tokens, decoding, at_once: output tokens per second over the whole pass, and while the most decode; and how many do.
    """

    name: str
    context: int
    batch: int
    prefix: str
    slower: str
    among: tuple[str, ...]
    by: str
    tpot: tuple[float | None, float | None, float | None]
    ttft: tuple[float | None, float | None, float | None]
    tokens: tuple[float | None, float | None]
    decoding: tuple[float | None, float | None]
    at_once: tuple[int | None, int | None]
    ours: dict
    theirs: dict

    @classmethod
    def of(cls, name: str, cell: dict, ours: dict, others: dict[str, dict]) -> Compared:
        theirs, by = fastest(others)
        pair = ours, theirs
        times = {
            "TPOT": _ratio(*map(_tpot, pair)),
            "TTFT": _ratio(*map(_ttft, pair)),
        }
        if {each.get("prefix") for each in pair} == {"hit", "cold"}:
            times["TTFT"] = (*times["TTFT"][:2], None)
        slower = "+".join(what for what, (*_, ratio) in times.items() if ratio and ratio > 1)
        prefix = "/".join(dict.fromkeys(each["prefix"] for each in pair if each))
        rates = (tuple(each.get(figure) for each in pair) for figure in ("tokens_per_s", "decoding_tokens_per_s", "at_once"))
        return cls(name, cell["context"], cell["batch"], prefix, slower, tuple(others), by, *times.values(), *rates, *pair)

    @property
    def tpot_span(self) -> tuple[float, float] | None:
        """Between what the ratio of TPOT lies, whichever passes of both sides are compared. None unless both have several."""
        sides = self.ours, self.theirs
        if not self.tpot[2] or min(len(side.get("passes", ())) for side in sides) < 2:
            return None
        (least, most), (their_least, their_most) = (side["spread"]["tpot_s"] for side in sides)
        return least / their_most, most / their_least

    @property
    def told_tpot(self) -> str | None:
        """The ratio of TPOT, with its span where it is known."""
        if self.tpot[2] is None:
            return None
        span = self.tpot_span
        return f"{self.tpot[2]:.2f}" + (f" ({span[0]:.2f}-{span[1]:.2f})" if span else "")

    def without_ttft_ratio(self) -> Compared:
        """For results of two machines: hosts differ by more than a half in it, but cards of one kind hardly in TPOT."""
        return self._replace(ttft=(*self.ttft[:2], None), slower="+".join(what for what in self.slower.split("+") if what != "TTFT"))


def fastest(others: dict[str, dict]) -> tuple[dict, str]:
    """The result with the least TPOT, but with the least TTFT of all; and the names of both."""
    if not others:
        return {}, ""
    names = [min(others, key=lambda name: figure(others[name]) or math.inf) for figure in (_tpot, _ttft)]
    theirs = others[names[0]]
    if _ttft(others[names[1]]):
        theirs = theirs | {"ttft_s": others[names[1]]["ttft_s"]}
    return theirs, ", ".join(dict.fromkeys(names))


def _tpot(result: dict) -> float | None:
    return result.get("tpot_s")


def _ttft(result: dict) -> float | None:
    return result.get("ttft_s", {}).get("median")


def _ratio(ours: float | None, theirs: float | None) -> tuple[float | None, float | None, float | None]:
    return ours, theirs, ours / theirs if ours and theirs else None


def compared(results: dict, ours: str, *theirs: str) -> list[Compared]:
    """Cell by cell; those first in which FreeKV is slower. A cell of ours stands beside those of its own run where it has any: another
    run's machine may be faster."""
    cells = {key.split("/", 1)[1]: result["cell"] for key, result in results.items() if key.split("/")[0] in (ours, *theirs)}
    rows = []
    for name, cell in cells.items():
        others = {system: found for system in theirs if (found := results.get(f"{system}/{name}"))}
        mine = results.get(f"{ours}/{name}", {})
        beside = {system: found for system, found in others.items() if mine and found.get("run") == mine.get("run")}
        row = Compared.of(name, cell, mine, beside or others)
        if "load" in mine and row.theirs.get("run", mine["run"]) != mine["run"]:
            row = row.without_ttft_ratio()
        rows.append(row)
    return sorted(rows, key=lambda row: (not row.slower, row.context, -row.batch))


def comparison(results: dict, title: str, ours: str, *theirs: str) -> str:
    rows = []
    for row in compared(results, ours, *theirs):
        tpot, retracted = [value and value * 1e3 for value in row.tpot[:2]], [each.get("retractions") for each in (row.ours, row.theirs)]
        named = row.name, row.slower or None, row.prefix
        rows.append(
            (
                *named,
                *tpot,
                row.told_tpot if row.tpot_span else row.tpot[2],
                *row.ttft,
                *row.tokens,
                *row.decoding,
                *row.at_once,
                *retracted,
                row.by or None,
            )
        )
    twos = [f"{what}{which}" for what in ("tokens/s", "decoding", "at once", "retracted") for which in ("", ", stock")]
    return table((title, "slower in", "prefix", "TPOT ms", "stock", "ratio", "TTFT s", "stock", "ratio", *twos, "by"), rows)


def long_generation(results: dict, ours: str, *theirs: str) -> list[tuple[int, str, float, float, float]]:
    """Batch, lengths, seconds of a step of ours and theirs in the mean of ``LONG``'s answer, and their ratio.

    Steps were timed at some lengths up to the answer's end and are joined by straight lines: no answer of that length was generated.
    """
    steps: dict[int, dict[int, tuple[float, float]]] = {}
    for row in compared(results, ours, *theirs):
        if row.tpot[2] and row.context <= LONG.prompt + LONG.answer and row.at_once == (row.batch, row.batch):
            steps.setdefault(row.batch, {})[row.context] = row.tpot[:2]
    rows = []
    for batch, at in sorted(steps.items()):
        if len(at) < 2:
            continue
        means = [LONG.decoding_seconds({length: pair[side] for length, pair in at.items()}) / (LONG.answer - 1) for side in (0, 1)]
        rows.append((batch, ", ".join(f"{length // 1024}K" for length in sorted(at)), *means, means[0] / means[1]))
    return rows


def long_answers(results: dict, title: str, ours: str, *theirs: str) -> str:
    rows = [(*row[:2], *(1e3 * seconds for seconds in row[2:4]), row[4]) for row in long_generation(results, ours, *theirs)]
    told = f"{title}: {LONG.prompt} in, {LONG.answer} out, batch"
    return table((told, "steps timed at", "ms a step", "stock", "ratio"), rows) if rows else ""
