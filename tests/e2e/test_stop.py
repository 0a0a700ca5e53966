"""Stopping: SIGTERM lets what runs finish; a scheduler that is killed takes its server with it, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from room import room_for
from serving import DEADLINE_S, TestServer, freekv, start_all

pytestmark = pytest.mark.two_servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One to be stopped by each test, started side by side, and with the processes of a user's."""
    with room_for(2):
        logs = [tmp_path_factory.mktemp("server") / "server.log" for _ in range(2)]
        servers = start_all(TestServer(freekv(512), log, forked=False) for log in logs)
    yield iter(servers)
    for server in servers:
        server.stop()


@pytest.fixture
def server(servers):
    return next(servers)


def processes(server: TestServer) -> dict[int, str]:
    """Living processes of the server's group, by their command lines."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 3) for line in listed.splitlines())
    return {int(pid): args for pid, group, state, args in rows if int(group) == server.process.pid and not state.startswith("Z")}


def wait_for_the_end(server: TestServer) -> float:
    """Seconds until no process of the server is left."""
    started = time.monotonic()
    while server.is_alive() or processes(server):
        assert time.monotonic() - started < DEADLINE_S, f"still there after {DEADLINE_S} s: {processes(server)}\n{server.tail()}"
        time.sleep(0.2)
    return time.monotonic() - started


def test_sigterm_lets_a_running_request_finish(server):
    answers = []
    running = threading.Thread(target=lambda: answers.append(server.generate(range(10, 400), 200)))
    running.start()
    while not server.requests_held():
        time.sleep(0.05)
    os.kill(server.process.pid, signal.SIGTERM)
    running.join(DEADLINE_S)
    assert not running.is_alive() and len(answers[0]["output_ids"]) == 200
    wait_for_the_end(server)
    assert "Traceback (most recent call last)" not in server.log.read_text()


def test_a_killed_scheduler_leaves_no_server_that_hangs(server):
    ended = []

    def ask() -> None:
        with pytest.raises(RuntimeError):
            server.generate(range(10, 400), 5000)
        ended.append(True)

    running = threading.Thread(target=ask)
    running.start()
    while not server.requests_held():
        time.sleep(0.05)
    (scheduler,) = (pid for pid, args in processes(server).items() if "scheduler" in args)
    os.kill(scheduler, signal.SIGKILL)
    wait_for_the_end(server)
    running.join(DEADLINE_S)
    assert ended == [True]
