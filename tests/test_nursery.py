"""Forked servers: what they and their children find is what they would find if an interpreter had been started for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nursery import MODULES, NEVER, Forked, Nursery
from serving import wait_until

PROGRAM = """
import json, multiprocessing, os, random, signal, sys, time

STATE = []


def tell(queue, env_name):
    loaded = {name.split(".")[0] for name in sys.modules}
    queue.put({
        "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(),
        "state": STATE, "random": random.random(), "loaded": sorted(loaded), "path": sys.path, "files": sorted(os.listdir("/proc/self/fd")),
        "stdin": os.readlink("/proc/self/fd/0"), "stdout": os.readlink("/proc/self/fd/1"), "stderr": os.readlink("/proc/self/fd/2"),
    })
    if env_name in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)


class Here:
    def put(self, told):
        self.told = told


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    own = Here()
    try:
        tell(own, "none")
    except SystemExit:
        pass
    STATE.append("of the parent alone")
    os.environ["LATER"] = "1"
    queue = multiprocessing.SimpleQueue()
    children, told = [multiprocessing.Process(target=tell, args=(queue, name)) for name in ("none", "LATER")], []
    for child in children:
        child.start()
        told.append(queue.get())
        child.join()
    print(json.dumps([own.told, *told, [child.exitcode for child in children], [child.pid for child in children]]))
    if "stay" in sys.argv:
        sys.stdout.flush()
        time.sleep(60)
    sys.exit(3)
"""
ASKING = """
import os, sys
from pathlib import Path

from nursery import Nursery

program, environment = Path(sys.argv[1]), dict(os.environ)
with (program.parent / "log").open("w") as log:
    print(Nursery(environment, ["numpy"]).start([str(program), "stay"], environment, program.parent, log.fileno()).pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def nursery():
    started = Nursery({name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, ["numpy"])  # interpreters have another
    yield started
    started.close()


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "folder" / "program.py"
    file.parent.mkdir()
    file.write_text(PROGRAM)
    return file


def start(nursery: Nursery | None, program: Path, *arguments: str) -> Forked | subprocess.Popen:
    """In the nursery, or by an interpreter of its own."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(program.parent.parent), "LC_ALL": "C.UTF-8", "OWN": "1"}
    with (program.parent / "log").open("w") as log:
        if nursery is not None:
            return nursery.start([str(program), *arguments], environment, program.parent.parent, log.fileno())
        command, files = [sys.executable, program, *arguments], {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=program.parent.parent, env=environment, start_new_session=True, **files)


def said(program: Path) -> list:
    return json.loads((program.parent / "log").read_text())


def processes_of(session: int) -> list[str]:
    """States of the processes of a server's session."""
    return subprocess.run(["ps", "-o", "stat=", "-g", str(session)], capture_output=True, text=True).stdout.split()


def wait_for_its_words(program: Path) -> None:
    wait_until(lambda: (program.parent / "log").exists() and (program.parent / "log").read_text().endswith("]\n"))


def wait_for_the_end_of(session: int) -> None:
    wait_until(lambda: not processes_of(session))


def test_processes_are_those_of_interpreters(nursery, program):
    found = []
    for by in (nursery, None):
        process = start(by, program, "an argument")
        assert process.wait(60) == process.poll() == process.returncode == 3
        *told, codes, pids = said(program)
        assert codes == [7, -signal.SIGKILL]
        assert [each.pop("pid") for each in told] == [process.pid, *pids]
        assert [each.pop("group") for each in told] == [process.pid] * 3
        assert [each.pop("parent") for each in told[1:]] == [process.pid] * 2
        assert len({each.pop("random") for each in told}) == 3
        loaded = [set(each.pop("loaded")) for each in told]
        assert all(("numpy" in names) == (by is not None) for names in loaded)
        del told[0]["parent"]
        for each in told:
            each["files"] = len(each["files"])
        told[0]["files"] -= by is not None  # a socket, by which the helper is asked
        for each in told:
            each["path"] = [path for path in each["path"] if path]
        found.append(told)
    assert found[0] == found[1]


def test_nobody_outlives_a_server_that_is_killed(nursery, program):
    process = start(nursery, program, "stay")
    wait_for_its_words(program)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    wait_for_the_end_of(process.pid)


def test_no_server_outlives_who_asked_for_it(program):
    """A test run that is killed can stop nobody."""
    command = [sys.executable, "-c", ASKING, program]
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as asked:
        pid = int(asked.stdout.readline())
        wait_for_its_words(program)
        assert processes_of(pid)
        asked.kill()
    wait_for_the_end_of(pid)


def test_a_server_is_ended_as_by_its_handle(nursery, program):
    process = start(nursery, program, "stay")
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process.terminate()  # which is too late, and harms nobody


def test_nothing_of_sglang_is_imported_early(program):
    assert not {name.split(".")[0] for name in MODULES} & set(NEVER)
    early = Nursery(dict(os.environ) | {"PYTHONPATH": str(program.parent)}, ["sglang_freekv"])
    with pytest.raises((RuntimeError, OSError)):
        start(early, program)
    assert early.process.wait(10) == 1
