"""Which load is still answered in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.paper import goodput, ladder, plots
from benchmarks.report import markdown

from .names import ABOUT_LOAD, SYSTEMS
from .section import Section

NAMES = SYSTEMS | {goodput.FAST: f"{SYSTEMS['freekv']} with `fast`"}
DRAWN = {name: (SYSTEMS[name], "") for name in SYSTEMS} | {goodput.FAST: (SYSTEMS["freekv"], "fast")}


def of_goodput(path: Path, directory: Path) -> Section:
    section = Section.of("Goodput under load", path, directory)
    section.figure += f", {_where(section)}"
    limits = ladder.Limits(**next(iter(section.results.values()))["limits"])
    rows = ladder.rows_of(section.results, limits, goodput.SYSTEMS)
    lasted = [len(result["ttfts"]) / ladder.offered_of(result) for *_, result in rows]
    best = ladder.best_of(section.results, limits, goodput.SYSTEMS)
    whole = {key: result for key, result in section.results.items() if ladder.point_of(result, limits).within == 1}
    section.facts |= {
        "goodput": best,
        "kept": ladder.best_of(whole, limits, goodput.SYSTEMS),  # where all requests were within limits
        "limits": limits,
        "under load": f"{_where(section)}{', with earlier code' * section.is_earlier}",
    }
    loads = {system: result["load"] for system, *_, result in rows if "load" in result}
    section.add(
        f"A request is within the limits if its first token comes within {limits.ttft_s:g} s and the others follow at "
        f"{limits.tpot_s * 1e3:g} ms in the mean. Goodput is the share of such requests, times the rate at which they came. "
        "`sglang.bench_serving` draws random times between requests, so they came faster or more slowly than it was asked to send them. "
        "*Offered* is the rate at which they came. *Ended / s* divides all requests by the time until the last answer's end. They asked "
        f"about documents of 32K tokens that are in the prefix tree. Each rate lasted {min(lasted):.0f} to {max(lasted):.0f} s. The rates of "
        "a system end where its goodput and the share of such requests fall. They end, too, where that share is below "
        f"{ladder.ENOUGH:.0%} for the second time. No rate was repeated.{_replayed(loads)}",
        markdown(
            (
                "system",
                "offered / s",
                "goodput",
                "within limits",
                "ended / s",
                "TTFT, ms",
                "p99",
                "TPOT, ms",
                "p99",
                "tokens/s",
                "hit rate",
            ),
            [
                (NAMES[system], ladder.offered_of(result), *point, *(result[name] for name in goodput.COLUMNS))
                for system, _, point, result in rows
            ],
        ),
    )
    section.add(*filter(None, [ABOUT_LOAD.get(section.key)]))
    possible = {system: _possible(section, result) for system, *_, result in rows}
    section.add(
        "*Most possible* is the rate at which the link or the device memory is always busy. Weights are left out, and no context is shared."
        + (" FreeKV's has every prefix come from the host, which resident pages need not." if loads else "")
        + (" A share above 1: the rate was over before waiting requests were too late." if _over(best, possible) else "")
        + cut_short(rows, best, NAMES),
        markdown(
            ("system", "best goodput", "most possible", "share"),
            [(NAMES[system], found, possible[system], found / possible[system]) for system, found in best.items()],
        ),
    )
    lines = {DRAWN[each]: [(ladder.offered_of(row[3]), row[2].goodput) for row in rows if row[0] == each] for each in best}
    title, unit = f"{section.shape}: requests per second within limits", "within limits"
    section.picture("rates", plots.curves, title, "requests per second, offered", unit, lines, "FreeKV", diagonal="all within limits")
    return section


def _where(section: Section) -> str:
    """The card, and the backends of stock SGLang as far as they are told."""
    told = [section.backend(result, "stock") for key, result in section.results.items() if key.startswith("stock/")]
    backends = " and ".join(dict.fromkeys(filter(None, told)))
    return f"on {section.devices(section.results.values())} against {backends or 'stock SGLang'}"


def _replayed(loads: dict[str, str]) -> str:
    """By system of FreeKV."""
    kept = f" {SYSTEMS['freekv']} has its default preset if nothing is said, and keeps pages on the device while there is room."
    return kept + "".join(f" {NAMES[system]} replays the load `{load}`." for system, load in loads.items()) if loads else ""


def _over(best: dict[str, float], possible: dict[str, float]) -> bool:
    return any(found > possible[system] for system, found in best.items())


def cut_short(rows: list[tuple], systems: Iterable[str], names: Mapping[str, str]) -> str:
    """Whose best may be higher, because the time was over before it was saturated."""
    climbed = {system: [row[2] for row in rows if row[0] == system] for system in systems}
    left = [system for system in systems if not ladder.saturated(climbed[system])]
    cut = [f"{names[system]} at {max(row[1] for row in rows if row[0] == system):g}" for system in left]
    return f" Not measured until saturated, so that the best may be higher: {', '.join(cut)}." if cut else ""


def _possible(section: Section, result: dict) -> float:
    """Requests per second."""
    moved, ceilings = result["request_bytes"], section.ceilings(result)
    return 1 / max(moved["link_bytes"] / ceilings["to_device"], moved["hbm_bytes"] / ceilings["device"])
