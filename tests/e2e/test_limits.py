"""Limits of the machine: a second server takes its share of what the first has left, and a limit in the way is a line, not a crash."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from room import wait_for_room
from serving import DEADLINE_S, TestServer, freekv, start_all
from sglang_freekv.config import GIB
from sglang_freekv.memory_pool import host_memory

pytestmark = pytest.mark.two_servers

MIB, UNBOUNDED = 1 << 20, 10**9
WIDE = {  # 96 KiB of KV for a token, and next to nothing to compute
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TOKEN_BYTES = 3 * 2 * 32 * 128 * 4
PROMPTS, PROMPT_TOKENS, TOKENS = 20, 512, 12800


@contextmanager
def available_meanwhile():
    """What Linux has available, noted many times a second; other tests' servers and the page cache move it."""
    noted, done = [host_memory.available_bytes()], threading.Event()

    def note() -> None:
        while not done.wait(0.02):
            noted.append(host_memory.available_bytes())

    watcher = threading.Thread(target=note)
    watcher.start()
    try:
        yield noted
    finally:
        done.set()
        watcher.join()


def resident_bytes(server: TestServer) -> int:
    """Of all processes of the server's group, but for mapped files, which Linux drops when memory is short."""
    listed = subprocess.run(["ps", "-eo", "pgid=,pid="], capture_output=True, text=True, check=True).stdout
    group = [pid for pgid, pid in map(str.split, listed.splitlines()) if int(pgid) == server.process.pid]
    status = "".join(Path("/proc", pid, "status").read_text() for pid in group)
    return sum(int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)) * 1024


def test_a_second_server_takes_its_share_of_what_the_first_has_left(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    model = {"--model-path": tmp_path, "--load-format": "dummy", "--skip-tokenizer-init": True, "--max-total-tokens": TOKENS}
    wide = model | freekv(128, host_memory=TOKENS * TOKEN_BYTES / GIB, dense_layers="none")
    servers = [TestServer(wide, tmp_path / "first.log", forked=False)]
    try:
        (first,) = start_all(servers)
        idle = resident_bytes(first)
        rng = np.random.default_rng(3)
        first.generate_all(rng.integers(16, 1000, (PROMPTS, PROMPT_TOKENS)), 1)
        held = first.when_idle()["host_pages_used"] * 32 * TOKEN_BYTES
        assert held >= 0.95 * PROMPTS * PROMPT_TOKENS * TOKEN_BYTES
        assert resident_bytes(first) - idle > 0.95 * held, "its pages are not in memory: there is nothing to tell"

        with available_meanwhile() as noted:
            servers.append(TestServer(freekv(512) | {"--max-total-tokens": UNBOUNDED}, tmp_path / "second.log"))
            start_all(servers[1:])
        pool = servers[1].get("/server_info")["freekv"]["host_bytes"]
        share = host_memory.SHARE["cpu"]
        assert share * min(noted) - MIB <= pool <= share * max(noted) + MIB
        assert pool <= share * (psutil.virtual_memory().total - resident_bytes(first))
        assert len(servers[1].generate(range(16, 400), 8)["output_ids"]) == 8
        assert first.generate(range(16, 100), 4)["output_ids"]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def container(tmp_path):
    """``container(limit, used)``: what to put before a command, so that it sees a memory cgroup of these bytes; no real one is touched."""

    def box(limit: int, used: int) -> tuple[str, ...]:
        for directory, files in ((tmp_path / "cgroup", host_memory.CGROUP_V2), (tmp_path / "cgroup" / "memory", host_memory.CGROUP_V1)):
            directory.mkdir(parents=True)
            for name, text in zip((*files[:2], "memory.stat"), (limit, used, f"{files[2]} 0")):
                (directory / name).write_text(f"{text}\n")
        mount = 'mount --bind "$0" /sys/fs/cgroup && exec "$@"'
        before = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path / "cgroup"))
        if subprocess.run([*before, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets nobody mount in a namespace of their own")
        return before

    return box


def limited(option: str, value: int) -> tuple[str, ...]:
    """What to put before a command, so that it has a limit of ``ulimit``."""
    return ("sh", "-c", f'ulimit {option} {value} && exec "$0" "$@"')


def starting(tmp_path: Path, flags: dict, before: tuple[str, ...]) -> TestServer:
    """A server whose command stands behind ``before``."""

    class Limited(TestServer):
        program = (*before, *TestServer.program)

    return Limited(flags, tmp_path / "server.log")


def refusal(tmp_path: Path, flags: dict, before: tuple[str, ...]) -> str:
    """The last line of a server that ends by itself, before it loads anything."""
    server = starting(tmp_path, {"--kv-retrieval": "freekv"} | flags, before)
    try:
        status = server.process.wait(DEADLINE_S)
    finally:
        server.stop()
    said = server.log.read_text(errors="replace")
    assert status == 2 and "Traceback" not in said and "Load weight" not in said, said[-3000:]
    return said.strip().splitlines()[-1]


def test_a_pool_above_the_containers_limit_is_refused(tmp_path, container):
    line = refusal(tmp_path, {"--freekv-host-memory": 1.5}, container(4 * GIB, 3 * GIB))
    assert re.fullmatch(
        r"error: --freekv-host-memory 1\.5: 1 rank\(s\) on this machine take 1\.5 GiB, expected at most the 1\.00 GiB that a cgroup has "
        r"left; use 1 or less, or `docker run --memory=\d+g`, or a higher memory limit of the pod or slice",
        line,
    )


def test_a_full_container_is_refused(tmp_path, container):
    line = refusal(tmp_path, {}, container(2 * GIB, 2 * GIB - 100 * MIB))
    assert line.startswith("error: --kv-retrieval freekv: a cgroup has 0.10 GiB of host memory left, too little")
    assert "or a higher memory limit of the pod or slice, or set --freekv-host-memory" in line


def test_a_small_container_that_may_lock_nothing_is_served(tmp_path, container):
    before = (*container(5 * GIB, 3 * GIB), *limited("-l", 0))
    server = starting(tmp_path, freekv(512) | {"--max-total-tokens": UNBOUNDED}, before)
    try:
        start_all([server])
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert any(line.split()[3:5] == ["0", "0"] for line in limits.splitlines() if line.startswith("Max locked memory"))
        pool = server.get("/server_info")["freekv"]["host_bytes"]
        assert pool == pytest.approx(host_memory.SHARE["cpu"] * 2 * GIB, abs=MIB)
        assert len(server.generate(range(16, 400), 8)["output_ids"]) == 8
    finally:
        server.stop()


def test_a_pool_above_the_address_space_is_refused(tmp_path):
    wait_for_room(2)  # else the machine has less than this limit leaves
    line = refusal(tmp_path, {"--freekv-host-memory": 6}, limited("-v", 9 * GIB // 1024))
    assert re.fullmatch(
        r"error: --freekv-host-memory 6: 1 rank\(s\) on this machine take 6 GiB, expected at most the [3-5]\.\d\d GiB that `ulimit -v` "
        r"has left; use [3-5]\.\d+ or less, or `ulimit -v unlimited` before the server, in a new shell if this one refuses",
        line,
    )
