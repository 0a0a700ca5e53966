"""From which batch and context on FreeKV pays."""

from __future__ import annotations

from pathlib import Path

from paper import crossover, plots
from paper.parts import bound_of
from report import markdown
from sglang_freekv.config import GIB

from .section import Aim, Section, ms

AT = 32768  # tokens, of the aim for the same KV bytes
TOLD = {
    "production": "Both take what memory they want.",
    "same KV bytes on the device": "All pools of KV on the device take {ours:.2f} GiB (FreeKV) and {theirs:.2f} GiB (stock SGLang).",
}
HEADER = ("cell", "slower in", "prefix", "TPOT ms", "stock", "ratio", "TPOT / bound", "stock", "TTFT s", "stock", "ratio")
RATES = ("tokens/s", "stock", "while decoding", "stock", "at once", "stock")


def of_crossover(path: Path, directory: Path) -> Section:
    section = Section.of("Against stock SGLang, by context and batch", path, directory)
    section.add(
        "The cells in which FreeKV is slower come first. Distinct random prompts are sent at once. TPOT is of the window in which the most "
        "requests decode, TTFT the median of a cell, tokens/s over the whole of it, prefill and waiting included. `hit`: the prompts were "
        "in the prefix tree. The bound is the link's or the device memory's time for the bytes that a step moves at least.",
    )
    for title, pair in crossover.PAIRS.items():
        rows = crossover.compared(section.results, *pair)
        if not rows:
            continue
        held = {who: max(getattr(row, who).get("device_kv_bytes", 0) for row in rows) / GIB for who in ("ours", "theirs")}
        section.add(f"### {title[0].upper()}{title[1:]}", TOLD[title].format(**held), _table(section, rows))
        section.picture(title.split()[0], plots.curves, f"{section.shape}, {title}", "batch", "ms a token", _curves(rows))
        section.aims += _aims(section, title, rows)
    return section


def _table(section: Section, rows: list[crossover.Compared]) -> str:
    lines = []
    for row in rows:
        tpot = [value and ms(value) for value in row.tpot[:2]] + [_two(row.tpot[2])]
        bounds = [_two(_over_bound(section, side)) for side in (row.ours, row.theirs)]
        ttft = [_two(value) for value in row.ttft]
        rates = [value and f"{value:.0f}" for value in (*row.tokens, *row.decoding)]
        lines.append((row.name, row.slower or None, row.prefix, *tpot, *bounds, *ttft, *rates, *row.at_once))
    return markdown((*HEADER, *RATES), lines)


def _over_bound(section: Section, result: dict) -> float | None:
    if "tpot_s" not in result:
        return None
    moved = {"link": result["link_bytes"], "device": result["hbm_bytes"], "weights": 0}  # these are in the device's
    return result["tpot_s"] / bound_of(moved, section.ceilings(result))


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _curves(rows: list[crossover.Compared]) -> dict[str, list[tuple[float, float]]]:
    """TPOT by batch, of each context and system; the cold request alone is no point of it."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.context, row.batch)):
        for who, seconds in zip(("FreeKV", "stock"), row.tpot):
            if seconds and not row.name.endswith("-cold"):
                curves.setdefault(f"{row.context // 1024}K, {who}", []).append((row.batch, seconds * 1e3))
    return curves


def _aims(section: Section, title: str, rows: list[crossover.Compared]) -> list[Aim]:
    shape = section.shape
    if title == "production":
        alone = [row for row in rows if row.batch == 1 and row.tpot[2]]
        what = f"{shape}: TPOT / stock SGLang's at batch 1, worst of the contexts"
        worst = max((row.tpot[2] for row in alone), default=None)
        return [Aim(what, worst, 1.05, False, max((row.tpot[2] / _over_bound(section, row.ours) for row in alone), default=None))]
    aims = []
    for what, told in (("decoding", "while decoding"), ("tokens", "with prefill")):
        at = [row for row in rows if row.context == AT and (what == "decoding" or row.prefix == "cold")]
        ours, theirs = ([(rate, row) for row in at if (rate := getattr(row, what)[side])] for side in (0, 1))
        ratio = at_bound = None
        if ours and theirs:
            stock = max(rate for rate, _ in theirs)
            ratio = max(rate for rate, _ in ours) / stock
            at_bound = max(rate * _sooner(section, row, what) for rate, row in ours) / stock
        aims.append(Aim(f"{shape}: tokens/s / stock SGLang's at 32K on the same KV bytes, {told}", ratio, 5, True, at_bound))
    return aims


def _sooner(section: Section, row: crossover.Compared, what: str) -> float:
    """How many times the tokens per second there would be if a step took what its bytes take at least; prefill takes what it took."""
    over = _over_bound(section, row.ours)
    if what == "decoding":
        return over
    took = row.ours["at_once"] / row.ours["tokens_per_s"]  # seconds for a token of each
    return took / (took - row.ours["tpot_s"] * (1 - 1 / over))
