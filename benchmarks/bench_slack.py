"""Bytes recalled against slack in the device cache: needle questions over 16K tokens, and the load replay with its recency."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.profiles import CORRECTED, MISSED
from benchmarks.report import Report, arguments, chosen, say, table
from benchmarks.servers import BenchServer, running
from benchmarks.setups import Setup
from benchmarks.tpot import achieved
from sglang_freekv.launch.server import ended_by_sigterm

LOADS, SLACKS = ("needle", "replay"), (1, 1.5, 2, 4)
TASKS = ("magic-number", "code-word", "multi-value")
REPLAYED = (CORRECTED[0.8], MISSED)  # c and x
NEEDLE_TOKENS, REPLAY_TOKENS = 32, 128  # most that each request generates; behind its answer the needle model only repeats itself
START_DEADLINE_S, REQUEST_DEADLINE_S = 300, 280


def questions(length: int, documents: int, per_document: int, model: Path) -> list:
    """Prompts of about ``length`` tokens; those of one document share it."""
    from benchmarks.needle import tasks
    from benchmarks.needle.corpus import HERE, Corpus

    rng, corpus = np.random.default_rng(1), Corpus.load(model, HERE / "data")
    wanted = [TASKS[index % len(TASKS)] for index in range(per_document)]
    asked = []
    for _ in range(documents):
        document = tasks.make_document(rng, length - 64, needle_count=per_document + 8, tasks=wanted, corpus=corpus)
        asked += [document.ask(fact) for fact in document.facts[:per_document]]
    return asked


def ask(server: BenchServer, prompts: list, new_tokens: int, to_the_end: bool) -> tuple[dict, list[bool]]:
    """What the server counted, and which answers were right.

    Args:
        to_the_end: go on behind an answer, up to ``new_tokens``.
    """
    answers = []
    for start in range(0, len(prompts), 8):
        batch = [list(prompt.token_ids) for prompt in prompts[start : start + 8]]
        answers += server.stream_all(batch, new_tokens, REQUEST_DEADLINE_S, interval=16, ignore_eos=to_the_end)
    counted = achieved(server.setup, answers)
    counted["recalled_bytes_per_token"] = counted["recalled_bytes_per_step"] / len(answers)
    del counted["recalled_bytes_per_step"]
    return counted, [prompt.is_answered_by(answer.output_ids) for prompt, answer in zip(prompts, answers)]


def measure(slack: float, setup: Setup, prompts: list, per_document: int, wanted, report: Report) -> None:
    """One server: real questions, then the replay on the same prompts."""
    key, cache_tokens = f"slack-{slack:g}", int(slack * setup.budget)
    loads = [load for load in LOADS if wanted(load, f"{load}/{key}")]
    if not loads:
        return
    with report.part(key, quiet=True), tempfile.TemporaryDirectory() as scratch:
        more = {"--freekv-device-cache": cache_tokens}
        with running(setup, "freekv", Path(scratch), START_DEADLINE_S, more) as server:
            server.set_load(None)
            for first in prompts[::per_document]:  # the others find its document in the tree
                server.stream(list(first.token_ids), 1, REQUEST_DEADLINE_S)
            if "needle" in loads:
                counted, right = ask(server, prompts, NEEDLE_TOKENS, to_the_end=False)
                report.add(f"needle/{key}", {"cache_tokens": cache_tokens, "right": sum(right), "asked": len(right), **counted})
                say(f"needle/{key}: {counted['recalled_bytes_per_token'] / 1e3:.1f} kB per token, x {counted['missed']:.3f}")
            if "replay" in loads:
                server.set_load(setup.load(*REPLAYED, len(prompts[0].token_ids)))
                counted, _ = ask(server, prompts[:8], REPLAY_TOKENS, to_the_end=True)
                report.add(f"replay/{key}", {"cache_tokens": cache_tokens, **counted})
                say(f"replay/{key}: {counted['recalled_bytes_per_token'] / 1e3:.1f} kB per token, x {counted['missed']:.3f}")


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "bench_slack", [*LOADS, "LOAD/slack-SLACK"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--slack", type=float, nargs="+", default=list(SLACKS), help="device cache as multiples of the budget")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a prompt")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=6, help="of each document")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--needle-model", type=Path, default=Setup.needle_model)
    options = parser.parse_args()
    report, on_gpu = Report("bench_slack", options.out), options.device == "cuda"
    setup = Setup(
        shape="needle",
        device=options.device,
        budget=options.budget,
        context_length=options.length + 1024,
        host_memory=4,
        needle_model=options.needle_model,
        extra_freekv=("--mem-fraction-static", "0.3", "--max-total-tokens", "262144") if on_gpu else ("--max-total-tokens", "131072"),
    )
    prompts = questions(options.length, options.documents, options.questions, options.needle_model)
    report.note(length=options.length, documents=options.documents, questions=options.questions, budget=options.budget)
    with ThreadPoolExecutor(len(options.slack) if on_gpu else 1) as servers:  # counts do not depend on who else computes
        list(servers.map(lambda slack: measure(slack, setup, prompts, options.questions, chosen(options), report), options.slack))

    def row(load: str, slack: float) -> list:
        result, tight = (report.results.get(f"{load}/slack-{value:g}", {}) for value in (slack, 1))
        ours, base = result.get("recalled_bytes_per_token"), tight.get("recalled_bytes_per_token")
        right = f"{result['right']}/{result['asked']}" if "right" in result else None
        share, kilobytes = ours and base and ours / base, ours and ours / 1e3
        return [f"{load}, slack {slack:g}", result.get("cache_tokens"), kilobytes, share, result.get("missed"), right]

    rows = [row(load, slack) for load in LOADS for slack in options.slack]
    return report.finish(table(("bytes recalled", "cache tokens", "kB per token", "of slack 1", "x", "right"), rows))


if __name__ == "__main__":
    sys.exit(main())
