"""Results on real weights as markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from benchmarks.accuracy.forced import missing
from benchmarks.accuracy.intervals import Interval, bootstrap
from benchmarks.accuracy.rows import DENSE
from benchmarks.report import markdown

SHARES = {"mass": "dense mass read", "corrected": "heads corrected"}
TOKENS = {"attended": "tokens attended", "fetched": "tokens fetched", "waited": "tokens waited for"}


def shown(interval: Interval, digits: int = 4) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in interval)
    return f"{mean} [{low}, {high}]"


def told(value: float | None, digits: int = 3) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def ratio(result: dict, dense: dict | None) -> str | None:
    """Perplexity over dense attention's on the same texts; None without it."""
    if dense is None:
        return None
    of_logs = bootstrap([[ours - theirs for ours, theirs in zip(result["nll"], dense["nll"], strict=True)]])
    return shown(Interval(*map(math.exp, of_logs)))


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def row(result: dict, dense: dict | None) -> list:
    trace = result["trace"]["mean"]
    shares = [told(trace.get(name)) for name in SHARES]
    perplexity = math.exp(bootstrap([result["nll"]]).mean)
    measured = [f"{perplexity:.3f}", ratio(result, dense), shown(bootstrap([result["kl"]])), shown(bootstrap([result["agreement"]]), 3)]
    counts = [told(trace.get(name), 0) for name in TOKENS]
    return [result["method"], *measured, *shares, told(mean(missing(result["trace"]))), *counts]


HEADER = ["method", "perplexity", "of dense", "KL to dense", "top-1 as dense", *SHARES.values(), "pages missing", *TOKENS.values()]


def of_budget(results: list[dict], length: int, budget: int) -> str:
    """Every method at one length and budget, beneath dense attention."""
    rows = [each for each in results if each["length"] == length and (each["method"] == DENSE or each["budget"]["total"] == budget)]
    rows.sort(key=lambda each: (each["method"] != DENSE, each["method"]))
    dense = next((each for each in rows if each["method"] == DENSE), None)
    return f"### {length} tokens, budget {budget}\n\n" + markdown(HEADER, [row(each, dense) for each in rows])


def by_layer(results: list[dict], title: str, values_of: Callable[[dict], list]) -> str:
    """A row each result that has such values, a column each layer."""
    rows = []
    for each in results:
        values = values_of(each["trace"]) or []
        if each["method"] != DENSE and mean(values) is not None:
            rows.append([each["method"], each["length"], each["budget"]["total"], *(told(value, 2) for value in values)])
    rows.sort(key=lambda each: (each[1], each[2], each[0]))
    layers = max((len(each) for each in rows), default=3) - 3
    header = ["method", "length", "budget", *range(layers)]
    return f"### {title}, by layer\n\n" + markdown(list(map(str, header)), rows) if rows else ""


def document(results: list[dict]) -> str:
    """All tables."""
    setup = {name: sorted({str(each[name]) for each in results}) for name in ("model", "dtype", "texts", "documents", "steps")}
    lines = ["## Real weights", ", ".join(f"{name} {' and '.join(values)}" for name, values in setup.items()) + "."]
    pairs = sorted({(each["length"], each["budget"]["total"]) for each in results if each["budget"]})
    lines += [of_budget(results, *pair) for pair in pairs]
    for title, name in (("Dense mass read", "mass"), ("Heads corrected", "corrected")):
        lines.append(by_layer(results, title, lambda trace: trace["by_layer"].get(name)))
    lines.append(by_layer(results, "Pages missing", missing))
    return "\n\n".join(filter(None, lines))


COMPARED = ["KL to dense", "perplexity over dense", *SHARES.values(), *list(TOKENS.values())[1:]]


def compared(results: dict[str, dict], key: str, reference: str | None = None) -> list[str | None]:
    """Cells of ``COMPARED`` of one result; with a ``reference``, how much further from dense attention it is, text by text, comes second.

    Args:
        results: by key, as a results file has them.
        key: ``LENGTH/BUDGET/METHOD``.
        reference: the key of another result, on the same texts.
    """
    result, trace = results[key], results[key]["trace"]["mean"]
    cells = [shown(bootstrap([result["kl"]]))]
    if reference is not None:
        cells.append(shown(bootstrap([[ours - theirs for ours, theirs in zip(result["kl"], results[reference]["kl"], strict=True)]])))
    cells.append(ratio(result, results[f"{result['length']}/all/{DENSE}"]))
    cells += [told(trace.get(name)) or "-" for name in SHARES]
    return cells + [told(trace.get(name), 0) or "-" for name in list(TOKENS)[1:]]
