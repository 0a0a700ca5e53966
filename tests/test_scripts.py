"""Every program of benchmarks/, examples/ and launch/ starts as documents tell to start it, with ``python -m``, and explains itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving import wait_until
from sglang_freekv.releases import TESTED

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"benchmarks": "benchmarks", "examples": "examples", "launch": "sglang_freekv.launch"}
PROGRAMS = [
    ".".join([package, *path.relative_to(ROOT / directory).with_suffix("").parts])
    for directory, package in PACKAGES.items()
    for path in sorted((ROOT / directory).rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
]

# All in one process, each with the modules that a process of its own would begin with; the slow imports are made once.
EXPLAIN = """
import contextlib, io, json, runpy, sys, traceback
import numpy, torch, triton, transformers
import sglang.srt.server_args, sglang.srt.managers.scheduler, sglang_freekv.retrieval, sglang_freekv.launch.server

modules, told = set(sys.modules), {}
for program in sys.argv[1:]:
    sys.argv[:] = [program, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            status = None
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    told[program] = status, out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple]:
    done = subprocess.run([sys.executable, "-c", EXPLAIN, *PROGRAMS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(told, program):
    status, text = told[program]
    assert status == 0 and "--help" in text, f"{status}\n{text[-500:]}"


STARTS_SERVERS = re.compile(
    r"^from (benchmarks\.servers import .*\brunning\b|sglang_freekv\.launch\.server import .*\bServer\b)", re.MULTILINE
)


def test_programs_that_start_servers_stop_them_where_they_are_terminated():
    sources = {path: path.read_text() for directory in PACKAGES for path in (ROOT / directory).rglob("*.py")}
    starting = {path: text for path, text in sources.items() if "\ndef main(" in text and STARTS_SERVERS.search(text)}
    assert len(starting) >= 11
    assert not [path.name for path, text in starting.items() if "\n@ended_by_sigterm()\ndef main(" not in text]


PYTEST = """#!/usr/bin/env bash
echo "asked: $*"
[ "${PYTHONDONTWRITEBYTECODE:-}${CUDA_VISIBLE_DEVICES:-}" ] && exit 1
[[ $* == *"$FAILING"* ]] || { echo '== 1 passed =='; exit 0; }
[ "$FAULT" ] && { printf 'half a line'; eval "$FAULT"; exit 0; }
echo 'FAILED tests/test_it.py'; echo '== 1 failed =='; exit 1
"""


def checkout(directory: Path, python: str) -> Path:
    """What ``launch/test.sh`` needs of a checkout, where each environment's Python is this script."""
    (directory / "launch").mkdir()
    (directory / "sglang_freekv").mkdir()
    for file in ("launch/test.sh", "launch/environments.sh", "sglang_freekv/releases.py"):
        shutil.copy(ROOT / file, directory / file)
    (directory / "launch" / "setup.sh").write_text("")
    for name in (".venv", *(f".venv-{release}" for release in TESTED[:-1])):
        program = directory / name / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text(python)
        program.chmod(0o755)
    return directory


def run_parts(directory: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "launch/test.sh"], cwd=directory, capture_output=True, text=True, timeout=300)


def runs(pid: int) -> bool:
    """Whether the process is there, and has not ended unnoticed by its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_signal_ends_the_parts_that_run(tmp_path):
    checkout(tmp_path, "#!/usr/bin/env bash\necho $$ >>started\nexec sleep 300\n")
    running, started = subprocess.Popen(["bash", "launch/test.sh"], cwd=tmp_path, stdout=subprocess.DEVNULL), tmp_path / "started"
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 2)
    running.terminate()
    assert running.wait(30) == 143
    parts = [int(pid) for pid in started.read_text().split()]
    wait_until(lambda: not any(map(runs, parts)))
    assert len(started.read_text().split()) == 2


@pytest.mark.parametrize("failing, status", [("nothing", 0), ("tests/scheduler_patch", 123), ("--ignore=tests/e2e", 123)])
def test_a_part_that_fails_fails_the_whole_run_and_ends_no_other(tmp_path, monkeypatch, failing, status):
    checkout(tmp_path, PYTEST)
    monkeypatch.setenv("FAILING", failing), monkeypatch.setenv("FAULT", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # with it, each process of the tests would compile what it imports
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # servers on a CPU would be refused
    done = run_parts(tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    _, told = done.stdout.split("==== All parts\n")
    names = ["fleet", "unit", "pairs", "servers"]
    names += [f"{part}-{release}" for release in TESTED[:-1] for part in ("servers", "fleet", "hooks")]
    assert {line.split()[0] for line in told.splitlines() if "==" in line} == set(names)
    assert told.count("== 1 passed ==") == len(names) - bool(status) and told.count("FAILED tests/test_it.py") == bool(status)
    assert len(re.findall(r"^asked: -P -m pytest ", done.stdout, re.MULTILINE)) == len(names)
    assert told.splitlines()[-1].startswith("Failed: ") == bool(status) and told.count("exit status 0 ") == len(names) - bool(status)


@pytest.mark.parametrize(
    "fault, status, end", [("kill -9 $$", 123, "exit status 137"), ("kill -9 $PPID", 125, "killed"), ("exit 255", 123, "exit status 255")]
)
def test_a_part_that_crashes_is_told_in_the_last_lines(tmp_path, monkeypatch, fault, status, end):
    checkout(tmp_path, PYTEST)
    monkeypatch.setenv("FAILING", "-m both_releases and not fleet"), monkeypatch.setenv("FAULT", fault)
    done = run_parts(tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    *_, failed = told = done.stdout.splitlines()
    part = f"servers-{TESTED[0]}"
    assert part in failed.removeprefix("Failed: ").split() and any(re.match(rf"{re.escape(part)} +{end} ", line) for line in told[-12:])
