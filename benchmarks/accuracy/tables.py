"""Results as markdown."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.accuracy.intervals import Interval, bootstrap
from benchmarks.accuracy.rows import DENSE, Row, Rows
from benchmarks.report import markdown as table

TRACED = {"attended": "tokens attended", "fetched": "tokens fetched", "corrected": "heads corrected", "similarity": "query similarity"}


def shown(interval: Interval | None, signed: bool = False) -> str | None:
    if interval is None:
        return None
    mean, low, high = (f"{value:{'+' if signed else ''}.2f}" for value in interval)
    return f"{mean} [{low}, {high}]"


def means(rows: Rows, length: int) -> str:
    """Accuracy of each method at each budget, mean over tasks; beneath it the difference to dense attention."""
    tasks, budgets = rows.tasks(length), rows.budgets
    found = [[label, *(rows.accuracy(label, length, budget, tasks) for budget in budgets)] for label in rows.labels]
    against = [[label, *(rows.comparison(label, length, budget, tasks) for budget in budgets)] for label in rows.labels]
    found = [[label, *map(shown, cells)] for label, *cells in found if any(cells)]
    against = [[label, *(cell and shown(cell.interval(), signed=True) for cell in cells)] for label, *cells in against if any(cells)]
    header = [f"budget {budget}" for budget in budgets]
    both = table(["accuracy", *header], found), table([f"minus {DENSE}", *header], against) if against else ""
    return f"### {length} tokens, mean of {len(tasks)} tasks\n\n" + "\n\n".join(filter(None, both))


def by_task(rows: Rows, length: int, budget: int) -> str | None:
    tasks, lines = rows.tasks(length), []
    for label in rows.labels:
        cells = [rows.row(label, length, budget, task) for task in tasks]
        if any(cells):
            mean = rows.accuracy(label, length, budget, tasks)
            lines.append([label, shown(mean), *(cell and shown(bootstrap([cell.scores])) for cell in cells)])
    return lines and f"### {length} tokens, budget {budget}\n\n" + table(["accuracy", "mean", *tasks], lines)


def traces(rows: Rows, length: int, budget: int) -> str | None:
    """What the methods did, mean over tasks."""
    lines = []
    for label in rows.labels:
        of_method = [row for task in rows.tasks(length) if (row := rows.by_key.get((label, length, budget, task)))]
        told = [[row.trace.get("mean", {}).get(field) for row in of_method] for field in TRACED]
        cells = [f"{np.mean(values):.4g}" if values and None not in values else None for values in told]
        if any(cells):
            lines.append([label, *cells, f"{np.mean([count for row in of_method for count in row.generated]):.1f}"])
    header = ["per kv head and step", *TRACED.values(), "tokens generated"]
    return lines and f"### {length} tokens, budget {budget}\n\n" + table(header, lines)


def halves(rows: Rows) -> str | None:
    """Offline and server results of the same method on the same prompts."""
    lines = []
    for row in rows.rows:
        other = rows.by_key.get((f"{row.method} (server)", row.length, row.budget, row.task)) if row.half == "offline" else None
        if other and other.digest == row.digest:
            difference = bootstrap([np.subtract(other.scores, row.scores).tolist()])
            both = (f"{np.mean(each.scores):.2f}" for each in (row, other))
            lines.append([row.method, row.task, row.length, row.budget, *both, shown(difference, signed=True)])
    return lines and table(["method", "task", "tokens", "budget", "offline", "server", "difference"], sorted(lines, key=str))


def listed(title: str, explained: str, lines: Iterable) -> str:
    return f"## {title}\n\n{explained}\n\n" + ("\n".join(f"- {line}" for line in lines) or "None.")


def apart(rows: Rows) -> list[Row]:
    """Results that have no dense counterpart on the same prompts."""
    return [row for row in rows.rows if row.budget and not rows.comparison(row.label, row.length, row.budget, [row.task])]


def markdown(rows: Rows, setup: Iterable[str], failures: Iterable[str], pictures: Iterable[str]) -> str:
    """The whole document.

    Args:
        setup: lines on what was run, where.
        failures: keys of results that are missing because they failed.
        pictures: file names.
    """
    grid = [(length, budget) for length in rows.lengths for budget in rows.budgets]
    chance = [each for each in rows.suspects if each not in rows.faults]
    alone = sorted(f"{row.label}, {row.task}, {row.length} tokens, budget {row.budget}" for row in apart(rows))
    better = f"A method is listed if it is better than `{DENSE}`"
    all_hold = f"{better} by an interval that holds for all {len(rows.comparisons)} comparisons together."
    sections = [
        "# Accuracy",
        "\n".join(f"- {line}" for line in setup),
        listed("Harness faults", all_hold, rows.faults),
        listed("Perhaps chance", f"{better} by a 95% interval of its own only.", chance),
        listed("Not compared", f"`{DENSE}` did not answer the prompts of these, so no difference is given.", alone),
        listed("Failed", "These results are missing. The JSON says why.", failures),
        "## Mean over tasks",
        *(means(rows, length) for length in rows.lengths),
        "## By task",
        *(by_task(rows, *each) for each in grid),
        "## What the methods did",
        *(traces(rows, *each) for each in grid),
        "## Offline and server",
        halves(rows) or "No method has both.",
        "## Pictures",
        "\n\n".join(f"![{name}]({name})" for name in pictures) or "None.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"
