"""What the doctor tells about this machine, and what to do about it, on made-up ones."""

from __future__ import annotations

import resource

import pytest

from made_up import LLAMA, FakeGpu, NoGpu
from sglang_freekv.config import GIB
from sglang_freekv.launch import machine as machine_module
from sglang_freekv.launch import question, server_flags
from sglang_freekv.launch.machine import NO_GPU
from sglang_freekv.memory_pool.pinned import PinError

MEMLOCK = "`docker run --ulimit memlock=-1` in a container, `ulimit -l unlimited` before the server elsewhere"


def test_without_a_gpu_nothing_is_made_up(make_machine, ask):
    answer = ask(make_machine(NoGpu()), "--model-path", LLAMA)
    code, found = answer.code, answer.found
    assert code == 0
    assert "decode rate" not in found and any("--link-gb-per-s" in line for line in answer.report["unchecked"])
    for name in ("pinned memory", "link to the device", "link to the host"):
        assert (found[name].value, found[name].figures) == (NO_GPU, {})
    assert found["gpu"].value.startswith("none that torch can use")
    assert found["driver"].remedy.startswith("torch sees no GPU all the same: `docker run --gpus all`")


def test_links_are_measured(make_machine, ask):
    gpu = FakeGpu()
    answer = ask(make_machine(gpu))
    code, found = answer.code, answer.found
    assert code == 0 and gpu.asked == [("pin", 64 << 20), ("copy", 256 << 20)]
    assert found["driver"].value == "NVIDIA 580.159.04"
    assert found["link to the device"].value == "50.0 GB/s in pinned copies of 256.00 MiB"
    assert found["link to the host"].figures == {"bytes_per_s": 40e9}


@pytest.mark.parametrize("memlock, remedy", [(8 << 20, MEMLOCK), (resource.RLIM_INFINITY, "free host memory")])
def test_memory_that_cannot_be_pinned_stops_a_server(make_machine, ask, memlock, remedy):
    gpu = FakeGpu(pin=PinError("cudaHostRegister of 0.1 GiB: out of memory"))
    answer = ask(make_machine(gpu, memlock=memlock))
    code, found = answer.code, answer.found
    assert code == 1 and found["pinned memory"].stops and found["pinned memory"].remedy.startswith(remedy)
    assert "(cudaHostRegister of 0.1 GiB: out of memory)" in found["pinned memory"].value
    assert found["link to the device"].value == "not measured: no pinned memory" and gpu.asked == [("pin", 64 << 20)]


def test_a_link_that_cannot_be_measured_says_why(make_machine, ask):
    answer = ask(make_machine(FakeGpu(copy=RuntimeError("CUDA out of memory\nmore"))), "--model-path", LLAMA)
    code, found = answer.code, answer.found
    assert code == 0 and found["link to the device"].value == "not measured: CUDA out of memory"
    assert "decode rate" not in found


@pytest.mark.parametrize(
    "gpu, memlock, remedy",
    [
        (FakeGpu, resource.RLIM_INFINITY, None),
        (FakeGpu, 8 << 20, None),  # 64 MiB were pinned, so CUDA is not held to it
        (FakeGpu, 1 * GIB, MEMLOCK),  # what was pinned lies below it, and the host pool does not
        (FakeGpu, 200 * GIB, None),
        (NoGpu, 8 << 20, MEMLOCK),
    ],
)
def test_memlock(make_machine, ask, gpu, memlock, remedy):
    answer = ask(make_machine(gpu(), memlock=memlock))
    code, found = answer.code, answer.found
    assert (code, found["memlock"].remedy) == (0, remedy)


@pytest.mark.parametrize("limits, share, bound, remedy", [
    ({}, 44.8, None, None),
    ({"limit": 10}, 7, "a cgroup", "`docker run --memory=64g`, or a higher memory limit of the pod or slice"),
    ({"limit": 10, "address_space": 40}, 7, "a cgroup", "`docker run --memory=64g`, or a higher memory limit of the pod or slice"),
    ({"limit": 10, "address_space": 7}, 3.5, "`ulimit -v`", "`ulimit -v unlimited` before the server, in a new shell if this one refuses"),
])  # fmt: skip
def test_host_memory_is_what_the_tightest_limit_leaves(make_machine, ask, limits, share, bound, remedy):
    answer = ask(make_machine(FakeGpu(), available=64, **limits))
    code, found = answer.code, answer.found
    memory = found["host memory"]
    assert code == 0 and memory.figures["host_pool_bytes"] == pytest.approx(share * GIB, abs=1) and memory.remedy == remedy
    assert memory.value.endswith(f"; {bound} bounds it, the machine has 64.00 GiB available" if bound else "host pool by default")


def test_too_little_host_memory_stops_a_server(make_machine, ask):
    answer = ask(make_machine(FakeGpu(), limit=1 / 16))
    code, found = answer.code, answer.found
    assert code == 1 and found["host memory"].remedy.startswith("expected a host pool of 64.00 MiB at least: `docker run --memory=256g`")


@pytest.mark.parametrize("chosen, helped", [("[always] madvise never", False), ("always madvise [never]", True)])
def test_huge_pages(make_machine, ask, chosen, helped):
    machine = make_machine(FakeGpu(), huge_pages=chosen)
    found = ask(machine).found
    file = machine.sys / "kernel/mm/transparent_hugepage/enabled"
    assert found["huge pages"].remedy == (f"as root on the host, `echo madvise > {file}`" if helped else None)


@pytest.mark.parametrize("nodes, near, remedy", [(1, 0, None), (2, -1, None), (2, 1, "`numactl --cpunodebind=1 --preferred=1`")])
def test_numa(make_machine, ask, nodes, near, remedy):
    found = ask(make_machine(FakeGpu(), nodes=nodes, gpu_node=near)).found
    assert found["numa"].figures == {"nodes": list(range(nodes)), "gpu_node": None if near < 0 else near}
    assert found["numa"].remedy is None if remedy is None else remedy in found["numa"].remedy


def test_what_is_not_installed_stops_a_server(make_machine, ask, monkeypatch):
    versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "sglang": "0.5.16"}

    def version(package):
        if package not in versions:
            raise machine_module.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(machine_module, "version", version)
    monkeypatch.setattr(machine_module, "entry_points", lambda **_: [])
    answer = ask(make_machine(FakeGpu()))
    code, found = answer.code, answer.found
    assert code == 1 and not found["torch"].stops
    assert found["sglang"].remedy == "expected 0.5.17 or 0.5.23, which were tested: `pip install sglang==0.5.23`"
    assert found["flashinfer"].remedy == "`pip install flashinfer-python`"
    assert found["plugin"].remedy == machine_module.INSTALL
    assert answer.report["verdict"] == "these would stop a server: sglang, flashinfer, plugin"


def test_without_sglang_the_machine_is_still_examined(make_machine, ask, monkeypatch):
    for module in (question, server_flags):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    answer = ask(make_machine(FakeGpu()))
    assert answer.code == 0 and answer.found["link to the device"].figures
    answer = ask(make_machine(FakeGpu()), "--model-path", LLAMA)
    assert answer.code == 2 and answer.err.startswith("error: sglang: expected it to be installed")
