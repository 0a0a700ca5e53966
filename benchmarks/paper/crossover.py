"""Where FreeKV begins to pay, server against server: time per token, time to the first token and throughput by context and batch.

    python -m benchmarks.paper.crossover --contexts 8192 --batches 32 16 4 1        # four servers, one after the other
    python -m benchmarks.paper.crossover --contexts 524288 1048576 --batches 1 --max-running 1
    python -m benchmarks.paper.crossover --only 'freekv*/128k/*'                    # what is there already is not measured again
    python -m benchmarks.paper.crossover --systems freekv-default-same-kv stock-same-kv-hicache
    python -m benchmarks.paper.crossover --suffix h200                              # on a card whose results have a file of their own
    python -m benchmarks.paper.crossover --tables                                   # from the JSON alone

``freekv-default`` has the default preset, under the load of its own profile. ``freekv-resident`` has the preset fast, under every load of
``--loads``. Both are held against the faster of ``stock-fa3`` and ``stock-flashinfer``, cell by cell and figure by figure. ``stock`` and
``freekv`` are FlashInfer and FreeKV with nothing resident. All pools of KV of a ``-same-kv`` server fit ``--device-kv`` on the device, and
FreeKV's pages stay while there is room in them. ``stock-same-kv-hicache`` keeps what gives way on the host, as FreeKV does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks import ttft
from benchmarks.bench_serving_pair import DRY_RUN
from benchmarks.clock import Clock
from benchmarks.paper.capacity import System, device_kv_bytes, expect_within, freekv_sizes, stock_tokens
from benchmarks.paper.cells import Asked, Cell, cells_of, measure, with_second_visits
from benchmarks.paper.comparison import comparison, long_answers
from benchmarks.profiles import LOADS, USUAL
from benchmarks.report import Report, add_suffix, arguments, chosen, suffixed
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, STOCK_PAGE, Setup, hicache_flags
from benchmarks.timing import Ceilings
from benchmarks.tpot import SETTLE_TOKENS
from sglang_freekv.config import GIB
from sglang_freekv.launch.server import ended_by_sigterm
from sglang_freekv.presets import DEFAULT_PRESET

RESIDENT, DEFAULT, SAME, BACKENDS = "freekv-resident", "freekv-default", "same-kv", ("fa3", "flashinfer")
HICACHE, DEFAULT_LOAD = f"stock-{SAME}-hicache", f"{DEFAULT_PRESET}-by-layer"
UNDER = {f"resident, {load}": load for load in LOADS}  # titles, and loads
FASTER = tuple(f"stock-{backend}" for backend in BACKENDS)  # of which stock SGLang's figures are the faster one's
PAIRS = {  # FreeKV, and what it is held against
    "default preset": (DEFAULT, *FASTER),
    **{title: (f"{RESIDENT}-{load}", *FASTER) for title, load in UNDER.items()},
    "production": ("freekv", "stock"),
    "same KV bytes on the device": (f"freekv-{SAME}", f"stock-{SAME}"),
    "same KV bytes on the device, HiCache": (f"freekv-{SAME}", HICACHE),
    "same KV bytes on the device, HiCache, default preset": (f"{DEFAULT}-{SAME}", HICACHE),
}
SYSTEMS = (DEFAULT, RESIDENT, *FASTER, "stock", "freekv", f"stock-{SAME}", HICACHE, f"freekv-{SAME}", f"{DEFAULT}-{SAME}")
ON_CUDA = (FASTER[0], HICACHE)  # a CPU has one backend, and none of HiCache's copies
FULL = {"contexts": (8192, 32768, 131072), "batches": (64, 16, 4, 1), "tokens": 256, "interval": 8, "passes": 3, "device_kv": 16.0}
DRY = {"contexts": (8192, 32768), "batches": (8, 1), "tokens": 24, "interval": 4, "passes": 3, "device_kv": 0.06}


class Job(NamedTuple):
    """A cell to be measured, under a load of ``LOADS`` or ``BY_PRESET``."""

    key: str
    cell: Cell
    load: str


def jobs_of(system: str, cells: Sequence[Cell], loads: Sequence[str]) -> list[Job]:
    """Residency is measured under all ``loads``: the first one's cells as they are, the others' as hits right behind. Servers of few bytes
    are sent large batches twice, because they differ in what they then still have."""
    if system != RESIDENT:
        load = DEFAULT_LOAD if system.startswith(DEFAULT) else USUAL
        return [Job(f"{system}/{cell.name}", cell, load) for cell in (with_second_visits(cells) if SAME in system else cells)]
    first, *others = loads
    jobs = []
    for cell in cells:
        jobs.append(Job(f"{RESIDENT}-{first}/{cell.name}", cell, first))
        if not cell.name.endswith("-cold"):
            hit = cell._replace(prefix="hit")
            jobs += [Job(f"{RESIDENT}-{load}/{hit.name}", hit, load) for load in others]
    return jobs


def system_of(name: str, setup: Setup, limit: int) -> System:
    """A server of ``SYSTEMS``. Those of the same KV may take ``limit`` bytes of the device for it.

    Raises:
        Refusal: not even one request of FreeKV fits ``limit``.
    """
    if name.startswith("stock"):
        backend = name.removeprefix("stock-")
        more = {"--attention-backend": backend} if backend in BACKENDS and setup.device == "cuda" else {}
        if SAME not in name:
            return System(name, "stock", setup, more)
        kept = hicache_flags(setup) if name == HICACHE else {}
        return System(name, "stock", setup, {"--max-total-tokens": stock_tokens(setup, limit)} | kept, limit)
    preset = DEFAULT_PRESET if name.startswith(DEFAULT) else setup.preset
    ours = replace(setup, preset=preset, resident=name != "freekv")
    if SAME not in name:
        return System(name, "freekv", ours)
    tokens, rows, resident = freekv_sizes(ours, limit)
    flags = {"--max-total-tokens": tokens, "--freekv-resident-memory": resident}
    return System(name, "freekv", replace(ours, max_running=rows), flags, limit)


def serve(server: BenchServer, system: System, jobs: list[Job], report: Report, clock: Clock, asked: Asked) -> None:
    """All that is left of one server."""
    facts = server.facts()
    held = device_kv_bytes(system.setup, facts)
    of_server = {"device_kv_bytes": held, "kv_dtype": system.setup.kv_dtype_of(system.base)}
    report.note(**{f"server {system.name}": facts | {"device_kv_bytes": held}})
    expect_within(system, held)
    with report.part(f"{system.name}/warm-up"):
        server.set_load(None)
        ttft.warm_up(server, clock.left())
    for key, cell, load in jobs:
        with report.part(key):
            report.add(key, measure(server, cell, load, facts, asked, clock.left) | of_server)


def run(systems: list[System], jobs: dict[str, list[Job]], report: Report, clock: Clock, asked: Asked) -> None:
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
                serve(server, system, mine, report, clock, asked)
            keep_log(Path(scratch) / f"{system.base}.log", report.path, system.name)


def mates_of(keys: Iterable[str]) -> set[str]:
    """The systems that the results of ``keys`` will be compared with, and their own."""
    measured = {key.split("/")[0] for key in keys}
    return {system for pair in PAIRS.values() if measured & set(pair) for system in pair}


def ensure_one_dtype(report: Report, systems: Iterable[System], mates: set[str]) -> None:
    """Raises SystemExit if a result of ``mates`` has KV that ``systems``, of FreeKV or of stock SGLang, would store otherwise."""
    asked = {system.base: system.setup.kv_dtype_of(system.base) for system in systems}
    for key, result in report.results.items():
        name, found = key.split("/")[0], result.get("kv_dtype", "auto")
        wanted = asked.get("stock" if name.startswith("stock") else "freekv", found)
        if name in mates and found != wanted:
            raise SystemExit(
                f"{report.path}: {key} has KV in {found}, expected {wanted}; give --suffix NAME, and a file of its own is written"
            )


def context_length_of(options: argparse.Namespace) -> int:
    """As asked for, or so many tokens that the longest request fits."""
    longest = max(options.contexts) + options.tokens + 2 * STOCK_PAGE
    return options.context_length or max(Setup.context_length, -(-longest // 4096) * 4096)


def parse() -> argparse.Namespace:
    measured = dict.fromkeys(system for pair in PAIRS.values() for system in pair)
    parser = arguments(__doc__, "paper-crossover-SHAPE", [f"{system}/CONTEXTk/bBATCH" for system in measured])
    parser.add_argument("--shape", choices=SHAPES, default=Setup.shape)
    add_suffix(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS[:4], help="servers to start, in this order")
    told = f"replayed by {RESIDENT}; {DEFAULT} has {DEFAULT_LOAD}, the others {USUAL}"
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help=told)
    for name, kind, told in (
        ("contexts", int, "tokens of the prompts"),
        ("batches", int, "prompts at once"),
        ("tokens", int, "new tokens of a request"),
        ("interval", int, "tokens from one message of a stream to the next"),
        ("passes", int, "how often a cell is measured; its figures are the medians"),
        ("device-kv", float, "GiB of the device for all pools of KV of the -same-kv systems"),
    ):
        value = FULL[name.replace("-", "_")]
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        several = {"nargs": "+"} if isinstance(value, tuple) else {}
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"{told} (default: {shown})", **several)
    parser.add_argument("--most-tokens", type=int, default=1 << 19, help="of all prompts of a batch of several; larger ones are left out")
    parser.add_argument("--max-running", type=int, default=64, help="requests at once, at most, of both systems")
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help=f"of the servers; if it is not given, {Setup.context_length} or what the contexts need",
    )
    parser.add_argument(
        "--host-memory", type=float, default=Setup.host_memory, metavar="GIB", help="FreeKV's --freekv-host-memory, and HiCache's pool"
    )
    parser.add_argument(
        "--stock-flags",
        default="",
        metavar="FLAGS",
        help="further flags of stock SGLang: --stock-flags='--name value'. Keys of results do not tell them: give --suffix, too. A file that "
        "has results with another --kv-cache-dtype is refused",
    )
    parser.add_argument("--freekv-flags", default="", metavar="FLAGS", help="the same for FreeKV")
    parser.add_argument("--minutes", type=float, default=28, help="when to stop, with what is measured by then")
    parser.add_argument("--part-seconds", type=float, default=300, help="most seconds for the requests of one pass")
    parser.add_argument("--dry-run", action="store_true", help="the needle model on a CPU, contexts a sixteenth, few tokens")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
    parser.add_argument("--tables", action="store_true", help="measure nothing; print the tables of the results in --out")
    options = parser.parse_args()
    options = argparse.Namespace(**((DRY if options.dry_run else FULL) | vars(options)))
    if options.tokens < (least := SETTLE_TOKENS + 2 * options.interval):
        parser.error(f"--tokens {options.tokens}: expected at least {least}, or there is no window to measure in; lower --interval too")
    if options.passes < 1:
        parser.error(f"--passes {options.passes}: expected at least 1")
    return options


def setup_of(options: argparse.Namespace) -> Setup:
    extra = {"extra_stock": tuple(options.stock_flags.split()), "extra_freekv": tuple(options.freekv_flags.split())}
    sizes = {"context_length": context_length_of(options), "host_memory": options.host_memory, "max_running": options.max_running}
    return replace(DRY_RUN, **sizes | {"max_running": 4}, **extra) if options.dry_run else Setup(options.shape, **sizes, **extra)


@ended_by_sigterm()
def main() -> int:
    options = parse()
    setup = setup_of(options)
    report, wanted = Report(suffixed(f"paper-crossover-{setup.shape}", options), options.out), chosen(options)

    def left(job: Job) -> bool:
        return options.force or job.key not in report.results

    if not options.tables:
        cells = cells_of(options.contexts, options.batches, options.most_tokens)
        clock = Clock(options.minutes, options.part_seconds)
        names = [name for name in options.systems if setup.device == "cuda" or name not in ON_CUDA]
        systems = [system_of(name, setup, int(options.device_kv * GIB)) for name in names]
        asked = {name: [job for job in jobs_of(name, cells, options.loads) if wanted(job.key)] for name in names}
        ensure_one_dtype(report, systems, mates_of(job.key for jobs in asked.values() for job in jobs))
        jobs = {name: list(filter(left, asked[name])) for name in names}
        if any(jobs.values()):
            mates = mates_of(job.key for each in jobs.values() for job in each)
            report.ensure_one_device(lambda key: key.split("/")[0] in mates)
            report.note(ceilings=asdict(Ceilings.measure_apart(setup.device)))
        run(systems, jobs, report, clock, Asked(options.tokens, options.interval, options.passes))
    measured = {key.split("/")[0] for key in report.results}
    pairs = [(title, pair) for title, pair in PAIRS.items() if measured & set(pair)]
    shown = (show(report.results, title, *pair) for title, pair in pairs for show in (comparison, long_answers))
    return report.finish(*filter(None, shown))


if __name__ == "__main__":
    sys.exit(main())
