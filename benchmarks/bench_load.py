"""What a server does under the loads of ``sglang.bench_serving``: stock SGLang and FreeKV, the same requests at the same times.

Every part is one ``python -m sglang.bench_serving``; its command is in the results. A part counts if every request was answered in full
and nothing is held after it. What the tree gives is compared request by request where one is sent at a time; at a rate it depends on
whether a prefix is there when the next request comes.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import profiles
from benchmarks.report import Report, arguments, chosen, say, seconds_since_start, table
from benchmarks.servers import BenchServer, keep_log, running
from benchmarks.setups import SHAPES, Setup, words
from sglang_freekv.launch.server import ended_by_sigterm

SYSTEMS, SEED = ("stock", "freekv"), 1
SHARED, SERIAL = "generated-shared-prefix", "serial"
CORRECTED, MISSED = profiles.CORRECTED[0.8], profiles.MISSED  # what the replay emulates where weights are random
GROUPS, WARM_UP = 4, 4  # prefixes that are shared; requests of the warm-up
FIGURES = ("duration", "request_throughput", "input_throughput", "output_throughput", "concurrency", "max_concurrent_requests")
LATENCIES = tuple(f"{which}_{what}_ms" for what in ("ttft", "tpot", "itl") for which in ("mean", "median", "p90", "p95", "p99"))
DETAILS = ("input_lens", "output_lens", "cached_tokens")


@dataclass(frozen=True)
class Requests:
    """A data set of bench_serving; lengths are uniform between half of what is given and all of it.

    Args:
        count: how many requests.
        tokens: typical length of a prompt.
        rates: requests per second.
        lengths: flags whose values are tokens.
        others: flags besides.
    """

    count: int
    tokens: int
    rates: tuple[float, ...]
    lengths: dict[str, int]
    others: dict[str, object]


DATASETS = {
    "random-ids": Requests(
        count=16,
        tokens=12288,
        rates=(1, 2, float("inf")),
        lengths={"--random-input-len": 16384, "--random-output-len": 256},
        others={"--random-range-ratio": 0.5, "--tokenize-prompt": True},
    ),
    SHARED: Requests(
        count=32,
        tokens=6528,
        rates=(4, 16, float("inf")),
        lengths={"--gsp-system-prompt-len": 8192, "--gsp-question-len": 512, "--gsp-output-len": 128},
        # with a ratio of 1 bench_serving would keep the prompts in the user's home, under a name that the tokenizer is no part of
        others={"--gsp-range-ratio": 0.5, "--gsp-num-groups": GROUPS},
    ),
}
PARTS = (f"{SHARED}/{SERIAL}", *(f"{name}/{rate:g}" for name, each in DATASETS.items() for rate in each.rates))


@dataclass(frozen=True)
class TextSetup(Setup):
    """A setup that is sent text, and answers with some for every token, by a tokenizer that is made here: the shapes have none."""

    def flags(self, system: str, directory: Path) -> dict:
        flags = super().flags(system, directory)
        flags.pop("--skip-tokenizer-init", None)
        return flags | {"--tokenizer-path": write_tokenizer(directory.parent / "tokenizer", self.config["vocab_size"])}


def write_tokenizer(directory: Path, vocab_size: int) -> Path:
    """A word for each token, so that prompts are as long as asked for, and nothing is downloaded."""
    directory.mkdir(parents=True, exist_ok=True)
    model = {"type": "WordLevel", "vocab": {f"w{token}": token for token in range(vocab_size)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


def command_of(part: str, setup: Setup, more: dict) -> list[str]:
    """bench_serving's arguments for a part; a setup that is scaled down has half the requests."""
    dataset, rate = part.split("/")
    requests = DATASETS[dataset]
    count = requests.count if setup.scale == 1 else requests.count // 2
    flags = {"--backend": "sglang", "--dataset-name": dataset, "--num-prompts": count, "--seed": SEED, "--temperature": 0}
    flags |= {name: tokens // setup.scale for name, tokens in requests.lengths.items()} | requests.others
    if dataset == SHARED:
        flags |= {"--gsp-prompts-per-group": count // GROUPS}
    flags |= {"--request-rate": "inf", "--max-concurrency": 1} if rate == SERIAL else {"--request-rate": rate}
    flags |= {"--warmup-requests": 0, "--output-details": True, "--cache-report": True, "--disable-tqdm": True}
    return words(flags | more)


def drive(command: list[str], log: Path) -> None:
    """In a process of its own: ``python -m sglang.bench_serving`` with these arguments."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["bench_serving", *command]
    runpy.run_module("sglang.bench_serving", run_name="__main__")


class Client:
    """Runs bench_serving against servers of one setup; its imports, of some ten seconds, are made once.

    Args:
        directory: holds the tokenizer, and takes what bench_serving writes.
        deadline_s: most seconds of one part.
    """

    def __init__(self, setup: TextSetup, directory: Path, deadline_s: float) -> None:
        self.setup, self.directory, self.deadline_s = setup, directory, deadline_s
        os.environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["sglang.bench_serving"])
        multiprocessing.forkserver.ensure_running()

    def run(self, server: BenchServer, part: str, more: dict | None = None) -> dict:
        """The line that bench_serving wrote, and its command.

        Raises:
            RuntimeError: it failed, or one of the requests did.
        """
        tokenizer, written, log = (self.directory / name for name in ("tokenizer", "load.jsonl", "bench_serving.log"))
        where = {"--base-url": server.url, "--model": tokenizer, "--tokenizer": tokenizer, "--output-file": written}
        command = command_of(part, self.setup, (more or {}) | where)
        written.unlink(missing_ok=True)
        process = self._processes.Process(target=drive, args=(command, log))
        process.start()
        process.join(self.deadline_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise RuntimeError(f"bench_serving was not done after {self.deadline_s:.0f} s\n{log.read_text()[-2000:]}")
        if process.exitcode or not written.exists():
            raise RuntimeError(f"bench_serving ended with status {process.exitcode}\n{log.read_text()[-2000:]}")
        typed = shlex.join(["python", "-m", "sglang.bench_serving", *command]).replace(f"{self.directory}/", "")
        line = json.loads(written.read_text()) | {"command": typed}
        expect_answers(line, command)
        return line


def expect_answers(line: dict, command: list[str]) -> None:
    """Raises RuntimeError unless each request was answered, with a first token that was seen and as many tokens as the shortest asks for.

    SGLang ends a request that it has no room for like one that is done, and bench_serving takes it for that.
    """
    flags = dict(zip(command, command[1:]))
    random = flags["--dataset-name"] == "random-ids"
    count, least = int(flags["--num-prompts"]), int(flags["--random-output-len" if random else "--gsp-output-len"]) // 2
    errors = [error for error in line["errors"] if error]
    if errors or line["completed"] != count or not all(line["ttfts"]):
        raise RuntimeError(f"{line['completed']} of {count} requests were answered, {len(errors)} with an error: {errors[:1]}")
    if min(line["output_lens"]) < max(1, least):
        raise RuntimeError(f"answers have {line['output_lens']} tokens, expected at least {least} each: requests were cut short")


def measure(client: Client, server: BenchServer, part: str) -> dict:
    """A part on an empty tree; raises as :func:`measure_on`."""
    server.flush()
    return measure_on(client, server, part)


def measure_on(client: Client, server: BenchServer, part: str, more: dict | None = None, details: tuple[str, ...] = DETAILS) -> dict:
    """A part on what the tree has, which is emptied behind it.

    Args:
        more: flags of bench_serving beyond the part's.
        details: what to keep of each request.

    Raises:
        RuntimeError: a request failed, or something is held when all is done.
    """
    counts = Counts(server)
    line = client.run(server, part, more)
    result = {name: line[name] for name in ("command", *FIGURES, *LATENCIES, *details)}
    result["hit_rate"] = sum(line["cached_tokens"]) / sum(line["input_lens"])
    return result | counts.at_rest()


class Counts:
    """What a server counts from now on."""

    def __init__(self, server: BenchServer) -> None:
        self.server, self.totals, self.log_begins = server, (server.state() or {}).get("totals"), len(server.logged())

    def at_rest(self) -> dict:
        """Retractions, the most that the scheduler's queue held, and FreeKV's totals; the tree is emptied.

        Raises:
            RuntimeError: something is held when all is done, or the server logged an error.
        """
        server, begins = self.server, self.log_begins
        found = {"retractions": server.retractions(begins), "most_queued": server.most_queued(begins)}
        server.flush()
        time.sleep(1)
        if (state := server.state()) is not None:
            found["totals"] = {name: state["totals"][name] - self.totals[name] for name in self.totals}
            found["at_rest"] = {name: state[name] for name in ("host_pages_used", "rows_used")}
            if any(found["at_rest"].values()):
                raise RuntimeError(f"held at rest: {found['at_rest']}, expected none")
        if fault := server.fault():
            raise RuntimeError(f"the server logged an error\n{fault}")
        return found


def serve_and_measure(client: Client, system: str, wanted, report: Report, start_s: float) -> None:
    """All parts that are wanted of one system."""
    setup = client.setup
    with running(setup, system, client.directory, start_s) as server:
        report.note(**{f"server {system}": server.facts()})
        with report.part(f"{system}/warm-up"):
            client.run(server, "random-ids/inf", {"--num-prompts": WARM_UP})
        for part in filter(wanted, PARTS):
            with report.part(f"{system}/{part}"):
                tokens = DATASETS[part.split("/")[0]].tokens // setup.scale
                server.set_load(None if setup.shape == "needle" else setup.load(CORRECTED, MISSED, tokens))
                report.add(f"{system}/{part}", measure(client, server, part))


def compare(report: Report, wanted, page_size: int) -> None:
    """Both systems were sent the same, and found the same in the tree; stock SGLang counts tokens where its pages are of one."""
    for part in filter(wanted, PARTS):
        stock, ours = (report.results.get(f"{system}/{part}") for system in SYSTEMS)
        if not (stock and ours):
            continue
        with report.part(f"same requests: {part}", quiet=True):
            for name in ("input_lens", "output_lens"):
                if stock[name] != ours[name]:
                    raise RuntimeError(f"{name} differ, expected the same requests: {stock[name][:8]} ... and {ours[name][:8]} ...")
            expected = [tokens // page_size * page_size for tokens in stock["cached_tokens"]]
            if part.endswith(SERIAL) and ours["cached_tokens"] != expected:
                raise RuntimeError(f"from the tree came {ours['cached_tokens']}, expected stock SGLang's whole pages, {expected}")


def summary(results: dict, wanted) -> str:
    """Both systems, part by part."""
    latencies = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")
    columns = ("output_throughput", *latencies, "hit_rate", "retractions")
    header = ("part", "system", "tokens/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL p99", "hit rate", "retractions")
    keys = [(part, system) for part in filter(wanted, PARTS) for system in SYSTEMS if f"{system}/{part}" in results]
    return table(header, [(part, system, *(results[f"{system}/{part}"][name] for name in columns)) for part, system in keys])


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "bench_load-SHAPE", PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the needle model, short and few requests")
    parser.add_argument("--shape", choices=(*SHAPES, "needle"), default=Setup.shape)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="servers to start, in this order")
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--host-memory", type=float, default=40, metavar="GIB", help="FreeKV's --freekv-host-memory")
    parser.add_argument("--stock-flags", default="", metavar="FLAGS", help="further flags of stock SGLang: --stock-flags='--name value'")
    parser.add_argument("--freekv-flags", default="", metavar="FLAGS", help="the same for FreeKV")
    parser.add_argument("--part-seconds", type=float, default=120, help="most seconds of one part")
    options = parser.parse_args()
    extra = {"extra_stock": tuple(options.stock_flags.split()), "extra_freekv": tuple(options.freekv_flags.split())}
    if options.device == "cpu":
        setup = TextSetup("needle", "cpu", scale=16, budget=256, **extra)
    else:
        setup = TextSetup(options.shape, context_length=options.context_length, host_memory=options.host_memory, **extra)
    report, wanted = Report(f"bench_load-{setup.shape}", options.out), chosen(options)
    with tempfile.TemporaryDirectory() as scratch:
        client = Client(setup, Path(scratch), options.part_seconds)
        for system in options.systems:
            with report.part(f"server {system}"):
                serve_and_measure(client, system, wanted, report, start_s=300)
            keep_log(Path(scratch) / f"{system}.log", report.path, system)
    compare(report, wanted, setup.page_size)
    say(f"all done after {seconds_since_start():.0f} s")
    return report.finish(summary(report.results, wanted))


if __name__ == "__main__":
    sys.exit(main())
