"""Stock SGLang and FreeKV on one shape, each started once: time to the first token, and time per output token."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import tpot, ttft
from benchmarks.clock import Clock
from benchmarks.report import Report, arguments, chosen
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, SYSTEMS, Setup
from sglang_freekv.launch.server import ended_by_sigterm

CONTEXTS = (32768, 131072)
PARTS = (*(f"prefill-{ttft.name_of(context)}" for context in CONTEXTS), *(f"decode-{case.name}" for case in tpot.CASES))
DRY_RUN = Setup(shape="needle", device="cpu", scale=16, budget=512)


def run_parts(server: BenchServer, wanted, clock: Clock, prefill: Report, decode: Report, settings: dict) -> None:
    """All parts that are wanted of one server; the tree is emptied where a part needs it."""
    system = server.system
    facts = server.facts()
    for report in (prefill, decode):
        report.note(**{f"server {system}": facts})
    with decode.part(f"{system}/warm-up"):
        server.set_load(None)
        ttft.warm_up(server, clock.left())
    for context in CONTEXTS:
        name = ttft.name_of(context)
        if wanted(f"prefill-{name}") and system != "copies-off":
            with prefill.part(f"{system}/prefill-{name}"):
                server.flush()
                ttft.measure(server, context, prefill, clock.left())
        for case in tpot.cases_of(system, context):
            if wanted(f"decode-{case.name}"):
                with decode.part(f"{system}/{case.name}"):
                    tpot.measure(server, case, decode, clock.left(), **settings)
        server.flush()


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "bench_decode-SHAPE and bench_prefill-SHAPE", PARTS)
    parser.add_argument("--shape", choices=(*SHAPES, "needle"), default=Setup.shape)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="servers to start, in this order")
    parser.add_argument("--minutes", type=float, default=9, help="when to stop, with what is measured by then")
    parser.add_argument("--part-seconds", type=float, default=150, help="most seconds for the requests of one part")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens of a request")
    parser.add_argument("--repeats", type=int, default=2, help="passes of a decode case that count")
    parser.add_argument("--context-length", type=int, default=Setup.context_length)
    parser.add_argument("--host-memory", type=float, default=Setup.host_memory, metavar="GIB", help="FreeKV's --freekv-host-memory")
    parser.add_argument("--stock-flags", default="", metavar="FLAGS", help="further flags of stock SGLang: --stock-flags='--name value'")
    parser.add_argument("--freekv-flags", default="", metavar="FLAGS", help="the same for FreeKV")
    parser.add_argument("--dry-run", action="store_true", help="the needle model on a CPU, contexts a sixteenth, 24 tokens")
    parser.add_argument("--tables", action="store_true", help="measure nothing; print the tables of the results in --out")
    return parser.parse_args()


@ended_by_sigterm()
def main() -> int:
    options = parse()
    settings = {"tokens": options.tokens, "repeats": options.repeats}
    setup = Setup(
        shape=options.shape,
        context_length=options.context_length,
        host_memory=options.host_memory,
        extra_stock=tuple(options.stock_flags.split()),
        extra_freekv=tuple(options.freekv_flags.split()),
    )
    if options.dry_run:
        setup, settings = DRY_RUN, {"tokens": 24, "repeats": 1, "interval": 4}
    decode, prefill = (Report(f"bench_{name}-{setup.shape}", options.out) for name in ("decode", "prefill"))
    clock = Clock(options.minutes, options.part_seconds)
    with tempfile.TemporaryDirectory() as scratch:
        for system in () if options.tables else options.systems:
            with decode.part(f"server {system}"):
                with running(setup, system, Path(scratch), clock.left_to_start()) as server:
                    run_parts(server, chosen(options), clock, prefill, decode, settings)
            keep_log(Path(scratch) / f"{system}.log", decode.path, system)
    prefill.finish()
    return decode.finish(ttft.ratios(prefill.results), tpot.ratios(decode.results)) or bool(prefill.failures)


if __name__ == "__main__":
    sys.exit(main())
