"""Servers to measure: stock SGLang, and FreeKV with the load replay, on a model's shape; and a client that notes when tokens arrive."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.replay import write_whole
from benchmarks.replay_load import Load
from benchmarks.report import ROOT, say, seconds_since_start
from benchmarks.setups import Setup, words
from sglang_freekv.config import GIB
from sglang_freekv.launch.server import Server, ServerFailed, free_port
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.scheduler_patch.cpu import cpu_environment

APPLY_DEADLINE_S = 30
HICACHE_SPARE_GIB = 11  # SGLang takes no host pool for HiCache that leaves less than 10


@dataclass
class Stream:
    """What one streamed request told.

    Args:
        started: when it was sent.
        arrivals: when tokens arrived, and how many there were by then.
        meta: the last message's ``meta_info``.
        output_ids: what was generated.
    """

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    meta: dict = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.started

    @property
    def tpot(self) -> float:
        """Seconds from one token to the next, in the mean; 0 where all tokens came in one message."""
        (begin, first), (end, last) = self.arrivals[0], self.arrivals[-1]
        return (end - begin) / max(1, last - first)


class BenchServer(Server):
    """One server of a setup; ``control`` is the file that its replay follows.

    Args:
        system: one of ``SYSTEMS``.
        directory: takes the log, the control file and the model's config.
        more: flags beyond the setup's.
    """

    def __init__(self, setup: Setup, system: str, directory: Path, more: dict | None = None) -> None:
        self.setup, self.system = setup, system
        self.control = directory / f"{system}-control.json"
        self.control.unlink(missing_ok=True)
        self.control.with_suffix(".applied").unlink(missing_ok=True)
        self._version = 0
        if system != "stock":
            copies = "off" if system == "copies-off" else "on"
            replay = ("--replay-control", str(self.control), "--replay-copies", copies)
            self.program = (sys.executable, "-m", "benchmarks.replay_server", *replay)
        extra = setup.extra_stock if system == "stock" else setup.extra_freekv
        environment = cpu_environment() if setup.device == "cpu" and system == "stock" else {}
        with mock.patch.dict(os.environ, environment):
            command = [*words(setup.flags(system, directory / "model") | (more or {})), *extra]
            super().__init__(command, free_port(), directory / f"{system}.log", ROOT)

    def set_load(self, load: Load | None) -> None:
        """Have the replay emulate ``load``, from now on; stock SGLang has none.

        Raises:
            ServerFailed: it did not take effect.
        """
        if self.system == "stock":
            return
        self._version += 1
        write_whole(self.control, json.dumps({"version": self._version, "load": load}))
        applied, deadline = self.control.with_suffix(".applied"), time.monotonic() + APPLY_DEADLINE_S
        while not (applied.exists() and applied.read_text() == str(self._version)):
            if time.monotonic() > deadline:
                raise ServerFailed(f"the replay did not take up {load} within {APPLY_DEADLINE_S} s\n{self.tail()}")
            time.sleep(0.02)

    def stream(self, token_ids: list[int], new_tokens: int, deadline_s: float, interval: int = 1, ignore_eos: bool = True) -> Stream:
        """Greedy generation of ``new_tokens`` tokens, or fewer unless ``ignore_eos``; told every ``interval`` tokens.

        Raises:
            ServerFailed: an error of the server, or not done within ``deadline_s``.
        """
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": ignore_eos, "stream_interval": interval}
        body = {"input_ids": token_ids, "sampling_params": sampling, "stream": True}
        stream = Stream(time.perf_counter())
        with self.open("/generate", body, deadline_s) as response:
            for line in response:
                now = time.perf_counter()
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                message = json.loads(line[len(b"data: ") :])
                if "error" in message or "meta_info" not in message:
                    raise ServerFailed(f"the server answered {str(message)[:500]}")
                stream.meta, stream.output_ids = message["meta_info"], message.get("output_ids", stream.output_ids)
                stream.arrivals.append((now, stream.meta["completion_tokens"]))
                if now - stream.started > deadline_s:
                    raise ServerFailed(f"{stream.arrivals[-1][1]} of {new_tokens} tokens after {deadline_s:.0f} s")
        if not stream.arrivals or (ignore_eos and stream.arrivals[-1][1] != new_tokens):
            raise ServerFailed(f"{stream.arrivals[-1:]} of {new_tokens} tokens arrived\n{self.tail()}")
        return stream

    def stream_all(self, prompts: list[list[int]], *arguments, **options) -> list[Stream]:
        """All prompts at once, each as by :meth:`stream`."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, *arguments, **options), prompts))

    def facts(self) -> dict:
        """What was served, for the results."""
        info = self.get("/server_info")
        command = str(self).replace(f"{self.control.parent}/", "").replace(f"{ROOT}/", "")
        return {"command": command, "freekv": info.get("freekv"), "max_total_num_tokens": info.get("max_total_num_tokens")}

    def logged(self) -> str:
        """All of its log so far."""
        return self.log.read_text(errors="replace")

    def retractions(self, begins: int = 0) -> int:
        """Requests that it retracted, by what its log has from the character ``begins`` on."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", self.logged()[begins:])))

    def most_queued(self, begins: int = 0) -> int:
        """The most requests that waited in its scheduler, as :meth:`retractions`. Those that wait for the tokenizer are not there yet."""
        return max(map(int, re.findall(r"#queue-req: (\d+)", self.logged()[begins:])), default=0)

    def fault(self) -> str | None:
        """What its log tells that went wrong."""
        log = self.logged()
        return self.tail() if "Traceback (most recent call last)" in log or "memory leak" in log.lower() else None


def keep_log(log: Path, results: Path, system: str) -> None:
    """The end of a server's log beside its results, under their name and its own."""
    if log.exists():
        kept = results.with_name(f"{results.stem}-{system}.log")
        kept.write_text("\n".join(log.read_text(errors="replace").splitlines()[-400:]) + "\n")
        say(f"the end of its log: {kept}")


def random_prompt(setup: Setup, tokens: int, seed: int | tuple[int, ...]) -> list[int]:
    """Random token ids; the same for all systems."""
    return np.random.default_rng(seed).integers(16, setup.config["vocab_size"] - 16, tokens).tolist()


@contextmanager
def running(setup: Setup, system: str, directory: Path, deadline_s: float, more: dict | None = None):
    """A server that is up.

    Raises:
        ServerFailed: it is not, after ``deadline_s``.
    """
    if setup.device == "cuda" and system != "stock":
        grow_host_memory(setup.host_memory)
    elif setup.device == "cuda" and "--hicache-size" in (more or {}):
        grow_host_memory(setup.host_memory + HICACHE_SPARE_GIB)
    server, give_up = BenchServer(setup, system, directory, more), seconds_since_start() + deadline_s

    def tell(news: str) -> None:
        say(f"{system}: {news}")
        if seconds_since_start() > give_up:
            raise ServerFailed(f"not ready after {deadline_s:.0f} s\n{server.tail()}")

    try:
        say(f"starting {server}")
        say(f"{system} is ready after {server.wait_until_ready(tell):.0f} s")
        yield server
        if fault := server.fault():
            say(f"{system} logged an error: {fault}")
    finally:
        server.stop()


def grow_host_memory(gib: float) -> None:
    """A virtual machine may show less memory than it has until it is used; then it is used here, by a process that ends at once."""
    available = host_memory.available_bytes() / GIB
    if available >= gib:
        return
    say(f"{available:.0f} GiB of host memory are available, {gib:.0f} are wanted; touching them")
    touch = "import sys, numpy\nheld = [numpy.ones(1 << 30, numpy.uint8) for _ in range(int(sys.argv[1]))]"
    subprocess.run([sys.executable, "-c", touch, str(int(gib) + 1)], check=False)
    say(f"now {host_memory.available_bytes() / GIB:.0f} GiB are available")
