"""Every kernel at real shapes: checked against its reference, then timed in a CUDA graph over inputs that no cache holds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch

from benchmarks import frame_trials
from benchmarks.bench_recall import host_memory
from benchmarks.frame_trials import Frames, Running
from benchmarks.kernel_inputs import Case, Inputs
from benchmarks.kernel_trials import KERNELS
from benchmarks.report import Report, arguments, chosen, say, seconds_since_start, table
from benchmarks.timing import Ceilings, time_graph
from benchmarks.trial import Trial
from sglang_freekv.config import GIB, PageBudget

CASES = [
    *(Case(f"llama-{context // 1024}k-b{batch}", 32, 8, 128, context, batch) for context in (32768, 131072) for batch in (1, 8, 16)),
    *(Case(f"qwen2.5-{context // 1024}k-b8", 28, 4, 128, context, 8) for context in (32768, 131072)),
]  # Qwen3-8B has the heads of Llama-3.1-8B
RUNNING = [Running(f"{rows}-rows-{context // 1024}k", rows, context) for context, rows in product((8192, 32768), (1, 16, 64))]
TINY = Case("tiny", 6, 2, 16, 1024, 3, budget=PageBudget(2, 8, 2))
TINY_ROWS = Running("tiny-rows", 3, 96, slots=4)
ONLY_ON_GPU = ("recall_pages",)


def measure(trial: Trial, device: str, ceilings: Ceilings) -> dict:
    launches, before, alone = trial.launches, trial.before, 0.0
    if before is not None:
        launches = [lambda launch=launch: (before(), launch()) for launch in trial.launches]
        alone = time_graph([before], device)["median"]
    seconds = time_graph(launches, device)
    scale = len(trial.launches) / (len(trial.launches) - trial.idle)
    microseconds = {name: (value - alone) * 1e6 * scale for name, value in seconds.items() if name != "repeats"}
    rate = trial.num_bytes / (microseconds["median"] * 1e-6)
    result = {"us": microseconds, "sets": len(trial.launches), "bytes": trial.num_bytes, "error": trial.error}
    if trial.num_bytes:
        result |= {"bytes_per_s": rate, "ceiling": trial.ceiling, "of_ceiling": rate / getattr(ceilings, trial.ceiling)}
    return result


class Bench:
    """What is measured, and where results go.

    Args:
        options: the command line.
    """

    def __init__(self, options) -> None:
        self.device, self.wanted, self.report = options.device, chosen(options), Report("bench_kernels", options.out)
        self.give_up_s, self.minutes = seconds_since_start() + options.minutes * 60, options.minutes
        self.ceilings = Ceilings.measure(self.device, GIB if self.device == "cuda" else GIB // 64)
        self.report.add("ceilings", vars(self.ceilings))

    def run(self, cases: Iterable[Any], kernels: dict[str, Callable[[Any], Trial]], make: Callable[[Any], Any]) -> str:
        """Measure every kernel in every case, on inputs that ``make`` makes of the case once. Returns the table."""
        for case in cases:
            keys = {name: f"{case.name}/{name}" for name in kernels if self.device == "cuda" or name not in ONLY_ON_GPU}
            names = [name for name, key in keys.items() if self.wanted(key)]
            inputs = None
            for name in names:
                with self.report.part(keys[name], quiet=True):
                    if seconds_since_start() > self.give_up_s:
                        raise TimeoutError(f"not begun after {self.minutes:g} minutes; run it with --only")
                    inputs = inputs or make(case)
                    result = measure(kernels[name](inputs), self.device, self.ceilings)
                    self.report.add(keys[name], result | {"case": vars(case)})
            say(f"{case.name}: {len(names)} kernels")
            del inputs
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
        rows = [(name, *(_cell(self.report.results.get(f"{case.name}/{name}")) for case in cases)) for name in kernels]
        return table(("us and share of the ceiling", *(case.name for case in cases)), rows)


def main() -> int:
    names = (*KERNELS, *frame_trials.KERNELS)
    parser = arguments(__doc__, "bench_kernels", [f"CASE/{name}" for name in names])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: references, tiny cases")
    parser.add_argument("--host-gib", type=float, default=2, help="pinned host pool")
    parser.add_argument("--minutes", type=float, default=9, help="when to stop, with what is measured by then")
    options = parser.parse_args()
    bench, device = Bench(options), options.device
    on_gpu, ceilings = device == "cuda", bench.ceilings
    host = host_memory(int(options.host_gib * GIB) if on_gpu else 8 << 20, "registered" if on_gpu else None)
    tables = [
        bench.run(CASES if on_gpu else [TINY], KERNELS, lambda case: Inputs(case, device, host)),
        bench.run(RUNNING if on_gpu else [TINY_ROWS], frame_trials.KERNELS, lambda case: Frames(case, device)),
    ]
    told = f"device {ceilings.device / 1e9:.0f}, to device {ceilings.to_device / 1e9:.1f}, to host {ceilings.to_host / 1e9:.1f} GB/s"
    return bench.report.finish(f"ceilings: {told}", *tables)


def _cell(result: dict | None) -> str:
    if result is None:
        return "-"
    share = f" {result['of_ceiling']:.2f}" if "of_ceiling" in result else ""
    return f"{result['us']['median']:.1f}{share}"


if __name__ == "__main__":
    sys.exit(main())
