"""A ladder: the levels of a load that a server climbs until it is saturated, and what of each was within limits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

ENOUGH = 0.9  # of the requests of a level, within limits
LEAST_START_S = 150  # that a server is begun with


class Limits(NamedTuple):
    """Most seconds to the first token, and from one token to the next in a request's mean."""

    ttft_s: float
    tpot_s: float


class Point(NamedTuple):
    """What a server made of a rate: the share of what was offered that was within limits, as requests per second and as such."""

    goodput: float
    within: float


def offered_of(result: dict) -> float:
    """Requests per second that came. bench_serving draws random times between requests, so this is not the rate that it is asked for.

    Of bench_serving the last answer's end is known, and how long that answer took. A level of agents tells the rate itself.
    """
    if "duration" not in result:
        return result["rate"]
    answered = result["ttfts"][-1] + result["tpots"][-1] * (result["output_lens"][-1] - 1)
    return (len(result["ttfts"]) - 1) / (result["duration"] - answered)


def point_of(result: dict, limits: Limits) -> Point:
    """By what was offered: the time until the last answer's end is longer the slower answers are that are within limits."""
    good = sum(ttft < limits.ttft_s and tpot < limits.tpot_s for ttft, tpot in zip(result["ttfts"], result["tpots"], strict=True))
    within = good / max(1, len(result["ttfts"]))
    return Point(within * offered_of(result), within)


def saturated(points: Sequence[Point]) -> bool:
    """Of the rates so far, ascending: goodput fell with the share within limits, or for the second time too few were within them.

    Goodput alone falls by chance, too, where fewer requests came than at the rate before.
    """
    fell = len(points) > 1 and points[-1].goodput < points[-2].goodput and points[-1].within < points[-2].within
    return fell or sum(point.within < ENOUGH for point in points) > 1


Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Ladder(Generic[Asked]):
    """The rates that every system climbs, or other levels of a load.

    Args:
        asked: what is asked at each.
        rates: ascending.
        left: whether a key, ``SYSTEM/rate``, may be measured; what may not is passed over.
        since: the first run whose results count.
    """

    asked: Asked
    limits: Limits
    rates: tuple[float, ...]
    left: Callable[[str], bool]
    since: int = 0

    def next(self, results: dict, system: str) -> float | None:
        """The lowest rate to be measured yet; None if there is none below saturation."""
        climbed: list[Point] = []
        for rate in self.rates:
            key = f"{system}/{rate:g}"
            if key in results and results[key]["run"] >= self.since:
                climbed.append(point_of(results[key], self.limits))
                if saturated(climbed):
                    return None
            elif self.left(key):
                return rate
        return None


def rows_of(results: dict, limits: Limits, systems: Sequence[str], level: str = "rate") -> list[tuple[str, float, Point, dict]]:
    """System, level of the load, what came of it, and the whole result; by system and level.

    Args:
        systems: in their order.
        level: what a result calls it.
    """
    rows = [(key.split("/")[0], result[level], point_of(result, limits), result) for key, result in results.items()]
    return sorted(rows, key=lambda row: (systems.index(row[0]), row[1]))


def best_of(results: dict, limits: Limits, *order) -> dict[str, float]:
    """The best goodput of each system; ``order`` as of :func:`rows_of`."""
    best: dict[str, float] = {}
    for system, _, point, _ in rows_of(results, limits, *order):
        best[system] = max(point.goodput, best.get(system, 0.0))
    return best


def add_limits(parser: argparse.ArgumentParser) -> None:
    """What every ladder takes: the limits of a request, of the servers and of time."""
    parser.add_argument("--ttft", type=float, default=2.0, help="limit in seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="limit in seconds")
    parser.add_argument("--max-running", type=int, default=64, help="requests at once, at most, of all systems")
    parser.add_argument("--stock-flags", default="", metavar="FLAGS", help="further flags of stock SGLang: --stock-flags='--name value'")
    parser.add_argument("--freekv-flags", default="", metavar="FLAGS", help="the same for FreeKV")
    parser.add_argument("--minutes", type=float, default=28, help="when to stop, with what is measured by then")
    parser.add_argument("--part-seconds", type=float, default=300, help="most seconds of one rate or level")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
    parser.add_argument("--tables", action="store_true", help="measure nothing; print the table of the results in --out")
