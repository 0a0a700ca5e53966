# SPDX-License-Identifier: Apache-2.0
"""Runs a local SGLang server as a child process: starts it, waits until it is ready, sends requests, and stops it."""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_DEADLINE_S = 600
STOP_DEADLINE_S = 30
IDLE_DEADLINE_S = 60
HEARTBEAT_S = 10
POLL_S = 0.5
TAIL_LINES = 30
PORTS = range(20000, 32768)  # below Linux's ephemeral ports, which another process may be given before the server binds one

ACTIVATION = "KV retrieval is on"
NO_PORT = "error while attempting to bind on address"
PHASES = {  # text in the log: the phase that begins with it
    "server_args=": "starting the scheduler process",
    "Init torch distributed begin": "preparing the device",
    "Load weight begin": "loading weights",
    "Load weight end": "building the KV pools",
    "CUDA graph begin": "capturing CUDA graphs",
    "Started server process": "warming up",
}


class ServerFailed(RuntimeError):
    """The server did not start, has exited, or answered with an error."""


def free_port(taken: int | None = None) -> int:
    """A free port of ``PORTS``.

    Args:
        taken: one that is soon to be bound.

    Raises:
        ServerFailed: a hundred of them were taken.
    """
    for port in random.sample(PORTS, 100):
        try:
            if port != taken:
                return ensure_free(port)
        except ServerFailed:
            continue
    raise ServerFailed(f"no free port among 100 between {PORTS[0]} and {PORTS[-1]}")


def ensure_free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ServerFailed(f"--port {port}: {error}; leave --port out to take a free one") from None
    return port


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the program as ``sys.exit`` does, so that servers are stopped on the way out. It also decorates a ``main``."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def news_in(lines: Iterable[str]) -> Iterator[str]:
    """Phases that ``lines`` of the log begin, and the line that says that retrieval is on."""
    for line in lines:
        if ACTIVATION in line:
            yield line[line.index(ACTIVATION) :].strip()
        yield from (phase for mark, phase in PHASES.items() if mark in line)


class Server:
    """``python -m sglang.launch_server`` in a process group of its own.

    Args:
        flags: arguments of the server, without the port.
        port: its port on 127.0.0.1.
        log: file for its output.
        cwd: directory it runs in.
    """

    program: Sequence[str] = (sys.executable, "-m", "sglang.launch_server")

    def __init__(self, flags: Sequence[str], port: int, log: Path, cwd: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        between_ranks = free_port(taken=port)  # SGLang 0.5.17 takes an ephemeral one, and binds it seconds later
        self.command = [*self.program, *flags, "--port", str(port), "--nccl-port", str(between_ranks)]
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # SGLang sends itself a request at start-up
        if ("--device", "cpu") in itertools.pairwise(flags):
            environment["CUDA_VISIBLE_DEVICES"] = ""  # SGLang would call the kernels of a GPU that it sees
        with log.open("w") as out:
            self.process = self._begin(environment, cwd, out)
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _begin(self, environment: dict[str, str], cwd: Path, out: IO) -> subprocess.Popen:
        """The process, in a session of its own, with its output in ``out``."""
        return subprocess.Popen(
            self.command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __str__(self) -> str:
        return shlex.join(["python", *self.command[1:]])

    def wait_until_ready(self, say: Callable[[str], None]) -> float:
        """Wait until the server answers.

        Args:
            say: called with each phase of the start, and every ``HEARTBEAT_S`` seconds.

        Returns:
            Seconds that it took.

        Raises:
            ServerFailed: it exited, or did not answer within ``START_DEADLINE_S``.
        """
        started, said, phase = time.monotonic(), 0.0, "importing SGLang"
        with self.log.open(errors="replace") as log:
            while not self._is_healthy():
                self._ensure_alive()
                elapsed = time.monotonic() - started
                if elapsed > START_DEADLINE_S:
                    raise ServerFailed(f"the server did not answer within {START_DEADLINE_S} s; it was {phase}\n{self.tail()}")
                lines = log.readlines()
                if any(NO_PORT in line for line in lines):  # a server without its port never answers
                    raise ServerFailed(f"someone else has taken the server's port\n{self.tail()}")
                news = list(news_in(lines))
                phase = next((line for line in reversed(news) if line in PHASES.values()), phase)
                for line in news or [phase] * (elapsed >= said):
                    say(f"{elapsed:4.0f} s  {line}")
                    said = elapsed + HEARTBEAT_S
                time.sleep(POLL_S)
        return time.monotonic() - started

    def get(self, path: str, timeout_s: float = 60):
        """The JSON answer to a GET. Errors are as of ``open``."""
        with self.open(path, None, timeout_s) as response:
            return json.load(response)

    def post(self, path: str, body: dict, timeout_s: float = 300):
        """The JSON answer to a POST of ``body``. Errors are as of ``open``."""
        with self.open(path, body, timeout_s) as response:
            return json.load(response)

    def open(self, path: str, body: dict | None = None, timeout_s: float = 300):
        """The open response to a GET, or to a POST of ``body``.

        Raises:
            ServerFailed: the server answered with an error, or did not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return self._http.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerFailed(f"{request.full_url} answered {error.code}: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            self._ensure_alive(grace_s=10)
            raise ServerFailed(f"{request.full_url}: {error}\n{self.tail()}") from None

    def requests_held(self) -> int:
        """Requests that run or are queued, on all ranks."""
        return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in self.get("/v1/loads")["loads"])

    def wait_until_idle(self, deadline_s: float = IDLE_DEADLINE_S) -> None:
        """Wait until no request is running or queued.

        Raises:
            ServerFailed: requests are left after ``deadline_s``.
        """
        started = time.monotonic()
        while self.requests_held():
            if time.monotonic() - started > deadline_s:
                raise ServerFailed(f"the server is still busy after {deadline_s:.0f} s\n{self.tail()}")
            time.sleep(0.1)

    def flush(self) -> None:
        """Wait until no request runs, and empty the prefix cache."""
        self.wait_until_idle()
        self.open("/flush_cache", {}).close()

    def state(self) -> dict | None:
        """The server's ``freekv`` state; None for a stock server."""
        return self.get("/server_info")["internal_states"][0].get("freekv")

    def _is_healthy(self) -> bool:
        try:
            with self._http.open(self.url + "/health_generate", timeout=30):
                return True
        except OSError:
            return False

    def _ensure_alive(self, grace_s: float = 0) -> None:
        """Raise ServerFailed if the process has exited, or exits within ``grace_s``."""
        try:
            code = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        raise ServerFailed(f"the server {how}\n{self.tail()}")

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tail(self) -> str:
        """The last ``TAIL_LINES`` lines of the log, and its path."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(["the end of its log:", *(f"  | {line[:300]}" for line in lines), f"the whole log: {self.log}"])

    def stop(self) -> None:
        """Ask the server to drain and exit, then kill the rest of its process group."""
        try:
            self.process.terminate()
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
