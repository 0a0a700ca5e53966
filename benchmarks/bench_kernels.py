"""Every kernel at real shapes: checked against its reference, then timed in a CUDA graph over inputs that no cache holds."""

from __future__ import annotations

import gc
import sys

import torch

from benchmarks.bench_recall import host_memory
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
TINY = Case("tiny", 6, 2, 16, 1024, 3, budget=PageBudget(2, 8, 2))
ONLY_ON_GPU = ("recall_pages",)


def measure(trial: Trial, device: str, ceilings: Ceilings) -> dict:
    seconds = time_graph(trial.launches, device)
    scale = len(trial.launches) / (len(trial.launches) - trial.idle)
    microseconds = {name: value * 1e6 * scale for name, value in seconds.items() if name != "repeats"}
    rate = trial.num_bytes / (microseconds["median"] * 1e-6)
    result = {"us": microseconds, "sets": len(trial.launches), "bytes": trial.num_bytes, "error": trial.error}
    if trial.num_bytes:
        result |= {"bytes_per_s": rate, "ceiling": trial.ceiling, "of_ceiling": rate / getattr(ceilings, trial.ceiling)}
    return result


def main() -> int:
    parser = arguments(__doc__, "bench_kernels", [f"CASE/{name}" for name in KERNELS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: references, one tiny case")
    parser.add_argument("--host-gib", type=float, default=2, help="pinned host pool")
    parser.add_argument("--minutes", type=float, default=9, help="when to stop, with what is measured by then")
    options = parser.parse_args()
    give_up = seconds_since_start() + options.minutes * 60
    device, wanted, report = options.device, chosen(options), Report("bench_kernels", options.out)
    on_gpu = device == "cuda"
    ceilings = Ceilings.measure(device, GIB if on_gpu else GIB // 64)
    report.add("ceilings", vars(ceilings))
    host = host_memory(int(options.host_gib * GIB) if on_gpu else 8 << 20, "registered" if on_gpu else None)
    cases = CASES if on_gpu else [TINY]
    for case in cases:
        names = [name for name in KERNELS if wanted(f"{case.name}/{name}") and (on_gpu or name not in ONLY_ON_GPU)]
        inputs = None
        for name in names:
            with report.part(f"{case.name}/{name}", quiet=True):
                if seconds_since_start() > give_up:
                    raise TimeoutError(f"not begun after {options.minutes:g} minutes; run it with --only")
                inputs = inputs or Inputs(case, device, host)
                report.add(f"{case.name}/{name}", measure(KERNELS[name](inputs), device, ceilings) | {"case": vars(case)})
        say(f"{case.name}: {len(names)} kernels")
        del inputs
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    rows = [(name, *(_cell(report.results.get(f"{case.name}/{name}")) for case in cases)) for name in KERNELS]
    told = f"device {ceilings.device / 1e9:.0f}, to device {ceilings.to_device / 1e9:.1f}, to host {ceilings.to_host / 1e9:.1f} GB/s"
    return report.finish(f"ceilings: {told}", table(("us and share of the ceiling", *(case.name for case in cases)), rows))


def _cell(result: dict | None) -> str:
    if result is None:
        return "-"
    share = f" {result['of_ceiling']:.2f}" if "of_ceiling" in result else ""
    return f"{result['us']['median']:.1f}{share}"


if __name__ == "__main__":
    sys.exit(main())
