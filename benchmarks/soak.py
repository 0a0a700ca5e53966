"""Soak: questions of mixed lengths over shared documents, aborts, disconnects and forced retractions; nothing may be wrong, lost or held.

Dense attention answers every question first, one at a time; then FreeKV does, undisturbed; then, for ``--minutes``, many at once. The exit
status is 0 if every answer that dense and undisturbed FreeKV have right is right, no request fails, and nothing is held at the end.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.needle import tasks, weights
from benchmarks.report import ROOT, Report, arguments, say, table
from benchmarks.setups import words
from sglang_freekv.launch.server import Server, ServerFailed, ended_by_sigterm, free_port

TASKS, NEW_TOKENS, FILLER_TOKENS = ("magic-number", "code-word", "multi-value"), 16, 48
LONG = {"max_new_tokens": 400, "ignore_eos": True}  # for who will not wait for the end
SHARES = {"ask": 0.7, "fill": 0.12, "abort": 0.1, "disconnect": 0.08}
SAMPLE_S, REST_DEADLINE_S, RATED_S = 2.0, 120, 10
FLAT, RECOVERED = 1.05, 0.95


@dataclass
class Tally:
    """What happened under load."""

    done: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    different: int = 0
    retractions: int = 0
    seconds: list[float] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1


class SoakServer(Server):
    """A server on the needle model that is asked for tokens."""

    def __init__(self, flags: dict, log: Path) -> None:
        super().__init__(words(flags), free_port(), log, ROOT)

    def ask(self, token_ids, new_tokens: int, rid: str | None = None, to_the_end: bool = False) -> dict:
        """A greedy answer with its ``meta_info``; ``to_the_end`` goes on behind it."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": to_the_end}
        body = {"input_ids": [int(token) for token in token_ids], "sampling_params": sampling}
        return self.post("/generate", body | ({"rid": rid} if rid else {}))

    def leave(self, token_ids, after_s: float) -> None:
        """Ask for a stream, and hang up."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.url.rsplit(":", 1)[1]), timeout=300)
        body = {"input_ids": [int(token) for token in token_ids], "stream": True, "sampling_params": LONG}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(after_s)
        connection.close()

    def abort(self, token_ids, after_s: float, rid: str) -> None:
        """Ask, and abort by the request's name; it may be done by then."""
        timer = threading.Timer(after_s, lambda: self.open("/abort_request", {"rid": rid}).close())
        timer.start()
        try:
            self.post("/generate", {"input_ids": [int(token) for token in token_ids], "rid": rid, "sampling_params": LONG})
        except ServerFailed as error:
            if "abort" not in str(error).lower():
                raise
        finally:
            timer.join()

    def state_at_rest(self) -> dict:
        """Its state with an empty tree, once nothing runs."""
        self.wait_until_idle(REST_DEADLINE_S)
        self.flush()
        time.sleep(1)
        return self.state()

    def memory(self) -> dict[str, float]:
        """Resident MiB of the server's processes, and used MiB of the GPU if there is one."""
        group, total = os.getpgid(self.process.pid), 0
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                    total += int((entry / "statm").read_text().split()[1])
            except (OSError, ValueError):
                continue
        used = {"resident_mib": total * os.sysconf("SC_PAGE_SIZE") / 2**20}
        query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
        try:
            used["device_mib"] = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
        return used


@contextmanager
def serving(flags: dict, log: Path, env: dict[str, str], wait: bool = True):
    """A server, ready unless the caller waits for it."""
    with mock.patch.dict(os.environ, env):
        server = SoakServer(flags, log)
    try:
        if wait:
            wait_for(server)
        yield server
    finally:
        server.stop()


def wait_for(server: SoakServer) -> None:
    say(f"{server.log.stem} is ready after {server.wait_until_ready(lambda news: None):.0f} s")


def questions(rng: np.random.Generator, documents: int, per_document: int, longest: int) -> list:
    """Questions over documents of 400 to ``longest`` tokens, evenly spread in their logarithm; those of one document share it."""
    lengths = np.geomspace(400, longest, documents).astype(int)
    needles = [min(16, 3 + int(length) // 400) for length in lengths]
    made = [tasks.make_document(rng, int(length), needle_count=count, tasks=TASKS * 6) for length, count in zip(lengths, needles)]
    return [document.ask(fact) for document in made for fact in document.facts[:per_document]]


def right_alone(server: SoakServer, prompts: list) -> tuple[list[bool], list[list[int]]]:
    """Which answers are right when asked one by one, and their tokens."""
    answers = [server.ask(prompt.token_ids, NEW_TOKENS)["output_ids"] for prompt in prompts]
    return [prompt.is_answered_by(answer) for prompt, answer in zip(prompts, answers)], answers


def throughput(server: SoakServer, prompts: list) -> list[float]:
    """Tokens per second of each pass of a fixed load, prompts in the tree."""
    rates, until = [], time.monotonic() + RATED_S
    while len(rates) < 4 or time.monotonic() < until:
        started = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            tokens = sum(len(answer["output_ids"]) for answer in pool.map(lambda p: server.ask(p.token_ids, 64, to_the_end=True), prompts))
        rates.append(tokens / (time.monotonic() - started))
    return rates[1:]  # the first pass brings the prompts into the tree


def soak(
    server: SoakServer, prompts: list, expected: list, until: float, concurrency: int, seed: int, vocabulary: int
) -> tuple[Tally, list[dict]]:
    """The load, and what memory was in use meanwhile."""
    tally, lock, samples = Tally(), threading.Lock(), []

    def work(worker: int) -> None:
        rng, turn = np.random.default_rng((seed, worker)), 0
        while time.monotonic() < until:
            turn += 1
            what, which = rng.choice(list(SHARES), p=list(SHARES.values())), int(rng.integers(len(prompts)))
            rid = f"soak-{worker}-{turn}"
            filler, after = rng.integers(16, vocabulary, rng.integers(16, 600)), float(rng.exponential(0.7))
            started = time.monotonic()
            try:
                if what == "ask":
                    answer = server.ask(prompts[which].token_ids, NEW_TOKENS, rid)
                elif what == "fill":
                    answer = server.ask(filler, FILLER_TOKENS, rid)
                elif what == "abort":
                    server.abort(prompts[which].token_ids, after, rid)
                else:
                    server.leave(prompts[which].token_ids, after)
            except (ServerFailed, OSError) as error:
                with lock:
                    tally.failed.append(f"{rid} ({what}): {str(error).splitlines()[0][:300]}")
                if not server.is_alive():
                    return
                continue
            with lock:
                tally.count(what)
                if what in ("ask", "fill"):
                    tally.seconds.append(time.monotonic() - started)
                    tally.retractions += answer["meta_info"].get("num_retractions", 0)
                if what == "ask":
                    tally.different += answer["output_ids"] != expected[which]
                    if not prompts[which].is_answered_by(answer["output_ids"]):
                        tally.wrong.append(f"{rid}: question {which} of {len(prompts[which].token_ids)} tokens, {prompts[which].task}")

    workers = [threading.Thread(target=work, args=(index,)) for index in range(concurrency)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        samples.append({"at_s": time.monotonic(), **server.memory()})
        time.sleep(SAMPLE_S)
    return tally, samples


def growth(samples: list[dict], name: str) -> float | None:
    """Median of the last quarter over that of the second: 1 is flat."""
    values, quarter = [sample[name] for sample in samples if name in sample], len(samples) // 4
    return statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter]) if values and quarter else None


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "soak")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="of load")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--questions", type=int, default=4, help="of each document")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest document")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--retract-every", type=int, default=40, help="forward passes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report, rng = Report("soak", options.out), np.random.default_rng(options.seed)
    prompts = questions(rng, options.documents, options.questions, options.longest)
    model = weights.ready()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    tokens = max(65536, 4 * options.longest)
    common = {"--model-path": model, "--device": options.device, "--random-seed": 0, "--kv-retrieval": "freekv"}
    common |= {"--freekv-preset": "fast", "--freekv-resident-memory": 0}
    common |= {"--max-running-requests": 8, "--max-total-tokens": tokens, "--chunked-prefill-size": 2048}
    if options.device == "cpu":
        common |= {"--dtype": "float32", "--sleep-on-idle": True}
    else:
        common |= {"--dtype": "bfloat16", "--sampling-backend": "pytorch", "--mem-fraction-static": 0.5}
    storm = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(options.retract_every)}
    storm["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    faults: list[str] = []
    rated = options.device == "cuda"  # what else runs on a CPU takes more than a few per cent
    with tempfile.TemporaryDirectory() as scratch, report.part("soak"):
        covering = 32 * -(-(options.longest + 1024) // 32)
        watched = {"--freekv-budget": options.budget, "--freekv-canary": "full"}
        with (
            serving(common | {"--freekv-budget": covering}, Path(scratch) / "dense.log", {}, wait=rated) as dense,
            serving(common | watched, Path(scratch) / "freekv.log", storm) as server,
        ):
            if not rated:  # on a GPU a server sizes its pools by what the one before has left
                wait_for(dense)
            known, _ = right_alone(dense, prompts)
            say(f"dense attention answers {sum(known)} of {len(prompts)}")
            found, expected = right_alone(server, prompts)
            lost = sum(a and not b for a, b in zip(known, found))
            say(f"FreeKV, undisturbed, answers {sum(found)}; {lost} that dense answers are lost to selection")
            both = [index for index, pair in enumerate(zip(known, found)) if all(pair)]
            prompts, expected = [prompts[index] for index in both], [expected[index] for index in both]
            rates = {"before": throughput(server, prompts[:16]), "idle_before": throughput(dense, prompts[:16])} if rated else {}
            say(f"under load for {options.minutes:g} minutes")
            until = time.monotonic() + options.minutes * 60
            tally, samples = soak(server, prompts, expected, until, options.concurrency, options.seed, vocabulary)
            held = server.state_at_rest()
            if rated:
                rates |= {"after": throughput(server, prompts[:16]), "idle_after": throughput(dense, prompts[:16])}
            held_after = server.state_at_rest()
            log, canary = server.log.read_text(errors="replace"), held_after["canary"]
        grown = {name: growth(samples, name) for name in ("resident_mib", "device_mib")}
        faults += [f"wrong: {each}" for each in tally.wrong] + [f"failed: {each}" for each in tally.failed]
        for state in (held, held_after):
            if state["host_pages_used"] or state["rows_used"]:
                faults.append(f"held at rest: {state['host_pages_used']} host pages, {state['rows_used']} rows, expected none")
        faults += [f"{name} grew by a factor of {by:.3f}, expected at most {FLAT}" for name, by in grown.items() if by and by > FLAT]
        rate = {name: statistics.median(passes) for name, passes in rates.items()}
        if rated:  # a server that had nothing to do tells what became of the machine meanwhile
            least = RECOVERED * rate["before"] * min(1, rate["idle_after"] / rate["idle_before"])
            if rate["after"] < least:
                faults.append(f"{rate['after']:.0f} tokens/s after the load, expected at least {least:.0f}: {rate}")
        if canary["faults"]:
            faults.append(f"the canary found {canary['faults']} units that changed in host memory")
        if not tally.retractions:
            faults.append("no request was retracted: the load was too small to tell anything")
        faults += ["the log has a traceback or a leak"] * ("Traceback (most recent call last)" in log or "memory leak" in log.lower())
        report.add(
            f"{options.device}",
            {
                "minutes": options.minutes, "concurrency": options.concurrency, "budget": options.budget, "questions": len(known),
                "dense_right": sum(known), "freekv_right": sum(found), "lost_to_selection": lost, "requests": tally.done,
                "retractions": tally.retractions, "wrong": tally.wrong, "failed": tally.failed, "other_tokens": tally.different,
                "median_s": statistics.median(tally.seconds), "slowest_s": max(tally.seconds), "tokens_per_s": rate, "passes": rates,
                "growth": grown, "at_rest": held_after, "faults": faults,
            },
        )  # fmt: skip
        rows = [*tally.done.items(), ("retractions", tally.retractions), ("wrong", len(tally.wrong)), ("failed", len(tally.failed))]
        rows += [(f"tokens/s {name}", value) for name, value in rate.items()]
        rows += [(f"growth of {name}", by) for name, by in grown.items() if by]
        print(table(("soak", options.device), rows))
    for fault in faults:
        print(f"FAULT {fault}")
    return report.finish() or bool(faults)


if __name__ == "__main__":
    sys.exit(main())
