"""Which load is still answered in time."""

from __future__ import annotations

from pathlib import Path

from paper import goodput, plots
from report import markdown

from .section import Section


def of_goodput(path: Path, directory: Path) -> Section:
    section = Section.of("Goodput under load", path, directory)
    limits = goodput.Limits(**next(iter(section.results.values()))["limits"])
    rows = goodput.rows_of(section.results, limits)
    lasted = max(len(result["ttfts"]) / rate for _, rate, _, result in rows)
    section.add(
        f"Requests per second whose first token comes within {limits.ttft_s:g} s and whose others are {limits.tpot_s * 1e3:g} ms apart in "
        "the mean, by the rate at which `sglang.bench_serving` sends questions about documents that are in the prefix tree; each rate lasts "
        f"{lasted:.0f} s, and what ended a second is over the time until the last answer did. A "
        f"server's rates end where its goodput falls, or less than {goodput.ENOUGH:.0%} were within limits for the second time.",
        markdown(
            ("system", *goodput.HEADER),
            [(system, rate, *point, *(result[name] for name in goodput.COLUMNS)) for system, rate, point, result in rows],
        ),
    )
    best, bounds = goodput.best_of(section.results, limits), {system: _bound(section, result) for system, *_, result in rows}
    told = (f"{system} {found:.2f} of at most {bounds[system]:.2f} ({found / bounds[system]:.2f})" for system, found in best.items())
    section.add(
        "Best goodput, beside the rate at which the link or the device memory is busy with what the requests move if each reads its own "
        "context, weights left out: "
        f"{'; '.join(told)}." + _cut_short(rows, best)
    )
    lines = {system: [(rate, point.goodput) for name, rate, point, _ in rows if name == system and point.goodput] for system in best}
    lines = {system: points for system, points in lines.items() if points}  # the scale has no zero
    section.picture("rates", plots.curves, f"{section.shape}: goodput", "requests per second, offered", "within limits", lines, "offered")
    return section


def _cut_short(rows: list[tuple], systems: dict[str, float]) -> str:
    """Whose best may be higher, because the time was over before it was saturated."""
    climbed = {system: [row[2] for row in rows if row[0] == system] for system in systems}
    cut = [f"{system} at {max(row[1] for row in rows if row[0] == system):g}" for system in systems if not goodput.saturated(climbed[system])]
    return f" Not measured until saturated, so that the best may be higher: {', '.join(cut)}." if cut else ""


def _bound(section: Section, result: dict) -> float:
    """Requests per second."""
    moved, ceilings = result["request_bytes"], section.ceilings(result)
    return 1 / max(moved["link_bytes"] / ceilings["to_device"], moved["hbm_bytes"] / ceilings["device"])
