"""Figure 8: what each part of the system saves."""

from __future__ import annotations

from pathlib import Path

from paper import ablation, plots
from report import markdown

from .section import Section, ms


def of_ablation(path: Path, directory: Path) -> Section:
    """Figure 8 of a shape."""
    section = Section.of("What each part saves", path, directory)
    rows = ablation.rows(section.results, section.written["runs"])
    for context in dict.fromkeys(row.context for row in rows):
        mine = [row for row in rows if row.context == context]
        batches = list(dict.fromkeys(row.batch for row in mine))
        by = {(row.system, row.batch): row for row in mine}
        systems = [name for name in ablation.SYSTEMS if any((name, batch) in by for batch in batches)]
        shown = [(name, *(cell for batch in batches for cell in _ablated(by.get((name, batch))))) for name in systems]
        head = [cell for batch in batches for cell in (f"batch {batch}, ms", "/ whole", "/ bound")]
        section.add(f"### {context} tokens", markdown(("system", *head), shown))
        seconds = {name: {f"batch {b}": by[name, b].seconds * 1e3 for b in batches if (name, b) in by} for name in systems}
        section.picture(str(context), plots.groups, f"A step at {context} tokens", "milliseconds", seconds)
    return section


def _ablated(row: ablation.Row | None) -> tuple:
    return (None, None, None) if row is None else (ms(row.seconds), row.whole and f"{row.whole:.2f}", row.seconds / row.bound)
