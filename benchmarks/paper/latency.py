"""Figure 7 of the FreeKV and LouisKV papers: how long whole answers take, method by method, in one engine on one machine.

    python -m benchmarks.paper.latency --shape llama-3.1-8b                                # all scenarios, batches and methods
    python -m benchmarks.paper.latency --shape qwen2.5-7b --only 'long-generation/*/freekv/*'
    python -m benchmarks.paper.latency --tables                                            # from the JSON alone

Steps are timed at a few lengths of context and joined by straight lines; an answer's decoding is the sum over its steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.clock import Clock
from benchmarks.paper.decoder import TINY, Decoder, Shape
from benchmarks.paper.method import Work
from benchmarks.paper.methods import METHODS
from benchmarks.paper.parts import Parts, parts_of
from benchmarks.paper.pools import Pools
from benchmarks.paper.scenarios import BATCHES, SCENARIOS
from benchmarks.paper.settings import add_settings, is_there, settings_of
from benchmarks.paper.step import measured
from benchmarks.report import Report, arguments, chosen, say, summary, table
from benchmarks.timing import Ceilings, time_calls, time_events
from sglang_freekv.config import FreeKVConfig

PREFILL = "prefill"
BY_HOST = "arkvale-copies", "infinigen-copies"  # the longest to measure, so last, and what others run on the host is over by then


class Answer(NamedTuple):
    """A batch of answers by one method, as far as all its steps were timed.

    Args:
        step: seconds of a step in the mean.
        prefill: seconds of the prompts, one after the other; None if it was not measured.
        full, window, freekv: decoding, in units of these methods'.
        freekv_whole: prefill and decoding, in units of FreeKV's; None without a prefill or FreeKV.
    """

    scenario: str
    batch: int
    method: str
    step: float
    prefill: float | None
    decoding: float
    full: float | None
    window: float | None
    freekv: float | None
    freekv_whole: float | None


class Cell(NamedTuple):
    """One measured step, split up.

    Args:
        window: seconds of a window alone.
        link: seconds that the link takes for the step's bytes.
        serial: seconds of a window alone and, behind it, of the link for what corrected kv heads wait for under the load.
    """

    scenario: str
    batch: int
    context: int
    method: str
    seconds: float
    window: float
    link: float
    serial: float
    parts: Parts


def answers(results: dict) -> list[Answer]:
    found: dict[tuple, dict[int, float]] = {}
    for (scenario, batch, method, context), result in _steps(results):
        found.setdefault((scenario, batch, method), {})[context] = result["seconds"]["median"]
    decoding = {
        (scenario, batch, method): SCENARIOS[scenario].decoding_seconds(seconds)
        for (scenario, batch, method), seconds in found.items()
        if len(seconds) == len(SCENARIOS[scenario].at)
    }
    rows = []
    for key in sorted(decoding, key=lambda key: _order(*key[:2], list(METHODS).index(key[2]))):
        (scenario, batch, method), seconds = key, decoding[key]
        asked, prompt = SCENARIOS[scenario], results.get(f"{PREFILL}/{SCENARIOS[scenario].prompt}")
        others = [decoding.get((scenario, batch, name)) for name in ("full", "window", "freekv")]
        ratios = (other and seconds / other for other in others)
        prefill = prompt and batch * prompt["seconds"]["median"]
        whole = None if prefill is None or others[-1] is None else (prefill + seconds) / (prefill + others[-1])
        rows.append(Answer(scenario, batch, method, seconds / (asked.answer - 1), prefill, seconds, *ratios, whole))
    return rows


def cells(results: dict, runs: list[dict]) -> list[Cell]:
    """Every step that was timed, if that of a window alone was, too."""
    medians = {key: result["seconds"]["median"] for key, result in _steps(results)}
    rows = []
    for (scenario, batch, method, context), result in _steps(results):
        window = medians.get((scenario, batch, "window", context))
        if window is not None:
            ceilings = runs[result["run"]]["ceilings"]
            link = result["bytes"]["link"] / ceilings["to_device"]
            serial, parts = window + result["corrected"] * link, parts_of(method, result, window, ceilings)
            rows.append(Cell(scenario, batch, context, method, result["seconds"]["median"], window, link, serial, parts))
    return sorted(rows, key=lambda cell: (*_order(cell.scenario, cell.batch, cell.context), list(METHODS).index(cell.method)))


def _steps(results: dict) -> Iterator[tuple[tuple[str, int, str, int], dict]]:
    for key, result in results.items():
        if not key.startswith(f"{PREFILL}/"):
            scenario, batch, method, context = key.split("/")
            yield (scenario, int(batch[1:]), method, int(context)), result


def _order(scenario: str, *others: int) -> tuple[int, ...]:
    return list(SCENARIOS).index(scenario), *others


def tables(report: Report) -> tuple[str, str]:
    """Whole answers, and where the time of each step went."""
    whole = [(*row[:3], row.step * 1e3, *row[4:]) for row in answers(report.results)]
    ratios = ("/ full", "/ window", "/ freekv", "/ freekv with prefill")
    head = ("scenario", "batch", "method", "ms a step", "prefill s", "decoding s", *ratios)
    split = [
        (*cell[:4], cell.seconds * 1e3, *(part * 1e3 for part in cell.parts), cell.seconds / cell.parts.bound)
        for cell in cells(report.results, report.runs)
    ]
    names = ("scenario", "batch", "context", "method", "ms a step", "compute", "select", "exposed", "hidden", "least", "/ least")
    return table(head, whole), table(names, split)


def left_of(options, wanted, results: dict) -> tuple[dict[str, int], dict[str, tuple]]:
    """Prompts, and steps as scenario, batch, method and context, that are to be measured yet; by their keys."""

    def is_left(key: str, load: tuple[float, float] | None = None) -> bool:
        return wanted(key) and not is_there(results, key, settings_of(options), options.force, load)

    prompts = {f"{PREFILL}/{prompt}": prompt for prompt in sorted({scenario.prompt for scenario in SCENARIOS.values()})}
    cells = sorted(product(SCENARIOS, options.batches, METHODS), key=lambda cell: cell[2] in BY_HOST)
    steps = {f"{name}/b{batch}/{method}/{at}": (name, batch, method, at) for name, batch, method in cells for at in SCENARIOS[name].at}
    loads = {key: SCENARIOS[name].load(at) for key, (name, _, _, at) in steps.items()}
    left = {key: step for key, step in steps.items() if is_left(key, loads[key])}
    return {key: prompt for key, prompt in prompts.items() if is_left(key)}, left


def prefill_seconds(decoder: Decoder, tokens: int, device: str) -> dict:
    hidden = torch.randn(tokens, decoder.shape.hidden, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    return summary((time_events if device == "cuda" else partial(time_calls, device=device))(lambda: decoder.prefill(hidden), repeats=3))


def measure(shape: Shape, options, wanted, report: Report) -> None:
    """What is left, step after step, on pools that are taken once."""
    prompts, steps = left_of(options, wanted, report.results)
    if not prompts and not steps:
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))  # of the gather of infinigen-copies; the others are of a driver beside it
    edge, page, device = options.budget // 4, options.page_size, options.device
    config = FreeKVConfig(budget_tokens=options.budget, sink_tokens=edge, window_tokens=edge, page_size=page)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    decoder, clock, settings = Decoder(shape, dtype, device), Clock(options.minutes), settings_of(options)
    report.note(ceilings=asdict(Ceilings.measure(device)), threads=torch.get_num_threads())
    for key, prompt in prompts.items():
        with report.part(key, quiet=True):
            report.add(key, settings | {"seconds": prefill_seconds(decoder, max(page, prompt // options.scale), device)})
    pools = Pools(shape, config, max(options.batches), options.host_tokens, dtype, device)
    say(f"{shape.name}: pools and weights are up")
    for key, (name, batch, method, at) in steps.items():
        if clock.is_over:
            report.failures.append(f"{key} and what follows: not reached in {options.minutes:g} minutes; the same command goes on")
            break
        with report.part(key, quiet=True):
            work = Work.of(pools, batch, max(page, at // options.scale), *SCENARIOS[name].load(at))
            result = measured(decoder, work, METHODS[method], options.repeats)
            report.add(key, settings | result)
            say(f"{key}: {result['seconds']['median'] * 1e3:.2f} ms")
    pools.close()


def main() -> int:
    names = [f"{PREFILL}/TOKENS", *(f"{name}/bBATCH/{method}/CONTEXT" for name, method in product(SCENARIOS, METHODS))]
    parser = arguments(__doc__, "paper-latency-SHAPE", names)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--scale", type=int, default=1, help="contexts are divided by this; 1 but for a dry run")
    add_settings(parser, host_tokens=1 << 17)
    options = parser.parse_args()
    shape = TINY if options.shape == "tiny" else Shape.of(options.shape)
    report = Report(f"paper-latency-{shape.name}", options.out)
    if not options.tables:
        measure(shape, options, chosen(options), report)
    return report.finish(*tables(report))


if __name__ == "__main__":
    sys.exit(main())
