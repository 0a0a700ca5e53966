"""Accuracy of real servers on the prompts of ``run.py``: stock SGLang, and KV retrieval by every method it has, at several thresholds.

    python -m benchmarks.accuracy.serve --device cuda --lengths 1024 4096 --budgets 256 512 --taus 0.7 0.8

One server after the other. Its results are told from those of ``run.py``, of the same --name, by their half.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from benchmarks.accuracy import summarise
from benchmarks.accuracy.grid import DENSE, Cell, add_arguments, budget_of, is_done, open_report, score
from benchmarks.accuracy.method import Budget
from benchmarks.report import ROOT, Report, arguments, chosen, say
from benchmarks.setups import words
from sglang_freekv.config import typed
from sglang_freekv.launch.server import Server, ended_by_sigterm, free_port
from sglang_freekv.options import FLAGS
from sglang_freekv.policy import POLICIES
from sglang_freekv.presets import PRESETS
from sglang_freekv.scheduler_patch.cpu import cpu_environment

NEVER = -2.0  # below every cosine
TAUS = (0.7, 0.8, 0.85, 0.95, 1.0)  # these and what follows as run.py has them, beside 0.9
TWO_BIT, MAX, HYSTERESIS = {"--freekv-digest": "two-bit"}, {"--freekv-pooling": "max"}, {"--freekv-hysteresis": 1.4}
FINE = {"--page-size": 8, "--freekv-sink": 16, "--freekv-window": 32}
ON_TURN = TWO_BIT | FINE | {"--freekv-selection": "on-turn"}
TYPED = {"page_size": "--page-size"} | {flag.setting: typed(name) for name, flag in FLAGS.items()}
ACCURATE = {TYPED[setting]: value for setting, value in PRESETS["accurate"].settings.items() if setting != "budget_tokens"}
SELECTIONS = {
    "accurate": ACCURATE,
    "accurate-int8": ACCURATE | {"--freekv-kv-dtype": "int8"},
    "accurate-fp8": ACCURATE | {"--kv-cache-dtype": "fp8_e4m3"},
    "page-16": {"--page-size": 16},
    "page-8": {"--page-size": 8},
    "narrow": {"--freekv-sink": 32, "--freekv-window": 64},
    "narrow-page-16": FINE | {"--page-size": 16},
    "narrow-page-8": FINE,
    "two-bit": TWO_BIT,
    "two-bit-page-8": TWO_BIT | {"--page-size": 8},
    "two-bit-narrow-page-8": TWO_BIT | FINE,
    "max-narrow-page-8": MAX | FINE,
    "hysteresis": HYSTERESIS,
    "two-bit-page-8-hysteresis": TWO_BIT | {"--page-size": 8} | HYSTERESIS,
    "two-bit-narrow-page-8-hysteresis": TWO_BIT | FINE | HYSTERESIS,
    "two-bit-narrow-page-8-on-turn": ON_TURN,
    "two-bit-narrow-page-8-hysteresis-1.00": TWO_BIT | FINE | {"--freekv-hysteresis": 1.0},
    "two-bit-narrow-page-8-on-turn-tau-0.85-hysteresis-1.00": ON_TURN | {"--freekv-tau": 0.85, "--freekv-hysteresis": 1.0},
    "two-bit-narrow-page-8-on-turn-tau-0.80": ON_TURN | {"--freekv-tau": 0.8},
    "two-bit-narrow-page-8-on-turn-tau-0.80-hysteresis": ON_TURN | {"--freekv-tau": 0.8} | HYSTERESIS,
}


def systems_of(taus: list[float]) -> dict[str, dict]:
    """What each system adds to the flags that all have, by the name of its results; stock SGLang is dense attention."""
    retrieval = {name: {"--kv-retrieval": name} for name in POLICIES}
    ablations = {"freekv-min-max": {"--freekv-digest": "min-max"}, "freekv-no-correction": {"--freekv-tau": NEVER}}
    ablations |= {f"freekv-{name}": flags for name, flags in SELECTIONS.items()}
    ablations |= {f"freekv-tau-{tau:.2f}": {"--freekv-tau": tau} for tau in taus}
    return {DENSE: {}} | retrieval | {name: retrieval["freekv"] | flags for name, flags in ablations.items()}


def flags_of(flags: dict, budget: Budget, options) -> dict:
    """A server's command line."""
    on_cpu, concurrency = options.device == "cpu", options.concurrency
    all_flags = {
        "--model-path": options.model, "--device": options.device, "--dtype": "float32" if on_cpu else "bfloat16",
        "--random-seed": 0, "--max-running-requests": concurrency, "--max-total-tokens": concurrency * (max(options.lengths) + 2048),
    }  # fmt: skip
    all_flags |= {"--sleep-on-idle": True} if on_cpu else {"--mem-fraction-static": 0.5, "--sampling-backend": "pytorch"}
    if "--kv-retrieval" not in flags:
        return all_flags | ({"--attention-backend": "torch_native"} if on_cpu else {"--attention-backend": "flashinfer"})
    dense = ",".join(map(str, range(options.dense_layers))) or "none"
    preset = {"--freekv-preset": "fast"} if flags["--kv-retrieval"] == "freekv" else {}  # what a row does not say is fast's
    edges = {"--freekv-budget": budget.total, "--freekv-sink": budget.sink, "--freekv-window": budget.window, "--page-size": budget.page}
    return (
        all_flags
        | preset
        | edges
        | flags
        | {"--freekv-dense-layers": dense, "--freekv-host-memory": options.host_memory, "--freekv-resident-memory": 0}
    )


@contextmanager
def serving(flags: dict, name: str, directory: Path) -> Iterator[Server]:
    """A server that is up.

    Raises:
        RuntimeError: its log tells of an error, in the end.
    """
    stock_on_cpu = "--kv-retrieval" not in flags and flags["--device"] == "cpu"
    with mock.patch.dict(os.environ, cpu_environment() if stock_on_cpu else {}):
        server = Server(words(flags), free_port(), directory / f"{name.replace('/', '-')}.log", ROOT)
    try:
        say(f"{name} is ready after {server.wait_until_ready(lambda news: None):.0f} s")
        yield server
        if "Traceback (most recent call last)" in server.log.read_text(errors="replace"):
            raise RuntimeError(f"{name} logged an error\n{server.tail()}")
    finally:
        server.stop()


def answer_all(server: Server, cell: Cell, concurrency: int) -> list[dict]:
    """Greedy answers to a cell's prompts."""
    sampling = {"temperature": 0, "max_new_tokens": cell.new_tokens}

    def answer(prompt) -> dict:
        return server.post("/generate", {"input_ids": list(map(int, prompt.token_ids)), "sampling_params": sampling})

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, cell.prompts))


def counted(answers: list[dict], page: int, retrieval_layers: int, kv_heads: int) -> dict:
    """``trace`` of answers, as far as ``meta_info`` tells: means over layers only, and the sums they are made of."""
    counts = [found for answer in answers if (found := answer["meta_info"].get("freekv"))]
    if not counts:
        return {}
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    head_steps = max(1, total["decode_steps"]) * retrieval_layers * kv_heads
    mean = {
        "attended": total["attended_pages"] * page / len(counts),
        "fetched": total["recalled_units"] * page / head_steps,
        "corrected": total["corrections"] / head_steps,
    }
    return {"mean": {name: round(value, 5) for name, value in mean.items()}, "counts": total}


def ask(server: Server, cell: Cell, key: str, identity: dict, options, report: Report) -> None:
    """One cell on a server that is up."""
    with report.part(key, quiet=True):
        answers = answer_all(server, cell, options.concurrency)
        config = json.loads((options.model / "config.json").read_text())
        layers = (server.get("/server_info").get("freekv") or {}).get("retrieval_layers", 0)
        scores = [score(prompt, answer["output_ids"]) for prompt, answer in zip(cell.prompts, answers, strict=True)]
        generated = [answer["meta_info"]["completion_tokens"] for answer in answers]
        page = identity["budget"] and json.loads(identity["settings"]).get("--page-size", options.page)
        trace = counted(answers, page, layers, config["num_key_value_heads"])
        report.add(key, identity | {"scores": scores, "generated": generated, "trace": trace})


@ended_by_sigterm()
def main() -> int:
    """Exit status: 1 if something failed or a system is better than is possible."""
    parser = arguments(__doc__, "NAME-server", ("TASK/LENGTH/BUDGET/SYSTEM",))
    add_arguments(parser)
    parser.add_argument("--taus", type=float, nargs="+", default=list(TAUS), metavar="TAU", help="correction thresholds, a server for each")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--host-memory", type=float, default=4, help="GiB of the host pool")
    options = parser.parse_args()
    wanted = chosen(options)
    report, common = open_report("server", "float32" if options.device == "cpu" else "bfloat16", options)
    cells = [Cell.ask(task, length, options.prompts, options.seed) for length in options.lengths for task in options.tasks]
    servers = [(system, flags, total) for system, flags in systems_of(options.taus).items() for total in options.budgets]
    servers = [each for each in servers if each[0] != DENSE or each[2] == options.budgets[0]]
    with tempfile.TemporaryDirectory() as scratch:
        for number, (system, flags, total) in enumerate(servers):
            budget, todo = budget_of(total, options.page), {}
            for cell in cells:
                identity = common | {"task": cell.task, "length": cell.length, "method": system, "digest": cell.digest}
                identity |= {"budget": None if system == DENSE else asdict(budget), "settings": json.dumps(flags)}
                key = cell.key(total, system)
                if wanted(key) and (options.force or not is_done(report.results, key, identity)):
                    todo[key] = (cell, identity)
            if not todo:
                continue
            name = f"server {number + 1} of {len(servers)}, {system}, budget {total}"
            with report.part(name), serving(flags_of(flags, budget, options), f"{system}-{total}", Path(scratch)) as server:
                for key, (cell, identity) in todo.items():
                    ask(server, cell, key, identity, options, report)
    return summarise.conclude(report, options.out, options.name)


if __name__ == "__main__":
    sys.exit(main())
