"""Real servers for tests. They run on the CPU in float32, so that tokens can be compared."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO
from unittest import mock

import torch

from benchmarks.needle import weights
from nursery import Forked, Nursery
from sglang_freekv.launch.server import Server, free_port
from sglang_freekv.scheduler_patch.cpu import cpu_environment

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300  # for what takes seconds; a machine that others use too may be many times slower
NEEDLE_MODEL = weights.ready()
NEEDLE_CONFIG = json.loads((NEEDLE_MODEL / "config.json").read_text())
LAYERS, KV_HEADS, HEAD_DIM = (NEEDLE_CONFIG[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))

DEFAULTS = {
    "--model-path": NEEDLE_MODEL,
    "--device": "cpu",
    "--dtype": "float32",
    "--max-total-tokens": 65536,
    "--max-running-requests": 8,
    "--random-seed": 0,
    "--sleep-on-idle": True,
}
STOCK = {"--attention-backend": "torch_native"}
RECALLING = {"--freekv-resident-memory": 0}  # a small server on a CPU has room for every page, and would not recall


def freekv(budget: int, **others) -> dict:
    """Flags of FreeKV with the pages and boxes of the preset fast, which a CPU serves soonest; ``e2e/test_default.py`` has the default."""
    flags = {f"--freekv-{name.replace('_', '-')}": value for name, value in others.items()}
    return {"--kv-retrieval": "freekv", "--freekv-preset": "fast", "--freekv-budget": budget} | flags


@functools.cache
def the_nursery() -> Nursery:
    return Nursery(os.environ | cpu_environment())


class TestServer(Server):
    """A server on a free port.

    Args:
        flags: its command line, ``{"--name": value}``; True is a flag without a value, None leaves a default out.
        log: file for its output.
        env: environment variables to set for it.
        forked: whether its processes are forked off one that has imported torch (``nursery.py``), or start as a user's do.
    """

    __test__ = False

    def __init__(self, flags: dict, log: Path, env: dict[str, str] | None = None, forked: bool = not torch.cuda.is_available()) -> None:
        if "--kv-retrieval" not in flags and flags.get("--device", DEFAULTS["--device"]) == "cpu":
            env = cpu_environment() | (env or {})
        flags = DEFAULTS | (RECALLING if flags.get("--kv-retrieval", "none") != "none" else {}) | flags
        given = {name: value for name, value in flags.items() if value is not None}
        words = [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]
        self.port, self._forked = free_port(), forked
        with mock.patch.dict(os.environ, env or {}):
            super().__init__(words, self.port, log, log.parent)

    def _begin(self, environment: dict[str, str], cwd: Path, out: IO) -> subprocess.Popen | Forked:
        if self._forked and self.program[0] == sys.executable:
            return the_nursery().start(self.command[1:], environment, cwd, out.fileno())
        return super()._begin(environment, cwd, out)

    def generate(self, token_ids: Iterable[int], max_new_tokens: int, **sampling) -> dict:
        """Greedy generation from token ids; the answer has ``output_ids`` and ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling
        return self.post("/generate", {"input_ids": [int(token) for token in token_ids], "sampling_params": sampling})

    def generate_all(self, prompts, max_new_tokens: int, concurrency: int = 8, **sampling) -> list[dict]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, max_new_tokens, **sampling), prompts))

    def when_idle(self) -> dict | None:
        """Wait until no request runs, and return the server's ``freekv`` state; None for a stock server."""
        self.wait_until_idle()
        return self.state()

    def flush(self) -> dict | None:
        """Empty the prefix cache and return the state after it."""
        super().flush()
        return self.when_idle()

    def stop(self) -> None:
        """Kill it. SGLang takes seconds to drain; e2e/test_stop.py has servers that do."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def check(self) -> None:
        """Raise RuntimeError if the server has died, or if its log has a traceback or a memory leak."""
        log = self.log.read_text(errors="replace")
        if not self.is_alive() or "Traceback (most recent call last)" in log or "memory leak" in log.lower():
            raise RuntimeError(f"the server {'logged an error' if self.is_alive() else 'has died'}\n{self.tail()}")


class LoraServer(TestServer):
    """A server that serves LoRA adapters on a CPU; its program is ``lora_server.py``."""

    program = (sys.executable, str(Path(__file__).with_name("lora_server.py")))


class FaultyServer(TestServer):
    """A server whose host memory can be damaged by a test; its program is ``faulty_server.py``.

    Args:
        layers: its retrieval layers.
    """

    program = (sys.executable, str(Path(__file__).with_name("faulty_server.py")))

    def __init__(self, flags: dict, log: Path, env: dict[str, str] | None = None, layers: Sequence[int] = range(1, LAYERS)) -> None:
        self.damage_file, self.layers = log.parent / "damage.json", layers
        super().__init__({"--damage": self.damage_file} | flags, log, env)

    def damage(self, layer: int | None, head: int | None, *pages: int, rank: int = 0, swept: bool = False) -> None:
        """Flip a bit in one unit of each host page, and wait until the server has done so.

        Args:
            layer: of the model, numbered from 0; one of its retrieval layers. None for all of them.
            head: kv head of the rank. None for all of them.
            pages: host pages.
            rank: whose host pool is damaged.
            swept: whether the server examines its host pool when it is idle, from now on.
        """
        layers = range(len(self.layers)) if layer is None else [self.layers.index(layer)]
        self._say({"layers": list(layers), "head": head, "pages": pages, "rank": rank, "swept": swept})

    def delay_graphs(self, cycles: int) -> None:
        """Delay the begin of every decode graph by ``cycles``, and all work behind it. Two cycles of an H200 take about a nanosecond."""
        self._say({"pages": [], "rank": 0, "graph_delay": cycles})

    def _say(self, what: dict) -> None:
        ready = self.damage_file.with_suffix(".new")
        ready.write_text(json.dumps(what))
        ready.rename(self.damage_file)
        while self.damage_file.exists():
            time.sleep(0.02)


def wait_until(is_so: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < deadline_s
        time.sleep(0.05)


def start_all(servers: Iterable[TestServer]) -> list[TestServer]:
    """Wait until all servers, which start side by side, are ready. If one fails, stop them all and raise its error."""
    servers = list(servers)
    try:
        for server in servers:
            server.wait_until_ready(lambda news: None)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def stop_all(servers: Iterable[TestServer]) -> None:
    """Stop servers, and raise RuntimeError if ``check`` fails for one of them."""
    faults = []
    for server in servers:
        try:
            server.check()
        except RuntimeError as fault:
            faults.append(fault)
        server.stop()
    if faults:
        raise faults[0]
