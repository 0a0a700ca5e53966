"""Made-up machines for tests of the doctor, and a way to ask it."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from sglang_freekv.config import GIB
from sglang_freekv.launch import doctor
from sglang_freekv.launch import machine as machine_module
from sglang_freekv.launch.finding import Finding
from sglang_freekv.launch.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "benchmarks/shapes/llama-3.1-8b.json"
CONFIG = json.loads(LLAMA.read_text())


class FakeGpu:
    """A device that copies at 50 and 40 GB/s, or fails as it is told to."""

    present, device, complaint, name = True, "cuda", None, "NVIDIA Made-up"
    memory_bytes, pci_address, count, capability = (80 * GIB, 81 * GIB), "0000:ab:00.0", 1, (9, 0)

    def __init__(self, pin: Exception | None = None, copy: Exception | None = None) -> None:
        self.failures, self.asked = {"pin": pin, "copy": copy}, []

    def pin(self, num_bytes: int) -> None:
        self._do("pin", num_bytes)

    def copy_rates(self, num_bytes: int) -> tuple[float, float]:
        self._do("copy", num_bytes)
        return 50e9, 40e9

    def _do(self, what: str, num_bytes: int) -> None:
        self.asked.append((what, num_bytes))
        if self.failures[what]:
            raise self.failures[what]


class NoGpu:
    """Everything but ``present`` is missing: asking for it fails."""

    present, device, complaint = False, "cpu", None


@pytest.fixture
def make_machine(tmp_path, monkeypatch):
    """Builds machines out of files: ``available`` GiB of host memory under a cgroup of ``limit`` GiB and, with 2 GiB
    mapped, ``address_space`` GiB of it, and a memlock limit."""

    def make(
        gpu, available=256, limit=None, address_space=None, memlock=resource.RLIM_INFINITY, huge_pages="always [madvise] never", nodes=1,
        gpu_node=None,
    ):  # fmt: skip
        proc, sysfs = tmp_path / "proc", tmp_path / "sys"
        files = {
            proc / "meminfo": f"MemAvailable: {available << 20} kB\n",
            proc / "self/cgroup": "0::/\n",
            proc / "driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\n",
            sysfs / "kernel/mm/transparent_hugepage/enabled": huge_pages + "\n",
        }
        if limit is not None:
            group = sysfs / "fs/cgroup"
            files |= {group / "memory.max": f"{limit * GIB:.0f}", group / "memory.current": "0", group / "memory.stat": "inactive_file 0\n"}
        if address_space is not None:
            files |= {proc / "self/limits": f"Max address space {address_space * GIB} unlimited bytes\n"}
            files |= {proc / "self/status": f"VmSize: {2 << 20} kB\n"}
        for node in range(nodes):
            files[sysfs / f"devices/system/node/node{node}/cpulist"] = ""
        if gpu_node is not None:
            files[sysfs / "bus/pci/devices/0000:ab:00.0/numa_node"] = f"{gpu_node}\n"
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(machine_module.resource, "getrlimit", lambda which: (memlock, memlock))
        return Machine(gpu, proc, sysfs)

    return make


class Answer:
    """What the doctor said: its exit status, its JSON, its findings by name, and standard error."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.err = code, err
        self.report = json.loads(out) if out else {}
        self.found = {finding["name"]: Finding(**finding) for finding in self.report.get("findings", ())}
        self.tiers = {tier["name"].split(" (")[0]: tier for tier in self.report.get("table", ())}

    def flag(self, name: str) -> str:
        """Of the command."""
        words = self.report["command"]
        return words[words.index(name) + 1]


@pytest.fixture
def ask(capsys, monkeypatch):
    """``ask(machine, *flags)``: an :class:`Answer`."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the doctor's process is its own

    def examine(machine, *flags) -> Answer:
        code = doctor.main([*map(str, flags), "--json"], machine)
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return examine


def model_file(directory: Path, change: dict) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | change))
    return directory
