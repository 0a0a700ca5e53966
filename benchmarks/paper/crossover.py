"""Where FreeKV begins to pay, server against server: time per token, time to the first token and throughput by context and batch.

    python -m benchmarks.paper.crossover --contexts 8192 --batches 32 16 4 1        # three servers, one after the other
    python -m benchmarks.paper.crossover --only 'freekv*/128k/*'                    # what is there already is not measured again
    python -m benchmarks.paper.crossover --systems stock freekv                     # without residency
    python -m benchmarks.paper.crossover --suffix h200                              # on a card whose results have a file of their own
    python -m benchmarks.paper.crossover --tables                                   # from the JSON alone

``freekv-resident`` has the preset fast, under every load of ``--loads``. It is held against the faster of ``stock-fa3`` and
``stock-flashinfer``, cell by cell and figure by figure. ``stock`` and ``freekv`` are FlashInfer and FreeKV with nothing resident; of the
``-same-kv`` two, all pools of KV on the device fit ``--device-kv``, and FreeKV's pages stay while there is room in them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import ttft
from benchmarks.bench_serving_pair import DRY_RUN
from benchmarks.clock import Clock
from benchmarks.paper.capacity import System, bytes_of, device_kv_bytes, expect_within, systems_of
from benchmarks.paper.comparison import comparison, long_answers
from benchmarks.paper.passes import figures_of, prefix_of
from benchmarks.profiles import LOADS, USUAL
from benchmarks.report import Report, add_suffix, arguments, chosen, suffixed
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, Setup
from benchmarks.timing import Ceilings
from benchmarks.tpot import SETTLE_TOKENS, achieved, prompts_of
from sglang_freekv.config import GIB

RESIDENT, BACKENDS = "freekv-resident", ("fa3", "flashinfer")
UNDER = {f"resident, {load}": load for load in LOADS}  # titles, and loads
FASTER = tuple(f"stock-{backend}" for backend in BACKENDS)  # of which stock SGLang's figures are the faster one's
PAIRS = {  # FreeKV, and what it is held against
    "production": ("freekv", "stock"),
    "same KV bytes on the device": ("freekv-same-kv", "stock-same-kv"),
} | {title: (f"{RESIDENT}-{load}", *FASTER) for title, load in UNDER.items()}
SYSTEMS = (RESIDENT, *FASTER, "stock", "freekv", "stock-same-kv", "freekv-same-kv")
FULL = {"contexts": (8192, 32768, 131072), "batches": (64, 16, 4, 1), "tokens": 256, "interval": 8, "device_kv": 16.0}
HIT_PASSES = 8  # over prompts in the tree, for times to the first token, before the pass that all else is measured in
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


class Job(NamedTuple):
    """A cell to be measured, under a load of ``LOADS``."""

    key: str
    cell: Cell
    load: str


def jobs_of(system: str, cells: Sequence[Cell], loads: Sequence[str]) -> list[Job]:
    """Residency is measured under all ``loads``: the first one's cells as they are, the others' as hits right behind."""
    if system != RESIDENT:
        return [Job(f"{system}/{cell.name}", cell, USUAL) for cell in cells]
    first, *others = loads
    jobs = []
    for cell in cells:
        jobs.append(Job(f"{RESIDENT}-{first}/{cell.name}", cell, first))
        if not cell.name.endswith("-cold"):
            hit = cell._replace(prefix="hit")
            jobs += [Job(f"{RESIDENT}-{load}/{hit.name}", hit, load) for load in others]
    return jobs


def resident_systems(setup: Setup) -> list[System]:
    """FreeKV with pages resident, and stock SGLang with each of its backends; a CPU has one of its own."""
    backends = BACKENDS if setup.device == "cuda" else BACKENDS[-1:]
    flags = {backend: {"--attention-backend": backend} if setup.device == "cuda" else {} for backend in backends}
    stock = [System(f"stock-{backend}", "stock", setup, more) for backend, more in flags.items()]
    return [System(RESIDENT, "freekv", replace(setup, resident=True)), *stock]


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


def measure(server: BenchServer, cell: Cell, load: str, facts: dict, tokens: int, interval: int, deadline_s: float) -> dict:
    """One cell. A prompt that the server's pool cannot hold is no failure, but a result."""
    setup, context = server.setup, cell.context // server.setup.scale
    if context + tokens + setup.page_size >= facts["max_total_num_tokens"]:
        return {"cell": cell._asdict(), "prefix": "no room", "at_once": 0}
    server.set_load(setup.named_load(load, context))
    prompts, firsts = prompts_of(setup, cell.context, cell.batch), []
    if cell.prefix == "cold":
        server.flush()
    else:
        server.stream_all(prompts, SETTLE_TOKENS, deadline_s)  # what is in the tree no longer is computed, and not counted
        firsts = [stream.ttft for _ in range(HIT_PASSES) for stream in server.stream_all(prompts, 2, deadline_s)]
    log_begins = len(server.logged())
    streams = server.stream_all(prompts, tokens, deadline_s, interval)
    figures = figures_of(streams, firsts)
    shares = achieved(setup, streams)
    return {
        "cell": cell._asdict(),
        "load": load,
        "scale": setup.scale,
        "new_tokens": tokens,
        "prefix": prefix_of(streams, setup.page_size),
        **figures,
        "retractions": server.retractions(log_begins),
        **{name: shares[name] for name in ("corrected", "missed") if name in shares},
        **bytes_of(setup, server.system, context, figures["window_requests"], shares.get("missed", 0.0)),
    }


def serve(server: BenchServer, system: System, jobs: list[Job], report: Report, clock: Clock, tokens: int, interval: int) -> None:
    """All that is left of one server."""
    facts = server.facts()
    held = device_kv_bytes(system.setup, facts)
    report.note(**{f"server {system.name}": facts | {"device_kv_bytes": held}})
    expect_within(system, held)
    with report.part(f"{system.name}/warm-up"):
        server.set_load(None)
        ttft.warm_up(server, clock.left())
    for key, cell, load in jobs:
        with report.part(key):
            result = measure(server, cell, load, facts, tokens, interval, clock.left())
            report.add(key, result | {"device_kv_bytes": held})


def run(systems: list[System], jobs: dict[str, list[Job]], report: Report, clock: Clock, tokens: int, interval: int) -> None:
    """One server after the other; none of which nothing is left.

    Args:
        jobs: what is left, by system.
    """
    for system in systems:
        mine = jobs[system.name]
        if not mine:
            continue
        with report.part(f"server {system.name}"), tempfile.TemporaryDirectory() as scratch:
            with running(system.setup, system.base, Path(scratch), clock.left_to_start(), system.more) as server:
                serve(server, system, mine, report, clock, tokens, interval)
            keep_log(Path(scratch) / f"{system.base}.log", report.path, system.name)


def mates_of(keys: Iterable[str]) -> set[str]:
    """The systems that the results of ``keys`` will be compared with, and their own."""
    measured = {key.split("/")[0] for key in keys}
    return {system for pair in PAIRS.values() if measured & set(pair) for system in pair}


def parse() -> argparse.Namespace:
    measured = dict.fromkeys(system for pair in PAIRS.values() for system in pair)
    parser = arguments(__doc__, "paper-crossover-SHAPE", [f"{system}/CONTEXTk/bBATCH" for system in measured])
    parser.add_argument("--shape", choices=SHAPES, default=Setup.shape)
    add_suffix(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS[:3], help="servers to start, in this order")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help=f"replayed by {RESIDENT}; the others: {USUAL}")
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
    report, wanted = Report(suffixed(f"paper-crossover-{setup.shape}", options), options.out), chosen(options)

    def left(key: str) -> bool:
        return wanted(key) and (options.force or key not in report.results)

    if not options.tables:
        cells = cells_of(options.contexts, options.batches, options.most_tokens)
        clock = Clock(options.minutes, options.part_seconds)
        known = {system.name: system for system in (*resident_systems(setup), *systems_of(setup, int(options.device_kv * GIB)))}
        systems = [known[name] for name in options.systems if name in known]
        jobs = {name: [job for job in jobs_of(name, cells, options.loads) if left(job.key)] for name in known}
        if any(jobs[system.name] for system in systems):
            mates = mates_of(job.key for system in systems for job in jobs[system.name])
            report.ensure_one_device(lambda key: key.split("/")[0] in mates)
            report.note(ceilings=asdict(Ceilings.measure_apart(setup.device)))
        run(systems, jobs, report, clock, options.tokens, options.interval)
    shown = (show(report.results, title, *pair) for title, pair in PAIRS.items() for show in (comparison, long_answers))
    return report.finish(*filter(None, shown))


if __name__ == "__main__":
    sys.exit(main())
