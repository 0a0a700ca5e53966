"""Which running request should give up its pages? Replays made-up traffic of private contexts against rules that choose one.

A request is whole while all its pages have frames, and partial from when it gives way to its end. A partial request has slots of its own
and its pages have what frames nobody else needs. Either absent pages come back as soon as frames are free, or never. A tick is the time in which every running request fills one page.
"""

import itertools
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.report import Report, arguments
from benchmarks.residency import schedule
from benchmarks.residency_traces import Pages, Request, long_generation, uniform

RULES = ("largest", "smallest", "newest", "oldest", "random", "all")


def mixed(rng, context: int, requests: int) -> list[Request]:
    """Prompts of an eighth of `context` up to all of it, even on a logarithmic scale, with answers of any length."""
    pages, arrivals = Pages(), np.cumsum(rng.poisson(4, requests))
    prompts, answers = context * 8.0 ** -rng.random(requests), 1 + rng.exponential(context / 4, requests)
    return [Request(int(at), pages.take(int(p)), pages.take(int(a))) for at, p, a in zip(arrivals, prompts, answers)]


TRAFFIC = {"uniform": uniform, "mixed": mixed, "long generation": long_generation}


class Row(NamedTuple):
    """A running request: when it began, and its pages now."""

    number: int
    began: int
    pages: int


def choose(rule: str, whole: list[Row], rng) -> list[Row]:
    """Who of the whole requests that are larger than slots gives way next."""
    if rule == "all":
        return whole
    if rule == "random":
        return [whole[rng.integers(len(whole))]]
    key = {"largest": lambda r: -r.pages, "smallest": lambda r: r.pages, "newest": lambda r: -r.number, "oldest": lambda r: r.number}[rule]
    return [min(whole, key=key)]


def replay(requests: list[Request], rows: int, frames: int, slots: int, rule: str, seed: int) -> dict:
    """Counts of a trace: request-ticks, those that were partial, and those weighted by the share of their pages without a frame, where
    absent pages come back and where they do not.

    Raises:
        ValueError: not all rows' slots fit.
    """
    if rows * (slots + 2) > frames:
        raise ValueError(f"{frames} frames: expected at least {rows * (slots + 2)} for {rows} rows of {slots} slots; give --frames more")
    rng, starts, partial = np.random.default_rng(seed), schedule(requests, rows), set()
    kept: dict[int, float] = {}  # pages of partial requests that have frames, where none comes back
    out = {"ticks": 0, "partial ticks": 0, "absent ticks": 0.0, "absent, none back": 0.0, "gave way": 0, "most partial": 0}
    for now in range(max(start + len(r.answer) for r, start in zip(requests, starts)) + 1):
        running = [
            Row(i, start, len(r.prompt) + now - start)
            for i, (r, start) in enumerate(zip(requests, starts))
            if start <= now <= start + len(r.answer)
        ]
        while True:
            whole = [row for row in running if row.number not in partial]
            left = frames - sum(row.pages + 1 for row in whole) - (slots + 2) * (len(running) - len(whole))
            large = [row for row in whole if row.pages > slots]
            if left >= 0 or not large:
                break
            chosen = choose(rule, large, rng)
            partial |= {row.number for row in chosen}
            kept |= {row.number: row.pages - 1.0 for row in chosen}
            out["gave way"] += len(chosen)
        few, free = len(running) - len(whole), max(0, left)
        wanted = sum(row.pages for row in running if row.number in partial)
        kept = {row.number: kept[row.number] + 1 for row in running if row.number in partial}  # with the page that it just filled
        kept = {number: pages * min(1.0, free / sum(kept.values())) for number, pages in kept.items()}
        out["ticks"] += len(running)
        out["partial ticks"] += few
        out["absent ticks"] += few * max(0.0, 1 - free / max(1, wanted))
        out["absent, none back"] += few * max(0.0, 1 - sum(kept.values()) / max(1, wanted))
        out["most partial"] = max(out["most partial"], few)
    return out


def main() -> int:
    parser = arguments(__doc__, "partial_rows")
    for name, value in (("context", 128), ("slots", 32), ("rows", 8), ("requests", 120)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--frames", type=int, nargs="+", default=[384, 512, 768])
    parser.add_argument("--seeds", type=int, nargs="+", default=[29, 30, 31])
    options = parser.parse_args()
    report = Report("partial_rows", options.out)
    for (name, make), frames, seed in itertools.product(TRAFFIC.items(), options.frames, options.seeds):
        trace = make(np.random.default_rng(seed), options.context, options.requests)
        for rule in RULES:
            counts = replay(trace, options.rows, frames, options.slots, rule, seed)
            report.add(f"{name}/{rule}/frames {frames}/seed {seed}", counts)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
