"""From which batch and context on FreeKV pays."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.paper import crossover, plots
from benchmarks.paper.comparison import LONG, Compared, compared, long_generation
from benchmarks.paper.parts import bound_of
from benchmarks.report import markdown
from sglang_freekv.config import GIB

from .names import ABOUT
from .section import Aim, Section, ms
from .told import DEFAULT, DRAWN, KEPT, PRODUCTION, RESIDENT, SAME, above, backends_of, in_8_bits, where_of

AT, SHORT = 32768, 8192  # tokens, of the aims for the same KV bytes, and for many short contexts
BY_MEMORY = SAME, KEPT[0]  # titles of what the takeaways tell of the same KV bytes; the last one that was measured counts
VERY_LONG = 524288  # tokens, of contexts that a section's title tells of
HEADER = ("cell", "slower in", "prefix", "TPOT, ms", "ratio", "TTFT, s", "ratio", "tokens/s", "decoding", "at once", "TPOT / least time")
LONGER = (
    f"A step of an answer of {LONG.answer:,} tokens to a prompt of {LONG.prompt}, in the mean. Steps were timed at some lengths, and are "
    "joined by straight lines; beyond the lengths they are taken to be level. No answer of that length was generated."
)


def of_crossover(path: Path, directory: Path) -> Section:
    section = Section.of("Against stock SGLang", path, directory)
    section.figure += f", on {section.devices(section.results.values())}{in_8_bits(section)}"
    shortest = min(result["cell"]["context"] for result in section.results.values())
    section.figure += f", from {shortest // 1024}K on" if shortest >= VERY_LONG else ""
    section.add(
        "A cell is a context and a number of distinct random prompts that are sent at once. Figures are FreeKV's / stock SGLang's. Cells "
        "in which FreeKV is slower come first. TPOT and *decoding*, in tokens per second, are taken while the most requests decode "
        "at once. TTFT is the median of a cell, whose prompts were sent once if nothing else is said. *Tokens/s* counts the whole cell, with prefill and waiting."
    )
    if about := ABOUT.get(section.key) or ABOUT.get(section.shape_key or ""):
        section.add(about)
    for title, pair in crossover.PAIRS.items():
        rows = [row for row in compared(section.results, *pair) if _is_shown(title, row)]
        if not rows:
            continue
        held = {who: max(getattr(row, who).get("device_kv_bytes", 0) for row in rows) / GIB for who in ("ours", "theirs")}
        where = where_of(section, rows)
        section.add(f"### {title[0].upper()}{title[1:]}, {where}", above(section, title, pair, rows, held), _table(section, rows))
        longer = _longer(section, pair) if title in RESIDENT else []
        if longer:
            section.add(LONGER, _long_table(longer))
        if title in DRAWN:
            what, unit = ("decoding together", "tokens per second") if title == SAME else ("time per token", "ms")
            drawn, lines = f"{section.shape}, {title}, {where}: {what}", _curves(rows, title)
            if any(row.theirs for row in rows):
                section.picture(DRAWN[title], plots.curves, drawn, "requests sent at once", unit, lines, "FreeKV", doubling=True)
            if title != SAME and any(row.tpot[2] for row in rows):
                told = {"earlier": section.is_earlier, "longer": {batch: ratio for batch, *_, ratio in longer}}
                bits = in_8_bits(section).strip(", ")
                section.facts.setdefault("servers", {})[title] = _server(title, rows, where, bits) | told
        if title in BY_MEMORY:
            section.facts |= _memory(title, rows, held["theirs"], where)
        section.aims += _aims(section, title, rows)
    return section


def _is_shown(title: str, row: Compared) -> bool:
    """FreeKV alone is no result of the same bytes, and stock SGLang alone is a result of none but its own."""
    return bool((row.ours or title not in (*RESIDENT, *KEPT)) and (row.theirs or title not in (SAME, *KEPT)))


def _table(section: Section, rows: list[Compared]) -> str:
    lines, several = [], len(backends_of(section, rows)) > 1
    for row in rows:
        tpot = _both(value and ms(value) for value in row.tpot[:2]), row.told_tpot
        ttft = _both(_two(value) for value in row.ttft[:2]), _two(row.ttft[2])
        rates = [_both(value and f"{value:.0f}" for value in pair) for pair in (row.tokens, row.decoding, row.at_once)]
        over = _both(_two(_over_least(section, side)) for side in (row.ours, row.theirs))
        lines.append((row.name, row.slower or None, row.prefix, *tpot, *ttft, *rates, over, *([row.by or None] if several else [])))
    return markdown(HEADER + ("faster",) if several else HEADER, lines)


def _long_table(rows: list[tuple[int, str, float, float, float]]) -> str:
    lines = [(batch, lengths, _both((ms(ours), ms(theirs))), _two(ratio)) for batch, lengths, ours, theirs, ratio in rows]
    return markdown(("requests", "steps timed at", "ms a step", "ratio"), lines)


def _longer(section: Section, pair: tuple[str, ...]) -> list[tuple]:
    """Steps of long answers, of batches that the smallest pool of these servers holds whole."""
    facts = [run[name] for run in section.written["runs"] for name in run if name.startswith("server ")]
    pools = [fact["max_total_num_tokens"] for fact in facts if "max_total_num_tokens" in fact]
    tokens = LONG.prompt + LONG.answer
    return [row for row in long_generation(section.results, *pair) if row[0] * tokens <= min(pools, default=math.inf)]


def _both(pair) -> str:
    return " / ".join("-" if value is None else str(value) for value in pair)


def _over_least(section: Section, result: dict) -> float | None:
    """TPOT over the least time that the bytes of a step allow."""
    if "tpot_s" not in result:
        return None
    moved = {"link": result["link_bytes"], "device": result["hbm_bytes"], "weights": 0}  # these are in the device's
    return result["tpot_s"] / bound_of(moved, section.ceilings(result))


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _curves(rows: list[Compared], title: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By batch, for each context and system: TPOT, or the rate where fewer requests fit one system than the other. The cold request alone
    is no point of it, and neither is a batch's second visit."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.context, row.batch)):
        figures = [seconds and seconds * 1e3 for seconds in row.tpot[:2]] if title != SAME else row.decoding
        for who, figure in zip(("FreeKV", "stock SGLang"), figures):
            if figure and not row.name.endswith(("-cold", "-again")):
                curves.setdefault((who, f"{row.context // 1024}K"), []).append((row.batch, figure))
    return curves


def _memory(title: str, rows: list[Compared], held: float, where: str) -> dict:
    """What the takeaways tell of the same KV bytes."""
    evicted = [row.ttft[2] for row in rows if (row.prefix == "hit/part" or row.name.endswith("-again")) and row.ttft[2]]
    most = max(rows, key=lambda row: row.batch)
    return {
        "held": held,
        "memory": f"with `fast` {where}{' with HiCache' * (title in KEPT)}",
        "evicted": evicted,
        "prompts": most.batch,
        "answer": most.ours.get("new_tokens"),
    }


def _server(title: str, rows: list[Compared], where: str, bits: str) -> dict:
    """What they tell of one request and of losses, for a server of FreeKV on a card."""
    preset, resident = "the default preset" if title == DEFAULT else "`fast`", title != PRODUCTION
    kept = [preset, *([bits] if bits else []), *([] if resident else ["nothing resident"])]
    timed = sorted((row for row in rows if row.tpot[2]), key=lambda row: row.tpot[2])
    return {
        "where": f"with {' and '.join(kept)} {where}",
        "preset": preset.removeprefix("the "),
        "against": where,
        "alone": {row.context: row.tpot[2] for row in sorted(timed, key=lambda row: row.prefix == "hit") if row.batch == 1},
        "fastest": timed[0] if timed else None,
        "hits": [row.ttft[2] for row in rows if row.prefix == "hit" and row.ttft[2]],
        "cold": [row.ttft[2] for row in rows if row.prefix == "cold" and row.ttft[2]],
        "slowest": timed[-1] if timed else None,
        "resident": resident,
        "bits": bits,
    }


def _aims_resident(where: str, load: str, rows: list[Compared]) -> list[Aim]:
    def worst(ratios) -> float | None:
        return max((ratio for ratio in ratios if ratio), default=None)

    short = [row for row in rows if row.context == SHORT]
    largest = max((row.batch for row in short), default=None)
    hits = [row for row in rows if row.prefix == "hit"]
    told = f"{where}, resident, {load}: "
    aims = [
        Aim(f"{told}TPOT / stock SGLang's, worst cell", worst(row.tpot[2] for row in rows), 1.0, False),
        Aim(
            f"{told}TPOT / stock SGLang's at 8K, batch {largest}", worst(row.tpot[2] for row in short if row.batch == largest), 0.55, False
        ),
        Aim(f"{told}TTFT of one hit / stock SGLang's, worst context", worst(row.ttft[2] for row in hits if row.batch == 1), 1.5, False),
        Aim(
            f"{told}TTFT of sixteen hits of 8K / stock SGLang's",
            worst(r.ttft[2] for r in hits if (r.context, r.batch) == (SHORT, 16)),
            1.5,
            False,
        ),
    ]
    return aims if short else [aims[0], aims[2]]  # those of 8K where it was measured


def _aims(section: Section, title: str, rows: list[Compared]) -> list[Aim]:
    shape = section.shape
    if title in crossover.UNDER:
        return _aims_resident(f"{shape}{in_8_bits(section)}, {where_of(section, rows)}", crossover.UNDER[title], rows)
    if title == PRODUCTION:
        alone = [row for row in rows if row.batch == 1 and row.tpot[2]]
        what = f"{shape}, nothing resident: TPOT / stock SGLang's at batch 1, worst of the contexts"
        worst = max((row.tpot[2] for row in alone), default=None)
        return [Aim(what, worst, 1.05, False, max((row.tpot[2] / _over_least(section, row.ours) for row in alone), default=None))]
    if title not in BY_MEMORY:
        return []
    aims, beside = [], " with HiCache" * (title in KEPT)
    for what, told in (("decoding", "while decoding"), ("tokens", "with prefill")):
        at = [row for row in rows if row.context == AT and (what == "decoding" or row.prefix == "cold")]
        ours, theirs = ([(rate, row) for row in at if (rate := getattr(row, what)[side])] for side in (0, 1))
        ratio = possible = None
        if ours and theirs:
            stock = max(rate for rate, _ in theirs)
            ratio = max(rate for rate, _ in ours) / stock
            possible = max(rate * _sooner(section, row, what) for rate, row in ours) / stock
        aims.append(Aim(f"{shape}: tokens/s / stock SGLang's{beside} at 32K on the same KV bytes, {told}", ratio, 5, True, possible))
        section.facts[what] = ratio
    return aims


def _sooner(section: Section, row: Compared, what: str) -> float:
    """How many times the tokens per second there would be if a step took its least time; prefill takes what it took."""
    over = _over_least(section, row.ours)
    if what == "decoding":
        return over
    took = row.ours["at_once"] / row.ours["tokens_per_s"]  # seconds for a token of each
    return took / (took - row.ours["tpot_s"] * (1 - 1 / over))
