"""Goodput: of the requests offered a second those whose first token comes within 2 s, and the others 50 ms apart in the mean.

    python -m benchmarks.paper.goodput --shape llama-3.1-8b
    python -m benchmarks.paper.goodput --device cpu --out DIRECTORY                 # a trial; its times mean nothing
    python -m benchmarks.paper.goodput --tables                                     # from the JSON alone

Requests of ``sglang.bench_serving`` ask about a few long documents. Each rate begins with all documents in the prefix tree and no question
there; what a document costs that is not there is told apart, as ``cold_ttfts_s``. Rates rise until a server is saturated.

``freekv`` has the server's default preset, ``freekv-fast`` the preset fast; each replays its own load.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.bench_load import DETAILS, SERIAL, SHARED, Client, TextSetup, measure_on
from benchmarks.clock import Clock
from benchmarks.paper.capacity import System, request_bytes
from benchmarks.paper.crossover import DEFAULT_LOAD
from benchmarks.paper.ladder import LEAST_START_S, Ladder, Limits, add_limits, best_of, offered_of, point_of, rows_of
from benchmarks.profiles import NEAREST
from benchmarks.report import Report, add_suffix, arguments, chosen, say, suffixed, table
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, Setup
from benchmarks.timing import Ceilings
from benchmarks.tpot import missed_of
from sglang_freekv.launch.server import ended_by_sigterm
from sglang_freekv.presets import DEFAULT_PRESET

STOCK, FREEKV, FAST = "stock", "freekv", "freekv-fast"
SYSTEMS = STOCK, FREEKV, FAST
PRESETS = {FREEKV: DEFAULT_PRESET, FAST: "fast"}
REPLAYED = {FREEKV: DEFAULT_LOAD, FAST: NEAREST}
RATES = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)  # requests per second; SGLang's tokenizer takes some 80 ms for a document's prompt
WARM_QUESTION, WARM_ANSWER = 1, 8  # tokens
LEAST_RATE_S = 60  # that a rate is begun with
COLUMNS = ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput", "hit_rate")
HEADER = ("rate", "offered", "goodput", "within", "ended/s", "TTFT ms", "p99", "TPOT ms", "p99", "tokens/s", "hit rate")
RATIO = 0.999  # of shortest to longest; see bench_load for why it is not 1


@dataclass(frozen=True)
class Questions:
    """What is asked.

    Args:
        groups: documents.
        document, question, answer: tokens.
        seconds: that a rate is offered for.
        most: requests of one rate, at most.
    """

    groups: int
    document: int
    question: int
    answer: int
    seconds: float
    most: int

    @property
    def tokens(self) -> int:
        return self.document + self.question + self.answer

    def per_group(self, rate: float) -> int:
        """Requests about each document at so many requests per second."""
        return max(1, min(round(rate * self.seconds), self.most) // self.groups)

    def flags(self, per_group: int, question: int, answer: int) -> dict:
        """bench_serving's, for so many requests of each document. The same seed makes the same documents."""
        return {
            "--num-prompts": self.groups * per_group,
            "--gsp-num-groups": self.groups,
            "--gsp-prompts-per-group": per_group,
            "--gsp-system-prompt-len": self.document,
            "--gsp-question-len": question,
            "--gsp-output-len": answer,
            "--gsp-range-ratio": RATIO,
        }


def tpots_of(line: dict) -> list[float]:
    """Mean seconds from one token to the next, by request, of what bench_serving wrote."""
    return [sum(gaps) / max(1, count - 1) for gaps, count in zip(line["itls"], line["output_lens"])]


def warm(client: Client, server: BenchServer, questions: Questions) -> list[float]:
    """Empties the tree, then asks about each document once, one after the other; seconds to the first tokens."""
    server.flush()
    line = client.run(server, f"{SHARED}/{SERIAL}", questions.flags(1, WARM_QUESTION, WARM_ANSWER))
    return line["ttfts"]


def measure(client: Client, server: BenchServer, questions: Questions, rate: float) -> dict:
    """One rate on documents that are in the tree."""
    cold = warm(client, server, questions)
    more = questions.flags(questions.per_group(rate), questions.question, questions.answer)
    result = measure_on(client, server, f"{SHARED}/{rate:g}", more, (*DETAILS, "ttfts", "itls"))
    tpots = tpots_of(result)
    del result["itls"]
    moved = request_bytes(server.setup, server.system, questions.document, questions.answer, missed_of(result.get("totals")))
    return result | {"rate": rate, "tpots": tpots, "cold_ttfts_s": cold, "request_bytes": moved}


def system_of(name: str, setup: Setup) -> System:
    """A server of ``SYSTEMS``."""
    return System(name, FREEKV, replace(setup, preset=PRESETS[name])) if name in PRESETS else System(name, STOCK, setup)


def climb(client: Client, system: System, ladder: Ladder[Questions], report: Report, clock: Clock) -> None:
    """One server, rate after rate; one that fails is the last, for those above it ask for more."""
    setup, questions = system.setup, ladder.asked
    load = REPLAYED.get(system.name) if setup.shape != "needle" else None
    replayed = {"load": load} if load else {}
    with running(setup, system.base, client.directory, clock.left_to_start(LEAST_START_S)) as server:
        report.note(**{f"server {system.name}": server.facts()})
        server.set_load(setup.named_load(load, questions.tokens) if load else None)
        client.deadline_s = clock.left()
        warm(client, server, questions)  # everything compiles: documents, then questions that hit them
        client.run(server, f"{SHARED}/inf", questions.flags(2, questions.question, WARM_ANSWER))
        failures = len(report.failures)
        while len(report.failures) == failures and (rate := ladder.next(report.results, system.name)) is not None:
            key = f"{system.name}/{rate:g}"
            with report.part(key):
                client.deadline_s = clock.left(LEAST_RATE_S)
                result = measure(client, server, questions, rate)
                point = point_of(result, ladder.limits)
                report.add(key, result | {"limits": ladder.limits._asdict()} | replayed)
                say(f"{key}: {point.goodput:.3g} requests per second within limits, {point.within:.0%} of them")


def run(client: Client, systems: Sequence[System], ladder: Ladder[Questions], report: Report, clock: Clock) -> None:
    """One server after the other; none of which nothing is left."""
    for system in systems:
        if ladder.next(report.results, system.name) is not None:
            with report.part(f"server {system.name}"):
                climb(client, system, ladder, report, clock)
            keep_log(client.directory / f"{system.base}.log", report.path, system.name)


def goodputs(results: dict, limits: Limits) -> str:
    """Rate by rate, and the best of each system."""
    rows = [
        (system, rate, offered_of(result), *point, *(result[name] for name in COLUMNS))
        for system, rate, point, result in rows_of(results, limits, SYSTEMS)
    ]
    best = best_of(results, limits, SYSTEMS)
    told = ", ".join(f"{system} {goodput:.3g}" for system, goodput in best.items())
    stock, ours = best.get(STOCK), best.get(FREEKV)
    ratio = f"; {FREEKV} / {STOCK} {ours / stock:.3g}" if stock and ours is not None else ""
    return f"{table(('documents in the tree', *HEADER), rows)}\nbest goodput, requests per second: {told or 'none'}{ratio}"


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "paper-goodput-SHAPE", [f"{system}/{rate:g}" for system in SYSTEMS for rate in RATES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the needle model, all a sixteenth, 8 requests")
    parser.add_argument("--shape", choices=SHAPES, default=Setup.shape)
    add_suffix(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="servers to start, in this order")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), metavar="RATE", help="requests per second")
    parser.add_argument("--seconds", type=float, default=24, help="that a rate is offered for")
    parser.add_argument("--requests", type=int, default=192, help="of one rate, at most")
    parser.add_argument("--groups", type=int, default=4, help="documents")
    parser.add_argument("--document", type=int, default=32768, help="tokens")
    parser.add_argument("--question", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=256, help="tokens")
    parser.add_argument("--host-memory", type=float, default=40, metavar="GIB", help="FreeKV's --freekv-host-memory")
    add_limits(parser)
    options = parser.parse_args()
    if options.requests < options.groups:
        parser.error(f"--requests {options.requests}: expected at least one for each of --groups {options.groups}")
    extra = {"extra_stock": tuple(options.stock_flags.split()), "extra_freekv": tuple(options.freekv_flags.split())}
    scale, requests = (16, 8) if options.device == "cpu" else (1, options.requests)
    lengths = (tokens // scale for tokens in (options.document, options.question, options.answer))
    questions = Questions(options.groups, *lengths, options.seconds, requests)
    sizes = {"max_running": options.max_running, "resident": True, **extra}
    if options.device == "cpu":
        longest = options.document + options.question + options.answer + 1024
        setup = TextSetup("needle", "cpu", scale=scale, budget=256, context_length=longest, **sizes)
    else:
        setup = TextSetup(options.shape, host_memory=options.host_memory, **sizes)
    name, limits = suffixed(f"paper-goodput-{setup.shape}", options), Limits(options.ttft, options.tpot)
    report = Report(name, options.out)
    if not options.tables:
        since = len(report.runs) - 1 if options.force else 0
        ladder = Ladder(questions, limits, tuple(sorted(options.rates)), chosen(options), since)
        if any(ladder.next(report.results, system) is not None for system in options.systems):
            report.ensure_one_device(lambda key: True)
            report.note(ceilings=asdict(Ceilings.measure_apart(options.device)))
        with tempfile.TemporaryDirectory() as scratch:
            client = Client(setup, Path(scratch), options.part_seconds)
            systems = [system_of(name, setup) for name in options.systems]
            run(client, systems, ladder, report, Clock(options.minutes, options.part_seconds))
    return report.finish(goodputs(report.results, limits))


if __name__ == "__main__":
    sys.exit(main())
