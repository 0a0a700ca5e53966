"""From which batch and context on FreeKV pays."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper import crossover, plots
from benchmarks.paper.parts import bound_of
from benchmarks.report import markdown
from benchmarks.setups import Setup
from sglang_freekv.config import GIB

from .section import Aim, Section, ms

AT = 32768  # tokens, of the aim for the same KV bytes
PRODUCTION = "production"
TOLD = {
    PRODUCTION: "Both servers take the memory that they want.",
    "same KV bytes on the device": "All pools of KV on the device take {ours:.2f} GiB for FreeKV and {theirs:.2f} GiB for stock SGLang. "
    "Where one server runs fewer requests at once, its TPOT is shorter for that reason: compare *decoding*.",
}
HEADER = ("cell", "slower in", "prefix", "TPOT, ms", "ratio", "TTFT, s", "ratio", "tokens/s", "decoding", "at once", "TPOT / least time")


def of_crossover(path: Path, directory: Path) -> Section:
    section = Section.of("Against stock SGLang", path, directory)
    section.add(
        "A cell is a context and a number of distinct random prompts that are sent at once. Figures are FreeKV's / stock SGLang's. Cells "
        "in which FreeKV is slower come first. TPOT and *decoding*, in tokens per second, are taken while the most requests decode "
        "at once. TTFT is the median of a cell. *Tokens/s* counts the whole cell, with prefill and waiting."
    )
    for title, pair in crossover.PAIRS.items():
        rows = crossover.compared(section.results, *pair)
        if not rows:
            continue
        held = {who: max(getattr(row, who).get("device_kv_bytes", 0) for row in rows) / GIB for who in ("ours", "theirs")}
        told = TOLD[title].format(**held) + _no_room(section, pair[1], rows)
        section.add(f"### {title[0].upper()}{title[1:]}", told, _table(section, rows))
        what, unit = ("time per token", "ms") if title == PRODUCTION else ("decoding together", "tokens per second")
        drawn, lines = f"{section.shape}, {title}: {what}", _curves(rows, title)
        section.picture(title.split()[0], plots.curves, drawn, "requests sent at once", unit, lines, "FreeKV", doubling=True)
        section.aims += _aims(section, title, rows)
        section.facts |= _facts(title, rows, held["theirs"])
    return section


def _table(section: Section, rows: list[crossover.Compared]) -> str:
    lines = []
    for row in rows:
        tpot = _both(value and ms(value) for value in row.tpot[:2]), _two(row.tpot[2])
        ttft = _both(_two(value) for value in row.ttft[:2]), _two(row.ttft[2])
        rates = [_both(value and f"{value:.0f}" for value in pair) for pair in (row.tokens, row.decoding, row.at_once)]
        over = _both(_two(_over_least(section, side)) for side in (row.ours, row.theirs))
        lines.append((row.name, row.slower or None, row.prefix, *tpot, *ttft, *rates, over))
    return markdown(HEADER, lines)


def _both(pair) -> str:
    return " / ".join("-" if value is None else str(value) for value in pair)


def _no_room(section: Section, system: str, rows: list[crossover.Compared]) -> str:
    """By how few tokens a prompt does not fit the pool of stock SGLang."""
    refused = [row for row in rows if row.theirs.get("prefix") == "no room" and row.batch == 1]
    pools = [section.written["runs"][row.theirs["run"]].get(f"server {system}", {}).get("max_total_num_tokens") for row in refused]
    if not refused or None in pools:
        return ""
    tokens = max(row.ours.get("new_tokens", 0) or _new_tokens(section, system) for row in refused)
    context, pool = refused[0].context, pools[0]
    needed = context + tokens + Setup.page_size
    return (
        f" Stock SGLang's pool holds {pool:,} tokens. One prompt of {context:,} with {tokens} new tokens and a page needs "
        f"{needed - pool} more, so its cells of that context say *no room*. A pool larger by that much would serve one such request at "
        "a time."
    )


def _new_tokens(section: Section, system: str) -> int:
    return max((result.get("new_tokens", 0) for key, result in section.results.items() if key.startswith(f"{system}/")), default=0)


def _over_least(section: Section, result: dict) -> float | None:
    """TPOT over the least time that the bytes of a step allow."""
    if "tpot_s" not in result:
        return None
    moved = {"link": result["link_bytes"], "device": result["hbm_bytes"], "weights": 0}  # these are in the device's
    return result["tpot_s"] / bound_of(moved, section.ceilings(result))


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _curves(rows: list[crossover.Compared], title: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By batch, for each context and system: TPOT, or the rate where fewer requests fit one system than the other; the cold request
    alone is no point of it."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.context, row.batch)):
        figures = [seconds and seconds * 1e3 for seconds in row.tpot[:2]] if title == PRODUCTION else row.decoding
        for who, figure in zip(("FreeKV", "stock SGLang"), figures):
            if figure and not row.name.endswith("-cold"):
                curves.setdefault((who, f"{row.context // 1024}K"), []).append((row.batch, figure))
    return curves


def _facts(title: str, rows: list[crossover.Compared], held: float) -> dict:
    if title != PRODUCTION:
        return {"held": held, "evicted": [row.ttft[2] for row in rows if row.prefix == "hit/part" and row.ttft[2]]}
    alone = {row.context: row.tpot[2] for row in rows if row.batch == 1 and row.tpot[2]}
    hits = [row.ttft[2] for row in rows if row.prefix == "hit" and row.ttft[2]]
    slowest = max((row for row in rows if row.tpot[2]), key=lambda row: row.tpot[2], default=None)
    return {"alone": alone, "hits": hits, "slowest": slowest}


def _aims(section: Section, title: str, rows: list[crossover.Compared]) -> list[Aim]:
    shape = section.shape
    if title == PRODUCTION:
        alone = [row for row in rows if row.batch == 1 and row.tpot[2]]
        what = f"{shape}: TPOT / stock SGLang's at batch 1, worst of the contexts"
        worst = max((row.tpot[2] for row in alone), default=None)
        return [Aim(what, worst, 1.05, False, max((row.tpot[2] / _over_least(section, row.ours) for row in alone), default=None))]
    aims = []
    for what, told in (("decoding", "while decoding"), ("tokens", "with prefill")):
        at = [row for row in rows if row.context == AT and (what == "decoding" or row.prefix == "cold")]
        ours, theirs = ([(rate, row) for row in at if (rate := getattr(row, what)[side])] for side in (0, 1))
        ratio = possible = None
        if ours and theirs:
            stock = max(rate for rate, _ in theirs)
            ratio = max(rate for rate, _ in ours) / stock
            possible = max(rate * _sooner(section, row, what) for rate, row in ours) / stock
        aims.append(Aim(f"{shape}: tokens/s / stock SGLang's at 32K on the same KV bytes, {told}", ratio, 5, True, possible))
        section.facts[what] = ratio
    return aims


def _sooner(section: Section, row: crossover.Compared, what: str) -> float:
    """How many times the tokens per second there would be if a step took its least time; prefill takes what it took."""
    over = _over_least(section, row.ours)
    if what == "decoding":
        return over
    took = row.ours["at_once"] / row.ours["tokens_per_s"]  # seconds for a token of each
    return took / (took - row.ours["tpot_s"] * (1 - 1 / over))
