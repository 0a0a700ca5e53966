"""The child process that serves: where it listens, and how it fails."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from sglang_freekv.launch.server import PORTS, Server, ServerFailed, ended_by_sigterm, free_port


def test_ports_are_free_and_not_those_that_linux_hands_out(monkeypatch):
    assert all(free_port() in PORTS for _ in range(20))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        taken.listen()
        monkeypatch.setattr("sglang_freekv.launch.server.random.sample", lambda ports, count: [port] * count)
        with pytest.raises(ServerFailed, match="no free port among 100"):
            free_port()


def test_ranks_meet_at_a_port_that_linux_hands_out_to_nobody(tmp_path):
    class Idle(Server):
        program = (sys.executable, "-c", "import time; time.sleep(99)")

    server = Idle(["--tp-size", "2"], port := free_port(), tmp_path / "log", tmp_path)
    server.stop()
    flags = dict(zip(server.command[3::2], server.command[4::2]))
    assert flags.keys() == {"--tp-size", "--port", "--nccl-port"}
    assert flags["--port"] == str(port) and int(flags["--nccl-port"]) in set(PORTS) - {port}


STARTS = """
import sys, time
from pathlib import Path
from sglang_freekv.launch.server import Server, ended_by_sigterm, free_port

class Idle(Server):
    program = (sys.executable, "-c", "import time; time.sleep(300)")

@ended_by_sigterm()
def main():
    server = Idle([], free_port(), Path("log"), Path("."))
    try:
        print(server.process.pid, flush=True)
        time.sleep(300)
    finally:
        server.stop()

main()
"""


def test_a_program_that_is_terminated_stops_its_server(tmp_path):
    with subprocess.Popen([sys.executable, "-P", "-c", STARTS], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as program:
        server = psutil.Process(int(program.stdout.readline()))
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM and not server.is_running()


def test_sigterm_means_afterwards_what_it_meant_before():
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("flags, seen", [(["--device", "cpu"], ""), (["--device", "cuda"], "5"), ([], "5")])
def test_a_server_on_the_cpu_sees_no_gpu(flags, seen, tmp_path, monkeypatch):
    class Telling(Server):
        program = (sys.executable, "-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    server = Telling(flags, free_port(), tmp_path / "log", tmp_path)
    assert server.process.wait(30) == 0 and server.log.read_text() == f"{seen!r}\n"


def test_a_port_that_was_taken_meanwhile_is_told_at_once(tmp_path):
    class Refused(Server):
        script = "import time; print('[Errno 98] error while attempting to bind on address', flush=True); time.sleep(99)"
        program = (sys.executable, "-c", script)

    server, started = Refused([], free_port(), tmp_path / "log", tmp_path), time.monotonic()
    try:
        with pytest.raises(ServerFailed, match="someone else has taken the server's port"):
            server.wait_until_ready(lambda news: None)
    finally:
        server.stop()
    assert time.monotonic() - started < 30
