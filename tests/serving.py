"""Real servers for tests: started, asked, and stopped by their own process group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDLE_MODEL = ROOT / "benchmarks" / "needle" / "model"
START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """An SGLang server on this machine's CPU, in float32 unless ``--dtype`` is given.

    Args:
        flags: its command line, ``{"--name": value}``; True is a flag without a value.
        log: where its output goes.
        env: further variables.
    """

    def __init__(self, flags: dict, log: Path, env: dict[str, str] | None = None) -> None:
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        defaults = {
            "--model-path": NEEDLE_MODEL,
            "--device": "cpu",
            "--dtype": "float32",
            "--max-total-tokens": 65536,
            "--max-running-requests": 8,
            "--random-seed": 0,
            "--sleep-on-idle": True,
            "--port": self.port,
        }
        command = [sys.executable, "-P", "-m", "sglang.launch_server"]
        for name, value in (defaults | flags).items():
            command += [name] if value is True else [name, str(value)]
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=os.environ | (env or {}), start_new_session=True
        )

    def wait_until_ready(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited with {self.process.returncode}:\n{self.tail()}")
            try:
                self.get("/health_generate", timeout=10)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"server not ready after {START_SECONDS} s:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(line[:400] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def get(self, path: str, timeout: float = 60):
        with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
            body = response.read()
        return json.loads(body) if body[:1] in b"[{" and body else body.decode()

    def post(self, path: str, body: dict | None = None, timeout: float = 300):
        request = urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            raw = response.read()
        return json.loads(raw) if raw[:1] in b"[{" and raw else raw.decode()

    def generate(self, token_ids, max_new_tokens: int, **sampling) -> dict:
        """Greedy generation from token ids; the answer has ``output_ids`` and ``meta_info``."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling
        return self.post("/generate", {"input_ids": [int(token) for token in token_ids], "sampling_params": sampling})

    def generate_all(self, prompts, max_new_tokens: int, concurrency: int = 8, **sampling) -> list[dict]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, max_new_tokens, **sampling), prompts))

    def flush(self) -> None:
        self.when_idle()
        self.post("/flush_cache")

    def when_idle(self, timeout: float = 60) -> dict:
        """The ``freekv`` state once nothing runs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            load = self.get("/get_load")
            if all(rank["num_reqs"] == 0 and rank["num_waiting_reqs"] == 0 for rank in load):
                return self.get("/server_info")["internal_states"][0].get("freekv")
            time.sleep(0.1)
        raise RuntimeError(f"server still busy after {timeout} s: {load}")

    def stop(self) -> None:
        """Stop it.

        Raises:
            RuntimeError: it had died, or something went wrong that its log tells of.
        """
        alive, log = self.process.poll() is None, self.log.read_text(errors="replace")
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        if not alive or "Traceback (most recent call last)" in log or "memory leak" in log.lower():
            raise RuntimeError(f"server {'had died' if not alive else 'logged an error'}:\n{self.tail(60)}")

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def freekv_flags(budget: int, **others) -> dict:
    names = {name: f"--freekv-{name.replace('_', '-')}" for name in others}
    return {"--kv-retrieval": "freekv", "--freekv-budget": budget} | {names[name]: value for name, value in others.items()}


def stock_flags() -> dict:
    return {"--attention-backend": "torch_native"}


def stock_env() -> dict[str, str]:
    """What stock SGLang needs exported on a machine without an NVIDIA driver; with FreeKV nothing is."""
    from sglang_freekv.scheduler_patch.cpu import cpu_environment

    return cpu_environment()
