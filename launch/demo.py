# SPDX-License-Identifier: Apache-2.0
"""Asks a server with KV retrieval two questions about one long document, and shows the counts of retrieval.

Run it with ``bash launch/demo.sh [--keep] [--port N]``, which installs what it needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from sglang_freekv.launch.server import Server, ServerFailed, ended_by_sigterm, ensure_free, free_port

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".out" / "demo.log"

SEED = 0
LENGTH_TOKENS = 6144
QUESTIONS = ("magic-number", "code-word")
MAX_ANSWER_TOKENS = 16

FLAGS = (
    "--model-path benchmarks/needle/model --kv-retrieval freekv --freekv-budget 512 --freekv-host-memory 1 "
    "--max-running-requests 4 --enable-metrics --enable-cache-report "
    "--freekv-resident-memory 0"  # else all pages of so small a model stay on the device, and nothing is recalled
).split()
FLAGS_ON_CPU = ["--device", "cpu"]
FLAGS_ON_GPU = ["--sampling-backend", "pytorch"]  # the default compiles CUDA code, which needs nvcc


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def unpack_weights() -> None:
    from benchmarks.needle.weights import ready  # as below: of the checkout, and not of the installed package

    ready()


def load_prompts() -> list:
    """One prompt for each of ``QUESTIONS``, all about the same document."""
    from benchmarks.needle.tasks import make_document

    document = make_document(np.random.default_rng(SEED), LENGTH_TOKENS, tasks=QUESTIONS)
    return [document.ask(fact) for fact in document.facts[: len(QUESTIONS)]]


def ask(server: Server, messages: list[dict[str, str]]) -> dict:
    """The reply to ``messages``. Its choices have SGLang's ``meta_info``, which holds the request's counts of retrieval."""
    body = {"model": "needle", "messages": messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS, "return_meta_info": True}
    return server.post("/v1/chat/completions", body)


def describe(reply: dict) -> list[str]:
    """Lines about the server's counts for one question."""
    usage, counts = reply["usage"], reply["choices"][0]["meta_info"].get("freekv")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    lines = [f"{usage['prompt_tokens']} prompt tokens, {cached} of them from the prefix cache"]
    if counts is None:
        return [*lines, "no retrieval: the server reports none"]
    return [
        *lines,
        f"{counts['context_pages']} pages in the context, {counts['attended_pages']} attended to by each kv head in each of "
        f"{counts['decode_steps']} decode steps",
        f"{counts['selected_units']} pages selected (counted per kv head and layer), {counts['recalled_units']} of them recalled from host "
        "memory",
        f"{counts['corrections']} of {counts['correction_decisions']} kv heads corrected (counted per layer and step)",
    ]


def put(server: Server, number: int, prompt) -> bool:
    """Ask one question and show the answer; returns whether it is right."""
    started = time.monotonic()
    reply = ask(server, list(prompt.messages))
    seconds = time.monotonic() - started
    answer = reply["choices"][0]["message"]["content"]
    right = answer == prompt.answer_text
    verdict = "right" if right else f"WRONG, expected{prompt.answer_text}"
    print(f"\nQuestion {number}  {prompt.messages[-1]['content']}")
    print(f"  answer   {answer.strip()}  ({verdict}, {seconds:.1f} s)")
    for title, line in zip(("prompt", "pages", "recall", "correct"), describe(reply)):
        print(f"  {title:8} {line}", flush=True)
    return right


def run(server: Server) -> bool:
    say(str(server))
    say(f"the server's log is {server.log.relative_to(ROOT)}")
    say(f"ready after {server.wait_until_ready(say):.0f} s")
    prompts = load_prompts()
    say(f"asking {len(prompts)} questions about one document of {LENGTH_TOKENS} tokens")
    right = sum(put(server, number, prompt) for number, prompt in enumerate(prompts, 1))
    print(f"\n{right} of {len(prompts)} answers are right.", flush=True)
    return right == len(prompts)


def show_how_to_use(server: Server) -> None:
    say(f"the server stays up at {server.url}, process {server.process.pid}")
    say(f"  OpenAI API: {server.url}/v1    totals: {server.url}/server_info    Prometheus: {server.url}/metrics")
    say(f"  stop it: kill {server.process.pid}")


@ended_by_sigterm()
def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the server running")
    parser.add_argument("--port", type=int, help="port of the server (default: a free one)")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    say(f"starting SGLang with KV retrieval on {torch.cuda.get_device_name() if on_gpu else 'the CPU'}")
    server = keep = None
    try:
        unpack_weights()
        port = free_port() if arguments.port is None else ensure_free(arguments.port)
        server = Server([*FLAGS, *(FLAGS_ON_GPU if on_gpu else FLAGS_ON_CPU)], port, LOG, ROOT)
        passed = run(server)
        keep = arguments.keep
        return 0 if passed else 1
    except ServerFailed as error:
        say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if keep:
            show_how_to_use(server)
        elif server is not None:
            say("stopping the server" if server.is_alive() else "the server is down")
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
