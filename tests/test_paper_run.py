"""The driver of all figures: GPUs work side by side, each on one job at a time, and what fails or is late costs the others nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

import psutil
import pytest

from benchmarks.clock import Clock
from benchmarks.paper import run
from benchmarks.report import Report

NOTE = """
import os, pathlib, sys, time
begun = time.monotonic()
time.sleep(0.1)
pathlib.Path(sys.argv[1]).write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']} {begun} {time.monotonic()}")
"""


MEET = """
import pathlib, sys, time
mine = pathlib.Path(sys.argv[1])
other = mine.with_name({"figure-0": "figure-1", "figure-1": "figure-0"}[mine.name])
mine.with_suffix(".begun").touch()
give_up = time.monotonic() + 60
while not other.with_suffix(".begun").exists():
    assert time.monotonic() < give_up, "one GPU waited for the other"
    time.sleep(0.02)
""" + NOTE  # fmt: skip


@dataclass(frozen=True)
class Fake(run.Job):
    """Runs ``program`` with the path of a file of its own."""

    program: str = NOTE

    def command(self, out: Path, minutes: float) -> list[str]:
        return [sys.executable, "-c", self.program, str(out / self.name)]


def jobs(*programs: str) -> list[Fake]:
    return [Fake("figure", str(number), program=program) for number, program in enumerate(programs)]


def test_gpus_work_side_by_side_on_a_job_each(tmp_path):
    lanes = run.Lanes(jobs(MEET, MEET, NOTE, NOTE, NOTE), tmp_path / "new", Clock(60))
    assert lanes.run(["2", "GPU-5"]) == []
    spans: dict[str, list] = {}
    for path in (tmp_path / "new").glob("figure-?"):
        gpu, *span = path.read_text().split()
        spans.setdefault(gpu, []).append(tuple(map(float, span)))
    assert sum(map(len, spans.values())) == 5 and set(spans) == {"2", "GPU-5"}
    for mine in map(sorted, spans.values()):
        assert all(end <= begin for (_, end), (begin, _) in zip(mine, mine[1:])), "two jobs shared a GPU"


def test_what_fails_is_told_and_the_others_go_on(tmp_path):
    (failure,) = run.Lanes(jobs("print('why'); raise SystemExit(3)", NOTE), tmp_path, Clock(60)).run(["0"])
    assert failure == f"figure-0: status 3; see {tmp_path / 'run-figure-0.log'}"
    assert "why" in (tmp_path / "run-figure-0.log").read_text() and (tmp_path / "figure-1").exists()


def test_nothing_is_begun_that_has_no_time_left(tmp_path):
    assert run.Lanes(jobs(NOTE, NOTE), tmp_path, Clock(1)).run(["0", "1"]) == ["figure-0: not begun", "figure-1: not begun"]
    assert not list(tmp_path.iterdir())


def test_a_job_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LEAST_S", 0)
    monkeypatch.setattr(run, "GRACE_S", 1)
    started = time.monotonic()
    first, second = run.Lanes(jobs("import time; time.sleep(60)", NOTE), tmp_path, Clock(1 / 60)).run(["0"])
    assert first.startswith("figure-0: status -15;") and second == "figure-1: not begun"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_and_begins_nothing(tmp_path, number):
    def send() -> None:
        while not (tmp_path / "run-figure-1.log").exists():
            time.sleep(0.02)
        signal.pthread_kill(threading.get_ident(), number)  # the harder case: not to the thread that Python's handlers run in

    sleeping = "import time; time.sleep(60)"
    handler, started = signal.getsignal(number), time.monotonic()
    threading.Thread(target=send).start()
    failures = run.Lanes(jobs(sleeping, sleeping, NOTE), tmp_path, Clock(60)).run(["0", "1"])
    assert sorted(failures)[:2] == [f"figure-{n}: status -15; see {tmp_path / f'run-figure-{n}.log'}" for n in (0, 1)]
    assert sorted(failures)[2] == "figure-2: not begun" and time.monotonic() - started < 20
    assert signal.getsignal(number) is handler


def test_a_signal_ends_what_does_not_listen_and_its_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 1)
    deaf = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(server.pid))
time.sleep(120)
"""

    def send() -> None:
        while not (tmp_path / "figure-0").exists() or not (tmp_path / "figure-0").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)

    started = time.monotonic()
    threading.Thread(target=send).start()
    (failure,) = run.Lanes(jobs(deaf), tmp_path, Clock(60)).run(["0"])
    assert failure.startswith("figure-0: status -9;") and time.monotonic() - started < 30
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "figure-0").read_text())).status() == psutil.STATUS_ZOMBIE


def test_a_log_that_cannot_be_written_costs_that_job_alone(tmp_path):
    (tmp_path / "run-figure-0.log").mkdir()
    (failure,) = run.Lanes(jobs(NOTE, NOTE), tmp_path, Clock(60)).run(["0"])
    assert failure.startswith("figure-0: ") and "run-figure-0.log" in failure and (tmp_path / "figure-1").exists()


def test_gpus_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")
    assert run.visible_gpus() == ["5", "GPU-6"]


def test_a_gpu_that_is_none_is_refused_before_jobs_are_lost_to_it(tmp_path, capsys):
    with mock.patch.object(sys, "argv", ["run.py", "--gpus", "97", "--out", str(tmp_path)]), pytest.raises(SystemExit) as refused:
        run.main()
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "--gpus 97: expected a GPU that PyTorch can use, but " in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("job", run.JOBS, ids=lambda job: job.name)
def test_every_job_is_understood(tmp_path, job):
    _, _, module, *words = job.command(tmp_path, 10)
    with mock.patch.object(sys, "argv", [module, *words, "--tables"]):
        assert import_module(module).main() == 0


def test_no_two_jobs_measure_the_same():
    files: dict[tuple, list] = {}
    for job in run.JOBS:
        files.setdefault((job.file, job.part), []).append(job.systems)
    for groups in files.values():
        systems = [system for group in groups for system in group]
        assert len(groups) == 1 or (all(groups) and len(set(systems)) == len(systems))
    assert len({job.name for job in run.JOBS}) == len(run.JOBS)


OPEN = """
import pathlib, sys
from benchmarks.report import Report
report = Report("demo", pathlib.Path(sys.argv[1]).parent)
"""

WRITE = """
job = sys.argv[1][-1]
for number in range(20):
    report.add(f"{job}/{number}", {"value": number})
    report.note(**{f"server {job}": number})
"""


def test_jobs_that_write_one_file_are_one_run(tmp_path):
    """Both have read the file before either writes, and neither loses what the other wrote."""
    Report("demo", tmp_path).add("0/3", {"value": "earlier"})
    programs = [OPEN + MEET + WRITE] * 2
    assert run.Lanes(jobs(*programs), tmp_path, Clock(60)).run(["0", "1"]) == []
    written = json.loads((tmp_path / "demo.json").read_text())
    expected = {f"{job}/{number}": {"value": number, "run": 1} for job in "01" for number in range(20)}
    assert written["results"] == expected and written["superseded"] == {"0/3": [{"value": "earlier", "run": 0}]}
    assert len(written["runs"]) == 2 and written["runs"][1]["server 0"] == written["runs"][1]["server 1"] == 19
