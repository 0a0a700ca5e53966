"""Seconds until a server is ready, stock SGLang and FreeKV in turns: a first start, one of the same sizes, and one of other sizes.

Each system keeps its compiled kernels in a scratch directory of its own, which is empty before its first start.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.clock import Clock
from benchmarks.report import ROOT, Report, arguments, chosen, say, table
from benchmarks.servers import grow_host_memory, keep_log
from benchmarks.setups import SHAPES, Setup, words
from sglang_freekv.launch.server import PHASES, Server, ServerFailed, ended_by_sigterm, free_port
from sglang_freekv.scheduler_patch.cpu import cpu_environment

FIRST = Setup(context_length=131_072, host_memory=64)
OTHER = replace(FIRST, context_length=40_000, budget=3072, max_running=32)
SMALL = Setup(shape="needle", device="cpu", scale=16, budget=512)
STARTS = ("stock-first", "freekv-first", "stock-again", "freekv-other-sizes", "freekv-again")
MOST_S = 150  # until a server that is not the first is ready
CACHES = (  # variables that name the directories of compiled kernels: SGLang's, Triton's, FlashInfer's, PyTorch's, TVM's and the driver's
    "SGLANG_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH",
    "TVM_FFI_CACHE_DIR", "CUDA_CACHE_PATH",
)  # fmt: skip
TOLD = re.compile(  # what SGLang and FreeKV tell of a part of a start, with its seconds
    r"(host pool: .* pinned in|\d+ kernels compiled or loaded in|Load weight end\. elapsed=|[Cc]apture .*?graph end\..*?elapsed=)\s*([\d.]+) ?s"
)


class StartedServer(Server):
    """A server, and when each phase of its start began."""

    def __init__(self, setup: Setup, system: str, log: Path) -> None:
        environment = cpu_environment() if setup.device == "cpu" and system == "stock" else {}
        caches = {name: log.parent / "caches" / system / name for name in CACHES}
        for directory in caches.values():
            directory.mkdir(parents=True, exist_ok=True)
        environment |= {name: str(directory) for name, directory in caches.items()}
        self.program = ("env", *(f"{name}={value}" for name, value in environment.items()), *Server.program)
        super().__init__(words(setup.flags(system, log.parent / "model")), free_port(), log, ROOT)

    def __str__(self) -> str:
        return shlex.join(["python", *self.command[self.command.index("-m") :]])

    def start(self, most_s: float) -> dict:
        """Seconds until it is ready, seconds of each phase, and what the log tells of its parts.

        Raises:
            ServerFailed: it is not ready after ``most_s``.
        """
        begun = {"importing SGLang": 0.0}

        def tell(news: str) -> None:
            say(news)
            seconds, _, phase = news.partition(" s  ")
            if phase in PHASES.values():
                begun.setdefault(phase, float(seconds))
            if float(seconds) > most_s:
                raise ServerFailed(f"not ready after {most_s:.0f} s\n{self.tail()}")

        ready = self.wait_until_ready(tell)
        ends = [*list(begun.values())[1:], ready]
        phases = {phase: end - begin for (phase, begin), end in zip(begun.items(), ends)}
        told = {what.strip(): float(seconds) for what, seconds in TOLD.findall(self.log.read_text(errors="replace"))}
        return {"ready_s": ready, "phases_s": phases, "told_s": told}


def measure(name: str, setup: Setup, directory: Path, most_s: float) -> dict:
    """Start the server of ``name``, one of ``STARTS``, once."""
    system = name.partition("-")[0]
    if setup.device == "cuda" and system != "stock":
        grow_host_memory(setup.host_memory)
    server = StartedServer(setup, system, directory / f"{name}.log")
    try:
        say(f"{name}: starting {server}")
        return server.start(most_s) | {"command": str(server).replace(f"{directory}/", "").replace(f"{ROOT}/", "")}
    finally:
        server.stop()


@ended_by_sigterm()
def main() -> int:
    parser = arguments(__doc__, "start-SHAPE", STARTS)
    parser.add_argument("--shape", choices=SHAPES, default=FIRST.shape)
    parser.add_argument("--host-memory", type=float, default=FIRST.host_memory, metavar="GIB", help="FreeKV's --freekv-host-memory")
    parser.add_argument("--minutes", type=float, default=18, help="when to stop, with what is measured by then")
    parser.add_argument("--first-seconds", type=float, default=300, help="most seconds of a first start, which compiles for minutes")
    parser.add_argument("--dry-run", action="store_true", help="the needle model on a CPU")
    options = parser.parse_args()
    first, other = (replace(setup, shape=options.shape, host_memory=options.host_memory) for setup in (FIRST, OTHER))
    if options.dry_run:
        first, other = SMALL, replace(SMALL, budget=768, context_length=70_000)
    report, clock, begun = Report(f"start-{first.shape}", options.out), Clock(options.minutes), set()
    with tempfile.TemporaryDirectory() as scratch:
        for name in filter(chosen(options), STARTS):
            with report.part(name):
                system, _, start = name.partition("-")
                if start != "first" and system not in begun:
                    raise ValueError(f"its kernels are not compiled yet, expected {system}-first before it in the same run; leave that in")
                most_s = min(clock.left_to_start(), options.first_seconds if start == "first" else MOST_S)
                result = measure(name, other if start == "other-sizes" else first, Path(scratch), most_s)
                begun.add(system)
                report.add(name, result)
                for what, seconds in (result["phases_s"] | result["told_s"]).items():
                    say(f"{name}: {seconds:6.1f} s  {what}")
                say(f"{name}: ready after {result['ready_s']:.0f} s")
            keep_log(Path(scratch) / f"{name}.log", report.path, name)
    rows = (
        [name, result["ready_s"], *(result["phases_s"].get(phase) for phase in PHASES.values())] for name, result in report.results.items()
    )
    return report.finish(table(["seconds", "until ready", *PHASES.values()], rows))


if __name__ == "__main__":
    sys.exit(main())
