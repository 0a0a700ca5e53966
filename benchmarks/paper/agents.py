"""Agents: how many turns a second of their growing conversations are answered with TTFT below 2 s and TPOT below 50 ms.

    python -m benchmarks.paper.agents --shape llama-3.1-8b
    python -m benchmarks.paper.agents --systems freekv stock-hicache --agents 16 32
    python -m benchmarks.paper.agents --device cpu --out DIRECTORY                  # a trial; its times mean nothing
    python -m benchmarks.paper.agents --tables                                      # from the JSON alone

An agent sends its whole history, is answered, waits for a tool, appends what the tool returned, and sends the next turn. A level of the
load is a number of agents that do so side by side. Levels rise until a server is saturated. ``sglang.bench_serving`` has conversations,
but no time to think in them, and it needs chat templates. Turns are therefore sent to ``/generate``, as token ids.

``freekv`` has the server's default preset and replays that preset's load. ``stock-hicache`` has as much host memory as FreeKV.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import ttft
from benchmarks.bench_load import Counts
from benchmarks.clock import Clock
from benchmarks.paper.capacity import System
from benchmarks.paper.conversations import Crew, Talk, Window
from benchmarks.paper.crossover import BACKENDS, DEFAULT_LOAD, FASTER
from benchmarks.paper.ladder import LEAST_START_S, Ladder, Limits, add_limits, best_of, point_of, rows_of
from benchmarks.report import Report, add_suffix, arguments, chosen, say, suffixed, table
from benchmarks.servers import BenchServer, Stream, keep_log, running
from benchmarks.setups import SHAPES, Setup, hicache_flags
from benchmarks.timing import Ceilings
from sglang_freekv.launch.server import ended_by_sigterm
from sglang_freekv.presets import DEFAULT_PRESET

HICACHE, FREEKV = "stock-hicache", "freekv"
SYSTEMS = (*FASTER, HICACHE, FREEKV)
SCALE = 16  # of a trial
FULL = {"agents": (4, 8, 16, 32, 64), "seconds": 60.0, "apart": 1.0, "turns": 12, "think": 2.0, "systems": SYSTEMS}
DRY = {"agents": (1, 2), "seconds": 10.0, "apart": 0.5, "turns": 4, "think": 0.5, "systems": (FASTER[-1], FREEKV)}
DRAIN_S = 30  # beyond ramp and window, that a level is begun with
SETTLE_S = 1  # in which HiCache ends its copies to the host, before the tree is emptied
LEAST_CONTEXT = 40960  # room for the warm-up's prompts
COLUMNS = ("rate", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput", "hit_rate")
HEADER = ("agents", "goodput", "within", "turns/s", "TTFT ms", "p99", "TPOT ms", "p99", "tokens/s", "hit rate", "context", "retractions")


class Plan(NamedTuple):
    """What agents do at each level.

    Args:
        seconds: that turns are counted for.
        apart_s: seconds from one agent's start to the next one's.
    """

    talk: Talk
    seconds: float
    apart_s: float

    def least_s(self, agents: float) -> float:
        """Seconds that a level is begun with."""
        return agents * self.apart_s + self.seconds + DRAIN_S


def systems_of(setup: Setup) -> dict[str, System]:
    """By name. HiCache copies by CUDA kernels, and a CPU has one attention backend."""
    freekv = System(FREEKV, "freekv", replace(setup, preset=DEFAULT_PRESET, resident=True))
    if setup.device == "cpu":
        systems = [System(FASTER[-1], "stock", setup), freekv]
    else:
        flags = {name: {"--attention-backend": backend} for name, backend in zip(FASTER, BACKENDS)}
        flags[HICACHE] = flags[FASTER[0]] | hicache_flags(setup)  # SGLang's own choice of a backend on Hopper
        systems = [*(System(name, "stock", setup, more) for name, more in flags.items()), freekv]
    return {system.name: system for system in systems}


def figures_of(streams: Sequence[Stream], window: Window) -> dict:
    """What the turns say that were sent within the window, and of its tokens those that arrived in it."""
    turns, seconds = [stream for stream in streams if window.holds(stream)], window.end - window.begin
    prompts = [stream.meta["prompt_tokens"] for stream in turns]
    cached = [stream.meta["cached_tokens"] for stream in turns]
    from_host = [(stream.meta.get("cached_tokens_details") or {}).get("host", 0) for stream in turns]
    times = {"ttft": [stream.ttft for stream in turns], "tpot": [stream.tpot for stream in turns]}
    return {
        "seconds": seconds,
        "ramp_s": window.ramp_s,
        "turns": len(turns),
        "rate": len(turns) / seconds,
        "output_throughput": sum(map(window.tokens, streams)) / seconds,
        "hit_rate": sum(cached) / sum(prompts) if turns else None,
        "host_hit_rate": sum(from_host) / sum(prompts) if turns else None,
        "median_context": statistics.median(prompts) if turns else None,
        "max_context": max(prompts, default=None),
        **{f"median_{name}_ms": statistics.median(each) * 1e3 if each else None for name, each in times.items()},
        **{f"p99_{name}_ms": float(np.percentile(each, 99)) * 1e3 if each else None for name, each in times.items()},
        **{f"{name}s": [round(value, 5) for value in each] for name, each in times.items()},
    }


def measure(server: BenchServer, plan: Plan, agents: int, deadline_s: float) -> dict:
    """One level, from an empty tree.

    Raises:
        RuntimeError: a turn failed, something is held when all is done, or the server logged an error.
    """
    server.flush()
    counts, crew = Counts(server), Crew(server, plan.talk, agents, deadline_s)
    window = crew.work(plan.seconds, plan.apart_s)
    time.sleep(SETTLE_S)
    return {"agents": agents, "talk": asdict(plan.talk)} | figures_of(crew.streams, window) | counts.at_rest()


def climb(server: BenchServer, system: System, ladder: Ladder[Plan], report: Report, clock: Clock) -> None:
    """Level after level; one that fails is the last, for those above it ask for more."""
    setup, plan, failures = system.setup, ladder.asked, len(report.failures)
    replayed = {"load": DEFAULT_LOAD} if system.base == "freekv" and setup.shape != "needle" else {}
    report.note(**{f"server {system.name}": server.facts()})
    server.set_load(None)
    ttft.warm_up(server, clock.left())
    if replayed:
        server.set_load(setup.named_load(DEFAULT_LOAD, plan.talk.usual))
    while len(report.failures) == failures and (agents := ladder.next(report.results, system.name)) is not None:
        key = f"{system.name}/{agents:g}"
        with report.part(key):
            result = measure(server, plan, agents, clock.left(plan.least_s(agents)))
            point = point_of(result, ladder.limits)
            report.add(key, result | {"limits": ladder.limits._asdict()} | replayed)
            say(f"{key}: {point.goodput:.3g} turns per second within limits, {point.within:.0%} of them")


def run(systems: Sequence[System], ladder: Ladder[Plan], report: Report, clock: Clock) -> None:
    """One server after the other; none of which nothing is left."""
    for system in systems:
        if ladder.next(report.results, system.name) is None:
            continue
        with report.part(f"server {system.name}"), tempfile.TemporaryDirectory() as scratch:
            try:
                with running(system.setup, system.base, Path(scratch), clock.left_to_start(LEAST_START_S), system.more) as server:
                    climb(server, system, ladder, report, clock)
            finally:
                keep_log(Path(scratch) / f"{system.base}.log", report.path, system.name)


def goodputs(results: dict, limits: Limits) -> str:
    """Level by level, and the best of each system."""
    order = SYSTEMS, "agents"
    rows = [
        (system, agents, *point, *(result[name] for name in (*COLUMNS, "median_context", "retractions")))
        for system, agents, point, result in rows_of(results, limits, *order)
    ]
    best = best_of(results, limits, *order)
    told = ", ".join(f"{system} {goodput:.3g}" for system, goodput in best.items())
    stock = max((goodput for system, goodput in best.items() if system != FREEKV), default=0.0)
    ratio = f"; {FREEKV} / the best of the others {best[FREEKV] / stock:.3g}" if stock and FREEKV in best else ""
    return f"{table(('conversations that grow', *HEADER), rows)}\nbest goodput, turns per second: {told or 'none'}{ratio}"


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "paper-agents-SHAPE", [f"{system}/AGENTS" for system in SYSTEMS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=f"cpu: the needle model, lengths by {SCALE}; no HiCache")
    parser.add_argument("--shape", choices=SHAPES, default=Setup.shape)
    add_suffix(parser)
    told = f"servers to start, in this order (default: all, and on a CPU {' '.join(DRY['systems'])})"
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=argparse.SUPPRESS, help=told)
    for name, kind, told in (
        ("agents", int, "agents at once, of each level"),
        ("seconds", float, "that turns are counted for, behind the ramp"),
        ("apart", float, "seconds from one agent's start to the next one's"),
        ("turns", int, "of a conversation"),
        ("think", float, "seconds from an answer to the next turn, in the mean"),
    ):
        shown = " ".join(map(str, value)) if isinstance(value := FULL[name], tuple) else value
        several = {"nargs": "+"} if isinstance(value, tuple) else {}
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"{told} (default: {shown})", **several)
    parser.add_argument("--tools", type=int, default=2048, help="tokens that all prompts begin with")
    parser.add_argument("--task", type=int, default=14336, help="tokens that follow in a conversation's first prompt")
    parser.add_argument("--answer", type=int, default=192, help="tokens of each turn")
    parser.add_argument("--observation", type=int, default=2048, help="tokens appended to an answer, in the mean")
    parser.add_argument("--host-memory", type=float, default=75, metavar="GIB", help="of FreeKV's host pool, and of HiCache's")
    add_limits(parser)
    options = parser.parse_args()
    options = argparse.Namespace(**((DRY if options.device == "cpu" else FULL) | vars(options)))
    if min(*options.agents, options.turns, options.answer, options.task, 1) < 1:
        parser.error("--agents, --turns, --answer and --task: expected at least 1 of each")
    if options.device == "cpu" and not set(options.systems) <= set(DRY["systems"]):
        parser.error(f"--systems {' '.join(options.systems)}: a CPU serves {' and '.join(DRY['systems'])}; HiCache and FA3 need a GPU")
    return options


def setup_of(options: argparse.Namespace, talk: Talk) -> Setup:
    """Of stock SGLang; ``talk`` has lengths that are not yet divided."""
    extra = {"extra_stock": tuple(options.stock_flags.split()), "extra_freekv": tuple(options.freekv_flags.split())}
    sizes = {"context_length": max(talk.longest + 1024, LEAST_CONTEXT), "max_running": options.max_running, **extra}
    if options.device == "cpu":
        return Setup("needle", "cpu", scale=SCALE, budget=256, **sizes)
    return Setup(options.shape, host_memory=options.host_memory, **sizes)


def measure_all(options: argparse.Namespace, setup: Setup, plan: Plan, limits: Limits, report: Report) -> None:
    """What is left of the systems that were asked for.

    Raises:
        SystemExit: the file has results of another card, or of other conversations.
    """
    known, since = systems_of(setup), len(report.runs) - 1 if options.force else 0
    systems = [known[name] for name in options.systems]
    ladder = Ladder(plan, limits, tuple(sorted(set(options.agents))), chosen(options), since)
    if any(ladder.next(report.results, system.name) is not None for system in systems):
        if any(result["talk"] != asdict(plan.talk) for result in report.results.values()):
            raise SystemExit(f"{report.path}: expected results of {plan.talk} alone, found others; give --suffix NAME")
        report.ensure_one_device(lambda key: True)
        report.note(ceilings=asdict(Ceilings.measure_apart(options.device)))
    run(systems, ladder, report, Clock(options.minutes, options.part_seconds))


@ended_by_sigterm()
def main() -> int:
    options = parse()
    whole = Talk(options.tools, options.task, options.turns, options.answer, options.observation, options.think)
    setup, limits = setup_of(options, whole), Limits(options.ttft, options.tpot)
    plan = Plan(whole.divided(setup.scale), options.seconds, options.apart)
    if (least := plan.least_s(max(options.agents))) > options.part_seconds:
        raise SystemExit(f"--part-seconds {options.part_seconds:g}: expected at least {least:g} for {max(options.agents)} agents")
    report = Report(suffixed(f"paper-agents-{setup.shape}", options), options.out)
    if not options.tables:
        measure_all(options, setup, plan, limits, report)
    return report.finish(goodputs(report.results, limits))


if __name__ == "__main__":
    sys.exit(main())
