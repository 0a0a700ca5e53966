"""Needle questions on a GPU: are FreeKV's tokens stock SGLang's where the budget covers the context, and its answers right where not."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.needle import tasks, weights
from benchmarks.report import ROOT, Report, arguments, chosen, say, table
from benchmarks.servers import words
from sglang_freekv.launch.server import Server, ended_by_sigterm, free_port

LENGTHS, DOCUMENTS, TASKS = (2048, 8192), 8, ("magic-number", "code-word", "multi-value") * 3
NEW_TOKENS, CONCURRENCY = 16, 16
FREEKV = {"--kv-retrieval": "freekv", "--freekv-preset": "fast", "--freekv-host-memory": 6, "--freekv-resident-memory": 0}
SMALL = FREEKV | {"--freekv-budget": 512}
SYSTEMS = {
    "stock": {"--attention-backend": "flashinfer", "--page-size": 32},
    "covering": FREEKV | {"--freekv-budget": 16384},
    "budget-512": SMALL,
    "without-overlap": SMALL | {"--disable-overlap-schedule": True},
    "without-graphs": SMALL | {"--cuda-graph-backend-decode": "disabled"},
    "copy-engine": SMALL | {"--freekv-recall": "copy-engine"},
    "host-nhd": SMALL | {"--freekv-host-layout": "nhd"},
    "slack-4": SMALL | {"--freekv-device-cache": 2048},
    "resident": SMALL | {"--freekv-resident-memory": 1},
    "canary": SMALL | {"--freekv-canary": "full"},
    "tp-2-covering": FREEKV | {"--freekv-budget": 16384, "--tp": 2},
    "tp-2-budget-512": SMALL | {"--tp": 2},
}
LIKE_SMALL = [name for name in SYSTEMS if name not in ("stock", "covering", "budget-512", "tp-2-covering")]
ONE_BY_ONE = ("stock", "covering")  # so that batches, whose size changes sums, are the same
PAIRS = (("stock", "covering"), ("covering", "tp-2-covering"), *(("budget-512", other) for other in LIKE_SMALL))


def questions() -> list[tuple[int, object]]:
    """(length, prompt) of every question; the same for all systems."""
    generator = np.random.default_rng(1)
    lengths = [length for length in LENGTHS for _ in range(DOCUMENTS)]
    documents = [(length, tasks.make_document(generator, length, needle_count=16, tasks=TASKS)) for length in lengths]
    return [(length, document.ask(fact)) for length, document in documents for fact in document.facts[: len(TASKS)]]


def answer_all(server: Server, prompts: list, concurrency: int = CONCURRENCY) -> list[list[int]]:
    """Greedy tokens, of so many requests at once."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def answer(prompt) -> list[int]:
        return server.post("/generate", {"input_ids": list(map(int, prompt.token_ids)), "sampling_params": sampling})["output_ids"]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, prompts))


def equal_tokens(some: list[list[int]], others: list[list[int]]) -> float:
    pairs = [(x, y) for a, b in zip(some, others) for x, y in zip(a, b)]
    return sum(x == y for x, y in pairs) / len(pairs)


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "bench_needle", list(SYSTEMS))
    options = parser.parse_args()
    wanted, report, asked = chosen(options), Report("bench_needle", options.out), questions()
    prompts = [prompt for _, prompt in asked]
    common = {
        "--model-path": weights.ready(), "--device": "cuda", "--dtype": "bfloat16", "--mem-fraction-static": 0.5, "--random-seed": 0,
        "--sampling-backend": "pytorch", "--max-running-requests": CONCURRENCY, "--max-total-tokens": 200_000,
    }  # fmt: skip
    answers, alone, rows = {}, {}, []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stop, ExitStack() as terminate:  # all are told, and then awaited
        servers = {}
        for name, flags in SYSTEMS.items():
            if flags.get("--tp", 1) > torch.cuda.device_count():
                say(f"{name} is left out: it needs {flags['--tp']} GPUs")
            elif wanted(name):
                servers[name] = Server(words(common | flags), port := free_port(), Path(scratch) / f"{name}.log", ROOT)
                stop.callback(servers[name].stop), terminate.callback(servers[name].process.terminate)
                say(f"starting {name} on port {port}")
        for name, server in servers.items():
            with report.part(name):
                server.wait_until_ready(lambda news: None)
                answers[name] = answer_all(server, prompts)
                again = answer_all(server, prompts)
                if name in ONE_BY_ONE:
                    alone[name] = answer_all(server, prompts, concurrency=1)
                right: dict[str, list[bool]] = {}
                for (length, prompt), tokens in zip(asked, answers[name]):
                    found = tuple(tokens[: len(prompt.answer_token_ids)]) == tuple(prompt.answer_token_ids)
                    right.setdefault(f"{prompt.task} {length}", []).append(found)
                accuracy = {task: float(np.mean(results)) for task, results in right.items()}
                repeat = equal_tokens(answers[name], again)
                info = server.get("/server_info")
                built = {key: (info.get("freekv") or {}).get(key) for key in ("host_tokens", "host_bytes", "device_rows")}
                result = {"questions": len(asked), "accuracy": accuracy, "equal_to_its_repeat_on_prefix_hits": repeat, "of_a_rank": built}
                report.add(name, result | {"canary": server.state()["canary"]} if "--freekv-canary" in SYSTEMS[name] else result)
                rows.append((name, *accuracy.values(), repeat))
    for one, other in PAIRS:
        if one in answers and other in answers:
            result = {"equal_tokens": equal_tokens(answers[one], answers[other]), "tokens": len(asked) * NEW_TOKENS}
            rows.append((f"tokens of {one} and {other}", result["equal_tokens"]))
            if one in alone and other in alone:
                result["equal_tokens_one_by_one"] = equal_tokens(alone[one], alone[other])
                rows.append(("the same, one request at a time", result["equal_tokens_one_by_one"]))
            report.add(f"{one} / {other}", result)
    header = ("right answers", *(accuracy if rows else ()), "repeat") if rows else ("nothing",)
    width = len(header)
    return report.finish(table(header, [[*row, *[None] * (width - len(row))] for row in rows]))


if __name__ == "__main__":
    sys.exit(main())
