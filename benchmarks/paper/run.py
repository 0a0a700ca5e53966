"""All figures: each driver on a GPU to itself, one after the other, until nothing is left or the time is over.

    python benchmarks/paper/run.py --gpus 0 1 --minutes 55
    python benchmarks/paper/run.py --only 'latency-*'

What is measured already is not measured again, so that the same command goes on where one ended. Then make the page: figures.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE.parent),) if path not in sys.path]

import torch  # noqa: E402

from clock import Clock, OutOfTime  # noqa: E402
from report import arguments, chosen, say  # noqa: E402

LEAST_S, GRACE_S = 90, 120  # that a job is begun with, and that it may take beyond its time to stop servers and write


@dataclass(frozen=True)
class Job:
    """A driver on a shape; the file of its results is no other job's."""

    figure: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.figure}-{self.shape}"

    def command(self, out: Path, minutes: float) -> list[str]:
        words = ("--shape", self.shape, "--minutes", f"{minutes:.1f}", "--out", str(out))
        return [sys.executable, str(HERE / f"{self.figure}.py"), *words]


LLAMA = "llama-3.1-8b"
JOBS = (  # the longest first, so that GPUs come to an end together
    *(Job(figure, LLAMA) for figure in ("crossover", "latency", "goodput")),
    *(Job("latency", shape) for shape in ("qwen3-8b", "qwen2.5-7b")),
    Job("ablation", LLAMA),
)


class Lanes:
    """One lane for each GPU; each takes the next job when it is free.

    Args:
        out: takes the results, and the output of each job as ``paper-NAME.log``.
    """

    def __init__(self, jobs: Iterable[Job], out: Path, clock: Clock) -> None:
        self.jobs, self.out, self.clock = list(jobs), out, clock
        self.failures: list[str] = []
        self._lock, self._running, self._stopped = Lock(), set(), False
        out.mkdir(parents=True, exist_ok=True)

    def run(self, gpus: list[str]) -> list[str]:
        """What failed or was not begun, when all lanes have ended."""
        with ThreadPoolExecutor(len(gpus)) as pool, self._stopping_on_signals():
            list(pool.map(self._lane, gpus))
        return self.failures + [f"{job.name}: not begun" for job in self.jobs]

    def stop(self) -> None:
        """Ask what runs to end; nothing more is begun."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    def _lane(self, gpu: str) -> None:
        while (begun := self._begin(gpu)) is not None:
            job, process, seconds = begun
            status = self._wait(process, seconds + GRACE_S)
            say(f"{job.name} on GPU {gpu} ended with status {status}")
            if status:
                self.failures.append(f"{job.name}: status {status}; see {self._log(job)}")

    def _begin(self, gpu: str) -> tuple[Job, subprocess.Popen, float] | None:
        """The next job, under way; a signal finds it among those that run, or finds it not begun."""
        with self._lock:
            try:
                seconds = self.clock.left(LEAST_S)
            except OutOfTime:
                return None
            if self._stopped or not self.jobs:
                return None
            job = self.jobs.pop(0)
            command = job.command(self.out, seconds / 60)
            say(f"{job.name} on GPU {gpu}: {' '.join(command[1:])}")
            with self._log(job).open("w") as log:
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"}
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            self._running.add(process)
            return job, process, seconds

    def _wait(self, process: subprocess.Popen, seconds: float) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                return process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)

    def _log(self, job: Job) -> Path:
        return self.out / f"paper-{job.name}.log"

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """The jobs have sessions of their own, so that what is typed at a terminal does not reach them."""
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main() -> int:
    parser = arguments(__doc__, "paper-FIGURE-SHAPE", [job.name for job in JOBS])
    gpus = [str(number) for number in range(torch.cuda.device_count())]
    parser.add_argument("--gpus", nargs="+", default=gpus, metavar="GPU", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--minutes", type=float, default=90, help="when to stop, with what is measured by then")
    options = parser.parse_args()
    if not options.gpus or len(set(options.gpus)) < len(options.gpus):
        parser.error(f"--gpus {' '.join(options.gpus)}: expected at least one, each once; this machine has {len(gpus)}")
    wanted = chosen(options)
    jobs = [job for job in JOBS if wanted(job.name)]
    if not jobs:
        parser.error(f"--only {' '.join(options.only)}: expected one of {', '.join(job.name for job in JOBS)}")
    failures = Lanes(jobs, options.out, Clock(options.minutes)).run(options.gpus)
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"results: {options.out}; the page: python benchmarks/paper/figures.py", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
