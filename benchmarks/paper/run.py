"""All figures: each driver, or some of its servers, on a GPU to itself, until nothing is left or the time is over.

    python -m benchmarks.paper.run --gpus 0 1 --minutes 55
    python -m benchmarks.paper.run --only 'latency-*'

What is measured already is not measured again, so that the same command goes on where one ended. Then make the page: figures.py.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock

import psutil
import torch

from benchmarks.clock import Clock, OutOfTime
from benchmarks.paper import agents, crossover, goodput
from benchmarks.profiles import NEAREST
from benchmarks.report import JOINT_RUN, ROOT, arguments, chosen, say
from benchmarks.stamp import command

LEAST_S, GRACE_S = 90, 120  # that a job is begun with, and that it may take beyond its time to stop servers and write
POLL_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """A driver on a shape.

    Args:
        suffix: ends the name of the results' file; empty for the first job of a figure and shape.
        more: further flags of the driver.
        part: tells the job from others that write the same file, beside ``systems``.
        systems: servers of the driver, if jobs with others write the same file.
    """

    figure: str
    shape: str
    suffix: str = ""
    more: tuple[str, ...] = ()
    part: str = ""
    systems: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return "-".join(filter(None, (self.figure, self.shape, self.suffix)))

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.file, self.part, "+".join(self.systems))))

    def of(self, *groups: tuple[str, ...]) -> Iterator[Job]:
        """A job for each group of servers, so that they are measured side by side."""
        return (replace(self, systems=group) for group in groups)

    def command(self, out: Path, minutes: float) -> list[str]:
        words = ("--shape", self.shape, "--minutes", f"{minutes:.1f}", "--out", str(out))
        suffix, systems = (("--suffix", self.suffix) if self.suffix else ()), (("--systems", *self.systems) if self.systems else ())
        return [sys.executable, "-m", f"benchmarks.paper.{self.figure}", *words, *suffix, *systems, *self.more]


LLAMA = "llama-3.1-8b"
EIGHT_BITS = ("--stock-flags=--kv-cache-dtype fp8_e4m3", "--freekv-flags=--freekv-kv-dtype int8")
A_MILLION = (
    *("--freekv-flags=--freekv-kv-dtype int8 --mem-fraction-static 0.75", "--loads", NEAREST, "--only", "*/1024k/b1"),
    *("--contexts", "1048576", "--batches", "1", "--max-running", "1", "--host-memory", "70", "--part-seconds", "1000"),
)
LONG = "--batches", "1", "--max-running", "1", "--part-seconds", "1400", "--passes", "1"  # a prefill of minutes; 62 or 124 GiB on the host
HALF_A_MILLION = *LONG, "--contexts", "524288", "--host-memory", "64"
A_MILLION_IN_BF16 = *LONG, "--contexts", "1048576", "--host-memory", "126"
LARGE = ("--contexts", "32768", "131072", "--batches", "16", "8", "1", "--most-tokens", "1100000", "--loads", NEAREST)
SMALLER = "--max-running", "16", "--loads", NEAREST
FA3 = "--stock-flags=--attention-backend fa3"
RATES = "--seconds", "60", "--requests", "1000", "--rates"
BATCHED = "--enable-dynamic-batch-tokenizer"  # else the load is bound by one tokenizer
MAIN = (crossover.DEFAULT,), (crossover.RESIDENT,), *((name,) for name in crossover.FASTER)
CONTEXTS = ("--contexts", "2048", "8192", "32768", "131072", "--loads", NEAREST)
SAME_KV = f"freekv-{crossover.SAME}", crossover.HICACHE, f"{crossover.DEFAULT}-{crossover.SAME}", f"stock-{crossover.SAME}"
THIRTY = ("--contexts", "32768", "--batches", "30", "--most-tokens", "1000000", *("--context-length", "36000", "--max-running", "30"))
THIRTY += "--host-memory", "126"  # GiB, which hold all prompts: one such server at a time
JOBS = (  # the longest first, so that GPUs come to an end together
    *Job("crossover", LLAMA, "8-bit", A_MILLION, part="1024k").of((crossover.RESIDENT,)),
    *Job("crossover", LLAMA, more=CONTEXTS).of(*MAIN),
    Job("latency", LLAMA),
    *Job("goodput", LLAMA, more=(*RATES, "4", "5", "6", "7", "8")).of((goodput.FREEKV,), (goodput.FAST,)),
    *Job("goodput", LLAMA, more=(FA3, *RATES, "3", "3.5", "4", "4.5")).of((goodput.STOCK,)),
    *Job("goodput", LLAMA, "dynamic-batch", (f"--freekv-flags={BATCHED}", *RATES, "5", "6", "7", "8")).of((goodput.FREEKV,)),
    *Job("goodput", LLAMA, "dynamic-batch", (f"{FA3} {BATCHED}", *RATES, "3.5", "4", "4.5")).of((goodput.STOCK,)),
    *Job("agents", LLAMA).of((agents.FREEKV, agents.HICACHE), agents.FASTER),
    *(Job("latency", shape) for shape in ("qwen3-8b", "qwen2.5-7b")),
    *Job("crossover", LLAMA, "8-bit", (*EIGHT_BITS, *LARGE)).of(*MAIN),
    *Job("crossover", LLAMA, "recalled-fa3", (FA3, "--contexts", "8192", "32768", "131072")).of(("freekv",), ("stock",)),
    *Job("crossover", LLAMA, "same-kv", (FA3, *THIRTY)).of(*((name,) for name in SAME_KV)),
    *Job("crossover", LLAMA, "long", A_MILLION_IN_BF16, part="1024k").of((crossover.DEFAULT,), crossover.FASTER[:1]),
    *Job("crossover", LLAMA, "long", HALF_A_MILLION, part="512k").of((crossover.DEFAULT,), crossover.FASTER[:1]),
    *Job("crossover", "qwen3-32b", more=("--batches", "16", "4", "1", "--most-tokens", "140000", *SMALLER)).of(*MAIN),
    *Job("crossover", "qwen3-30b-a3b", more=SMALLER).of(*MAIN),
    Job("ablation", LLAMA),
)


class Lanes:
    """One lane for each GPU; each takes the next job when it is free.

    Args:
        out: takes the results, and the output of each job as ``run-NAME.log``.
    """

    def __init__(self, jobs: Iterable[Job], out: Path, clock: Clock) -> None:
        self.jobs, self.out, self.clock = list(jobs), out, clock
        self.failures: list[str] = []
        self.joint = f"{secrets.token_hex(6)} {command()}"
        self._lock, self._stopped = Lock(), Event()
        out.mkdir(parents=True, exist_ok=True)

    def run(self, gpus: list[str]) -> list[str]:
        """What failed or was not begun, when all lanes have ended. A signal has what runs end, and nothing more is begun."""
        with self._stopping_on_signals(), ThreadPoolExecutor(len(gpus)) as pool:
            lanes = [pool.submit(self._lane, gpu) for gpu in gpus]
            while wait(lanes, POLL_S).not_done:  # not one long wait: a signal that another thread is given does not end that
                pass
            for lane in lanes:
                lane.result()
        return self.failures + [f"{job.name}: not begun" for job in self.jobs]

    def _lane(self, gpu: str) -> None:
        while (taken := self._take()) is not None:
            job, seconds = taken
            log = self.out / f"run-{job.name}.log"
            try:
                status = self._run(job, gpu, seconds, log)
            except OSError as error:
                self.failures.append(f"{job.name}: {error}")
                continue
            say(f"{job.name} on GPU {gpu} ended with status {status}")
            if status:
                self.failures.append(f"{job.name}: status {status}; see {log}")

    def _take(self) -> tuple[Job, float] | None:
        """The next job and the seconds that it may take; None if there is none, or no time."""
        with self._lock, suppress(OutOfTime):
            seconds = self.clock.left(LEAST_S)
            if self.jobs and not self._stopped.is_set():
                return self.jobs.pop(0), seconds
        return None

    def _run(self, job: Job, gpu: str, seconds: float, log: Path) -> int:
        words = job.command(self.out, seconds / 60)
        say(f"{job.name} on GPU {gpu}: {' '.join(words[1:])}")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1", JOINT_RUN: self.joint}
        with log.open("w") as output:  # a session of its own: what is typed at a terminal reaches it through us alone
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True)
        late = time.monotonic() + seconds + GRACE_S
        while process.poll() is None and not self._stopped.is_set() and time.monotonic() < late:
            self._stopped.wait(POLL_S)
        return _end(process)

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, lambda *_: self._stopped.set()) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(process: subprocess.Popen) -> int:
    """Ask it to end, if it has not; after a while it is ended, and the servers that it started with it."""
    process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        servers = []
        with suppress(psutil.NoSuchProcess):
            servers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for server in servers:
            with suppress(psutil.NoSuchProcess):
                server.kill()
        psutil.wait_procs(servers, GRACE_S)  # the next job finds the GPU free
        return process.wait()


def visible_gpus() -> list[str]:
    """As this process sees them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if told is None else [name for name in told.split(",") if name]


def unusable(gpu: str) -> str | None:
    """The last line of why a process has no use of it, asked before jobs are lost to it."""
    probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
    done = subprocess.run(probe, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1] if done.returncode else None


def main() -> int:
    parser = arguments(__doc__, "paper-FIGURE-SHAPE", dict.fromkeys(name for job in JOBS for name in (job.file, job.name)))
    parser.add_argument("--gpus", nargs="+", default=visible_gpus(), metavar="GPU", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--minutes", type=float, default=90, help="when to stop, with what is measured by then")
    options = parser.parse_args()
    jobs = [job for job in JOBS if chosen(options)(job.name, job.file)]
    if not jobs:
        parser.error(f"--only, --skip: nothing is left of {', '.join(job.name for job in JOBS)}; name one of these")
    if not options.gpus or len(set(options.gpus)) < len(options.gpus):
        parser.error(f"--gpus {' '.join(options.gpus)}: expected at least one, each once; this machine shows {len(visible_gpus())}")
    for gpu in options.gpus:
        if why := unusable(gpu):
            parser.error(f"--gpus {gpu}: expected a GPU that PyTorch can use, but {why}; leave it out")
    failures = Lanes(jobs, options.out, Clock(options.minutes)).run(options.gpus)
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"results: {options.out}; the page: python -m benchmarks.paper.figures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
