"""Where FreeKV begins to pay, server against server: time per token, time to the first token and throughput by context and batch.

    python -m benchmarks.paper.crossover --shape llama-3.1-8b                       # four servers, one after the other
    python -m benchmarks.paper.crossover --only 'freekv*/128k/*'                    # what is there already is not measured again
    python -m benchmarks.paper.crossover --tables                                   # from the JSON alone

``stock`` and ``freekv`` take what device memory they want; of the ``-same-kv`` two, all pools of KV on the device fit ``--device-kv``.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import ttft
from benchmarks.bench_load import CORRECTED, MISSED
from benchmarks.bench_serving_pair import DRY_RUN
from benchmarks.clock import Clock
from benchmarks.paper.capacity import System, bytes_of, device_kv_bytes, expect_within, systems_of
from benchmarks.paper.passes import figures_of, prefix_of
from benchmarks.report import Report, arguments, chosen, table
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, Setup
from benchmarks.timing import Ceilings
from benchmarks.tpot import SETTLE_TOKENS, achieved, prompts_of
from sglang_freekv.config import GIB

PAIRS = {"production": ("freekv", "stock"), "same KV bytes on the device": ("freekv-same-kv", "stock-same-kv")}
FULL = {"contexts": (8192, 32768, 131072), "batches": (64, 16, 4, 1), "tokens": 256, "interval": 8, "device_kv": 16.0}
DRY = {"contexts": (8192, 32768), "batches": (8, 1), "tokens": 24, "interval": 4, "device_kv": 0.06}


class Cell(NamedTuple):
    """One measurement: distinct prompts sent at once, computed (``cold``) or found in the tree (``hit``)."""

    context: int
    batch: int
    prefix: str

    @property
    def name(self) -> str:
        alone = "-cold" if self.batch == 1 and self.prefix == "cold" else ""
        return f"{self.context // 1024}k/b{self.batch}{alone}"


def cells_of(contexts: Sequence[int], batches: Sequence[int], most_tokens: int) -> list[Cell]:
    """For each context the largest batch cold, then smaller ones as hits, and one request cold; batches of at most ``most_tokens``."""
    cells = []
    for context in contexts:
        fitting = sorted((batch for batch in set(batches) if batch * context <= most_tokens), reverse=True)
        if fitting:
            cells.append(Cell(context, fitting[0], "cold"))
            cells += [Cell(context, batch, "hit") for batch in fitting if batch < fitting[0] or batch == 1]
            cells += [Cell(context, 1, "cold")] if fitting[0] > 1 else []
    return cells


def measure(server: BenchServer, cell: Cell, facts: dict, tokens: int, interval: int, deadline_s: float) -> dict:
    """One cell. A prompt that the server's pool cannot hold is no failure, but a result."""
    setup, context = server.setup, cell.context // server.setup.scale
    if context + tokens + setup.page_size >= facts["max_total_num_tokens"]:
        return {"cell": cell._asdict(), "prefix": "no room", "at_once": 0}
    server.set_load(setup.load(CORRECTED, MISSED, context))
    prompts = prompts_of(setup, cell.context, cell.batch)
    if cell.prefix == "cold":
        server.flush()
    else:
        server.stream_all(prompts, SETTLE_TOKENS, deadline_s)  # what is in the tree no longer is computed, and not counted
    log_begins = len(server.logged())
    streams = server.stream_all(prompts, tokens, deadline_s, interval)
    figures = figures_of(streams)
    shares = achieved(setup, streams)
    return {
        "cell": cell._asdict(),
        "scale": setup.scale,
        "new_tokens": tokens,
        "prefix": prefix_of(streams, setup.page_size),
        **figures,
        "retractions": server.retractions(log_begins),
        **{name: shares[name] for name in ("corrected", "missed") if name in shares},
        **bytes_of(setup, server.system, context, figures["window_requests"], shares.get("missed", 0.0)),
    }


def serve(server: BenchServer, system: System, cells: list[Cell], report: Report, clock: Clock, tokens: int, interval: int) -> None:
    """All cells that are left of one server."""
    facts = server.facts()
    held = device_kv_bytes(system.setup, facts)
    report.note(**{f"server {system.name}": facts | {"device_kv_bytes": held}})
    expect_within(system, held)
    with report.part(f"{system.name}/warm-up"):
        server.set_load(None)
        ttft.warm_up(server, clock.left())
    for cell in cells:
        with report.part(f"{system.name}/{cell.name}"):
            result = measure(server, cell, facts, tokens, interval, clock.left())
            report.add(f"{system.name}/{cell.name}", result | {"device_kv_bytes": held})


def run(
    systems: list[System], cells: list[Cell], left: Callable[[str], bool], report: Report, clock: Clock, tokens: int, interval: int
) -> None:
    """One server after the other; none of which nothing is left.

    Args:
        left: whether a key is to be measured.
    """
    for system in systems:
        mine = [cell for cell in cells if left(f"{system.name}/{cell.name}")]
        if not mine:
            continue
        with report.part(f"server {system.name}"), tempfile.TemporaryDirectory() as scratch:
            with running(system.setup, system.base, Path(scratch), clock.left_to_start(), system.more) as server:
                serve(server, system, mine, report, clock, tokens, interval)
            keep_log(Path(scratch) / f"{system.base}.log", report.path, system.name)


class Compared(NamedTuple):
    """A cell by two systems, as far as both have it.

    Args:
        slower: the figures in which FreeKV is.
        tpot, ttft: seconds of ours and of theirs, and their ratio.
        tokens, decoding, at_once: output tokens per second over the whole pass, and while the most decode; and how many do.
    """

    name: str
    context: int
    batch: int
    prefix: str
    slower: str
    tpot: tuple[float | None, float | None, float | None]
    ttft: tuple[float | None, float | None, float | None]
    tokens: tuple[float | None, float | None]
    decoding: tuple[float | None, float | None]
    at_once: tuple[int | None, int | None]
    ours: dict
    theirs: dict

    @classmethod
    def of(cls, name: str, cell: dict, ours: dict, theirs: dict) -> Compared:
        pair = ours, theirs
        times = {
            "TPOT": _ratio(*(each.get("tpot_s") for each in pair)),
            "TTFT": _ratio(*(each.get("ttft_s", {}).get("median") for each in pair)),
        }
        slower = "+".join(what for what, (*_, ratio) in times.items() if ratio and ratio > 1)
        prefix = "/".join(dict.fromkeys(each["prefix"] for each in pair if each))
        rates = (tuple(each.get(figure) for each in pair) for figure in ("tokens_per_s", "decoding_tokens_per_s", "at_once"))
        return cls(name, cell["context"], cell["batch"], prefix, slower, *times.values(), *rates, *pair)


def _ratio(ours: float | None, theirs: float | None) -> tuple[float | None, float | None, float | None]:
    return ours, theirs, ours / theirs if ours and theirs else None


def compared(results: dict, ours: str, theirs: str) -> list[Compared]:
    """Cell by cell; those first in which FreeKV is slower."""
    cells = {key.split("/", 1)[1]: result["cell"] for key, result in results.items() if key.split("/")[0] in (ours, theirs)}
    rows = [Compared.of(name, cell, *(results.get(f"{system}/{name}", {}) for system in (ours, theirs))) for name, cell in cells.items()]
    return sorted(rows, key=lambda row: (not row.slower, row.context, -row.batch))


def comparison(results: dict, title: str, ours: str, theirs: str) -> str:
    rows = []
    for row in compared(results, ours, theirs):
        tpot, retracted = [value and value * 1e3 for value in row.tpot[:2]], [each.get("retractions") for each in (row.ours, row.theirs)]
        named = row.name, row.slower or None, row.prefix
        rows.append((*named, *tpot, row.tpot[2], *row.ttft, *row.tokens, *row.decoding, *row.at_once, *retracted))
    twos = [f"{what}{which}" for what in ("tokens/s", "decoding", "at once", "retracted") for which in ("", ", stock")]
    return table((title, "slower in", "prefix", "TPOT ms", "stock", "ratio", "TTFT s", "stock", "ratio", *twos), rows)


def parse() -> argparse.Namespace:
    systems = [system for pair in PAIRS.values() for system in pair]
    parser = arguments(__doc__, "paper-crossover-SHAPE", [f"{system}/CONTEXTk/bBATCH" for system in systems])
    parser.add_argument("--shape", choices=SHAPES, default=Setup.shape)
    for name, kind, told in (
        ("contexts", int, "tokens of the prompts"),
        ("batches", int, "prompts at once"),
        ("tokens", int, "new tokens of a request"),
        ("interval", int, "tokens from one message of a stream to the next"),
        ("device-kv", float, "GiB of the device for all pools of KV of the -same-kv systems"),
    ):
        value = FULL[name.replace("-", "_")]
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        several = {"nargs": "+"} if isinstance(value, tuple) else {}
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"{told} (default: {shown})", **several)
    parser.add_argument("--most-tokens", type=int, default=1 << 19, help="of all prompts of a batch; larger batches are left out")
    parser.add_argument("--max-running", type=int, default=64, help="requests at once, at most, of both systems")
    parser.add_argument("--context-length", type=int, default=Setup.context_length)
    parser.add_argument("--host-memory", type=float, default=Setup.host_memory, metavar="GIB", help="FreeKV's --freekv-host-memory")
    parser.add_argument("--stock-flags", default="", metavar="FLAGS", help="further flags of stock SGLang: --stock-flags='--name value'")
    parser.add_argument("--freekv-flags", default="", metavar="FLAGS", help="the same for FreeKV")
    parser.add_argument("--minutes", type=float, default=28, help="when to stop, with what is measured by then")
    parser.add_argument("--part-seconds", type=float, default=300, help="most seconds for the requests of one cell")
    parser.add_argument("--dry-run", action="store_true", help="the needle model on a CPU, contexts a sixteenth, few tokens")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
    parser.add_argument("--tables", action="store_true", help="measure nothing; print the tables of the results in --out")
    options = parser.parse_args()
    options = argparse.Namespace(**((DRY if options.dry_run else FULL) | vars(options)))
    if options.tokens < (least := SETTLE_TOKENS + 2 * options.interval):
        parser.error(f"--tokens {options.tokens}: expected at least {least}, or there is no window to measure in; lower --interval too")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped on the way out
    extra = {"extra_stock": tuple(options.stock_flags.split()), "extra_freekv": tuple(options.freekv_flags.split())}
    sizes = {"context_length": options.context_length, "host_memory": options.host_memory, "max_running": options.max_running}
    setup = replace(DRY_RUN, max_running=4, **extra) if options.dry_run else Setup(options.shape, **sizes, **extra)
    report, wanted = Report(f"paper-crossover-{setup.shape}", options.out), chosen(options)

    def left(key: str) -> bool:
        return wanted(key) and (options.force or key not in report.results)

    if not options.tables:
        cells = cells_of(options.contexts, options.batches, options.most_tokens)
        systems, clock = systems_of(setup, int(options.device_kv * GIB)), Clock(options.minutes, options.part_seconds)
        if any(left(f"{system.name}/{cell.name}") for system in systems for cell in cells):
            report.note(ceilings=asdict(Ceilings.measure_apart(setup.device)))
        run(systems, cells, left, report, clock, options.tokens, options.interval)
    return report.finish(*(comparison(report.results, title, *pair) for title, pair in PAIRS.items()))


if __name__ == "__main__":
    sys.exit(main())
