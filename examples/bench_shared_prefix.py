# SPDX-License-Identifier: Apache-2.0
"""Measures stock SGLang and FreeKV with SGLang's bench_serving, under the same load: questions that share a few long prefixes.

Run: python -m sglang.launch_server --model-path MODEL --port 30001
     python -m sglang.launch_server --model-path MODEL --kv-retrieval freekv
     python -m examples.bench_shared_prefix [--stock http://127.0.0.1:30001] [--freekv http://127.0.0.1:30000]
Expect: one line for each server. With these defaults FreeKV is slower, because prompts hardly exceed the budget. For long contexts give
`--prefix-tokens 32768 --answer-tokens 256 --concurrency 16`. With one GPU, start one server after the other, and give `none` as the other's address.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def measure(url: str, load: list[str]) -> dict:
    """The report of bench_serving on the server at ``url``, as a dict. The prefix cache of the server is emptied first."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.jsonl"
        command = ["-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url, "--flush-cache", *load]
        print("python", shlex.join(command), flush=True)
        done = subprocess.run([sys.executable, *command, "--output-file", str(report)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-1000:] + done.stderr[-2000:])
        return json.loads(report.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", default="http://127.0.0.1:30001")
    parser.add_argument("--freekv", default="http://127.0.0.1:30000")
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--questions", type=int, default=4, help="about each prefix")
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()

    load = ["--dataset-name", "generated-shared-prefix", "--max-concurrency", str(arguments.concurrency), "--seed", "1"]
    load += ["--gsp-num-groups", str(arguments.prefixes), "--gsp-prompts-per-group", str(arguments.questions)]
    load += ["--gsp-system-prompt-len", str(arguments.prefix_tokens), "--gsp-question-len", "64"]
    load += ["--gsp-output-len", str(arguments.answer_tokens)]
    servers = {"stock": arguments.stock, "freekv": arguments.freekv}
    reports = {name: measure(url, load) for name, url in servers.items() if url != "none"}
    for name, report in reports.items():
        print(
            f"{name:6} {report['completed']} answers, {report['total_output_tokens']} tokens, median time to the first token "
            f"{report['median_ttft_ms']:.0f} ms, per further token {report['median_tpot_ms']:.1f} ms, "
            f"{report['output_throughput']:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
