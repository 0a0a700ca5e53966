"""Figure 8: what each part of the system saves."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper import ablation, plots
from benchmarks.report import markdown

from .names import ABLATION
from .section import Section, ms

WHOLE = "+graph"  # the product's default


def of_ablation(path: Path, directory: Path) -> Section:
    """Figure 8 of a shape."""
    section = Section.of("What each part saves", path, directory)
    rows = ablation.rows(section.results, section.written["runs"])
    section.add(
        "The first rows add one part to the other, from a base on a copy engine to FreeKV. The others have one part alone, or lack one. "
        "Rows without the CUDA graph are launched by Python, kernel by kernel. That alone takes tens of milliseconds, so smaller "
        "differences between them say nothing." + _ahead(rows)
    )
    for context in dict.fromkeys(row.context for row in rows):
        mine = [row for row in rows if row.context == context]
        batches = list(dict.fromkeys(row.batch for row in mine))
        by = {(row.system, row.batch): row for row in mine}
        systems = [name for name in ablation.SYSTEMS if any((name, batch) in by for batch in batches)]
        shown = [(ABLATION[name], *(cell for batch in batches for cell in _ablated(by.get((name, batch))))) for name in systems]
        head = [cell for batch in batches for cell in (f"batch {batch}, ms", "/ FreeKV", "/ least time")]
        section.add(f"### {context:,} tokens", markdown(("system", *head), shown))
        seconds = {
            f"batch {batch}": {ABLATION[name]: by[name, batch].seconds * 1e3 for name in systems if (name, batch) in by}
            for batch in batches
        }
        title = f"{section.shape}, a decode step at {context:,} tokens (logarithmic)"
        section.picture(str(context), plots.bars, title, "ms", seconds, ABLATION[WHOLE], log=True)
    return section


def _ahead(rows: list[ablation.Row]) -> str:
    """What selection a step ahead is worth to the whole."""
    worth = [row.whole for row in rows if row.system == "-speculation" and row.whole]
    return f" Without selection a step ahead FreeKV's step takes {min(worth):.2f} to {max(worth):.2f} times as long." if worth else ""


def _ablated(row: ablation.Row | None) -> tuple:
    return (None, None, None) if row is None else (ms(row.seconds), row.whole and f"{row.whole:.2f}", row.seconds / row.bound)
