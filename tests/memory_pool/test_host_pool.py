"""HostPool, with a CUDA runtime that only keeps book of what is registered."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import mmap
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from sglang_freekv.config import GIB, HOST_LAYOUTS
from sglang_freekv.memory_pool import host_memory, host_pool, pinned
from sglang_freekv.memory_pool.host_memory import Room
from sglang_freekv.memory_pool.host_pool import MEMORY_ORDER, HostPool

LAYERS, PAGES, H, S, D = 6, 37, 3, 4, 8
SHAPE = (PAGES, H, 2, S, D)
MIB = 1 << 20
MIB_PAGE = (8, 2, 16, 2048)  # of bfloat16


class Cudart:
    """What the pool calls of the CUDA runtime. A thread is on device 0 until it is put on another."""

    def __init__(self, device: int) -> None:
        self.thread = threading.local()
        self.thread.device = device
        self.calls: list[tuple[int, int, int, int]] = []
        self.registered: dict[int, int] = {}
        self.on_register = lambda number: 0
        self.numbers = itertools.count(1)

    def set_device(self, device: int) -> None:
        self.thread.device = device

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append((address, size, flags, getattr(self.thread, "device", 0)))
        status = self.on_register(next(self.numbers))
        if status == 0:
            self.registered[address] = size
        return status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


@pytest.fixture
def cudart(monkeypatch):
    """On device 3 of a machine with four cores, 640 GiB and no memlock limit. A GiB is a MiB here."""
    cudart = Cudart(device=3)
    monkeypatch.setattr(host_pool, "GIB", MIB)
    monkeypatch.setattr(pinned, "GIB", MIB)
    monkeypatch.setattr(pinned, "_cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cudart.thread.device)
    monkeypatch.setattr(torch.cuda, "set_device", cudart.set_device)
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: set(range(4)))
    leave(monkeypatch, lambda: 640 * MIB)
    limit_memlock(monkeypatch, resource.RLIM_INFINITY)
    return cudart


def leave(monkeypatch, num_bytes: Callable[[], int]) -> None:
    """The machine has ``num_bytes()`` left."""
    for name in ("room", "room_to_write"):
        monkeypatch.setattr(host_memory, name, lambda: Room(num_bytes(), "this machine", "end what takes the memory"))


def limit_memlock(monkeypatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (limit, limit)}[which])


def build(layout: str = "hnd", dtype: torch.dtype = torch.bfloat16, pin: bool = True) -> HostPool:
    return HostPool(LAYERS, PAGES, SHAPE[1:], dtype, pin, layout)


def build_gib() -> HostPool:
    """Eight layers, a "GiB" together."""
    return HostPool(8, 2, (8, 2, 16, 128), torch.bfloat16, pin=True)


def refusal(make=build) -> str:
    with pytest.raises(RuntimeError) as caught:
        make()
    return str(caught.value)


def resident_mib(memory: Iterable[mmap.mmap | torch.Tensor]) -> int:
    """How much of ``memory`` has been taken: of the process, others take and leave some at any time."""
    return sum(taken(piece) for piece in memory) * mmap.PAGESIZE >> 20


def taken(piece: mmap.mmap | torch.Tensor) -> int:
    span = piece.view(torch.uint8).flatten().numpy() if isinstance(piece, torch.Tensor) else np.frombuffer(piece, dtype=np.uint8)
    pages = np.zeros(-(-span.nbytes // mmap.PAGESIZE), dtype=np.uint8)
    where = ctypes.c_void_p(span.ctypes.data), ctypes.c_size_t(span.nbytes), ctypes.c_void_p(pages.ctypes.data)
    assert ctypes.CDLL(None).mincore(*where) == 0
    return int((pages & 1).sum())


@pytest.fixture
def allocated(monkeypatch):
    """What has been allocated for the pools, whether they still have it or not."""
    allocate, allocated = pinned.allocate, []

    def remember(num_bytes: int, huge: bool) -> mmap.mmap:
        allocated.append(allocate(num_bytes, huge))
        return allocated[-1]

    monkeypatch.setattr(pinned, "allocate", remember)
    return allocated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("pin", [False, True])
def test_layers_are_zeros_and_each_its_own_memory(cudart, pin, layout, dtype):
    pool = build(layout, dtype, pin)
    assert [(layer.shape, layer.dtype) for layer in pool.layers] == [(SHAPE, dtype)] * LAYERS
    assert (pool.num_bytes, pool.unit_bytes) == (LAYERS * PAGES * H * 2 * S * D * dtype.itemsize, 2 * S * D * dtype.itemsize)
    assert not any(layer.float().any() for layer in pool.layers)
    pool.check_integrity()
    for number, layer in enumerate(pool.layers, 1):
        layer.fill_(number)
    assert [layer.float().unique().tolist() for layer in pool.layers] == [[number] for number in range(1, LAYERS + 1)]


@pytest.mark.parametrize("pin", [False, True])
def test_scales_lie_behind_the_codes_of_their_layer(cudart, pin):
    pool = HostPool(LAYERS, PAGES, SHAPE[1:], torch.int8, pin, scales=torch.float16)
    unit = 2 * S * D + 2 * S * 2
    assert (pool.num_bytes, pool.unit_bytes) == (LAYERS * PAGES * H * unit, unit)
    assert [(each.shape, each.stride()) for each in pool.scales] == [(SHAPE[:-1], (H * 2 * S, 2 * S, S, 1))] * LAYERS
    assert not any(each.any() for each in (*pool.layers, *pool.scales))
    for number, (codes, scales) in enumerate(zip(pool.layers, pool.scales), 1):
        assert scales.data_ptr() == codes.data_ptr() + codes.nbytes
        codes.fill_(number)
        scales.fill_(-number)
    assert [layer.unique().tolist() for layer in pool.layers] == [[number] for number in range(1, LAYERS + 1)]
    assert [each.unique().tolist() for each in pool.scales] == [[-number] for number in range(1, LAYERS + 1)]
    assert cudart.registered == {layer.data_ptr(): PAGES * H * unit for layer in pool.layers if pin}
    pool.close()
    assert cudart.registered == {} and pool.layers == pool.scales == []


def test_scales_have_one_layout_only(cudart):
    with pytest.raises(ValueError, match="host pool: expected the layout hnd for KV with scales, found nhd"):
        HostPool(LAYERS, PAGES, SHAPE[1:], torch.int8, False, "nhd", scales=torch.float16)


def test_the_scales_that_memory_lacks_are_in_the_refusal(cudart, monkeypatch):
    """A "GiB" of codes fits, and a quarter more for scales does not."""
    leave(monkeypatch, lambda: MIB)
    told = refusal(lambda: HostPool(8, 2, (8, 2, 512, 8), torch.int8, pin=True, scales=torch.float16))
    assert "0.0 of 1.2 GiB of pinned host memory, for 0 of 8 layers" in told, told


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_a_written_padding_page_is_found(cudart, layout):
    pool = build(layout)
    pool.layers[4][0, 2, 1, 3, 7] = 1
    with pytest.raises(RuntimeError, match="retrieval layer 4: padding page 0 was written"):
        pool.check_integrity()


@pytest.mark.parametrize("layout, axes, strides", [
    ("hnd", (PAGES, H, 2, S, D), (H * 2 * S * D, 2 * S * D, S * D, D, 1)),
    ("nhd", (PAGES, 2, S, H, D), (H * 2 * S * D, D, S * H * D, H * D, 1)),
])  # fmt: skip
def test_a_page_lies_in_memory_as_its_layout_says(cudart, layout, axes, strides):
    for layer in build(layout).layers:
        assert layer.stride() == strides
        assert layer[5, 2, 1, 3].data_ptr() - layer.data_ptr() == 2 * (5 * strides[0] + 2 * strides[1] + strides[2] + 3 * strides[3])
        content = torch.arange(layer.numel(), dtype=torch.float32).view(SHAPE)
        layer.copy_(content)
        memory = layer.as_strided((layer.numel(),), (1,)).view(axes)
        assert torch.equal(memory, (content if layout == "hnd" else content.permute(0, 2, 3, 1, 4)).bfloat16())
        assert torch.equal(layer[7], content[7].bfloat16())


def test_the_layouts_are_those_of_the_config():
    assert tuple(MEMORY_ORDER) == HOST_LAYOUTS


def test_every_layer_is_registered_once_from_a_thread_on_the_device_of_the_pool(cudart):
    pool = build()
    expected = sorted((layer.data_ptr(), layer.nbytes, 0, 3) for layer in pool.layers)
    assert sorted(cudart.calls) == expected
    assert cudart.registered == {address: size for address, size, _, _ in expected}


def test_layers_are_registered_side_by_side(cudart, monkeypatch):
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: set(range(LAYERS)))
    together = threading.Barrier(LAYERS, timeout=300)
    cudart.on_register = lambda number: together.wait() * 0
    pool = build()
    assert sorted(cudart.registered) == sorted(layer.data_ptr() for layer in pool.layers)


def test_memory_is_taken_before_it_is_registered(cudart, allocated):
    resident = []
    cudart.on_register = lambda number: resident.append(resident_mib(allocated)) or 0
    pool = HostPool(1, 128, MIB_PAGE, torch.bfloat16, pin=True)
    assert resident == [128] and not pool.layers[0].any()


def test_without_pinning_memory_is_taken_as_it_is_written(cudart):
    pool = HostPool(4, 128, MIB_PAGE, torch.bfloat16, pin=False)
    pool.check_integrity()
    assert pool.num_bytes == GIB // 2 and resident_mib(pool.layers) < 16
    pool.layers[2][64:] = 1
    assert 64 <= resident_mib(pool.layers) < 80
    assert cudart.calls == []
    pool.close()


@pytest.mark.parametrize("huge", [False, True])
def test_a_process_that_is_bound_to_a_node_takes_its_pool_from_others_too(huge):
    """As SGLang binds its schedulers, with numactl."""
    script = f"""
import ctypes, platform
import numpy as np
from sglang_freekv.memory_pool import pinned
call = ctypes.CDLL(None).syscall
bind, policy_of = {{"x86_64": (238, 239), "aarch64": (237, 236)}}[platform.machine()]
if call(bind, 2, ctypes.byref(ctypes.c_ulong(1)), 64):  # MPOL_BIND to node 0
    raise SystemExit("this machine binds nobody")
memory, policy = pinned.allocate(1 << 22, {huge}), ctypes.c_int(-1)
address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
for number in (0, (1 << 22) - 1):
    assert call(policy_of, ctypes.byref(policy), None, 0, ctypes.c_void_p(address + number), 2) == 0  # MPOL_F_ADDR
    print(policy.value)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "binds nobody" in done.stderr:
        pytest.skip("no process is bound to a node here")
    assert done.stdout.split() == ["4", "4"], done.stdout + done.stderr  # MPOL_LOCAL: near if there is room, anywhere if not


def test_close_unregisters_and_may_be_repeated(cudart):
    pool = build()
    pool.close()
    assert cudart.registered == {} and pool.layers == []
    pool.close()


def test_a_pool_without_references_is_unregistered_at_once(cudart):
    gc.disable()
    try:
        pool = build()
        kept = pool.layers[0]
        del pool
        assert cudart.registered == {} and not kept.any()
    finally:
        gc.enable()


def test_a_pool_in_a_reference_cycle_is_unregistered_when_collected(cudart):
    pool = build()
    pool.itself = pool
    del pool
    gc.collect()
    assert cudart.registered == {}


def test_a_pool_alive_at_exit_is_unregistered_in_silence():
    script = """
import torch
from sglang_freekv.memory_pool import pinned
from sglang_freekv.memory_pool.host_pool import HostPool
statuses = [0, 4]
class Cudart:
    def cudaHostRegister(self, *_): return 0
    def cudaHostUnregister(self, address):
        print("unregister")
        if not statuses:
            raise RuntimeError("driver shutting down")
        return statuses.pop()
pinned._cudart = Cudart
torch.cuda.current_device, torch.cuda.set_device = (lambda: 0), (lambda device: None)
pool = HostPool(4, 5, (2, 2, 4, 8), torch.bfloat16, pin=True)
print("exit")
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, ["exit", *["unregister"] * 4], "")


def test_on_a_cpu_nothing_asks_for_cuda(monkeypatch):
    monkeypatch.setattr(pinned, "_cudart", lambda: pytest.fail("asked for CUDA"))
    build(pin=False).close()


@pytest.mark.parametrize("call", [1, 5, 8])
def test_a_failed_registration_takes_the_others_back(cudart, monkeypatch, call):
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: {0})
    cudart.on_register = lambda number: 2 * (number >= call)
    assert refusal(build_gib) == (
        f"--freekv-host-memory: the system gave {(call - 1) / 8:.1f} of 1.0 GiB of pinned host memory, for {call - 1} of 8 layers, and "
        "then no more (cudaHostRegister of 0.1 GiB: error 2); lower --freekv-host-memory, or end what takes the memory (this machine "
        "has 640.0 GiB left)"
    )
    assert cudart.registered == {}


def test_after_a_failure_the_layers_that_wait_are_left_alone(cudart, monkeypatch):
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: {0})
    cudart.on_register = lambda number: time.sleep(0.2 * (number > 1)) or 2
    refusal(build_gib)
    assert len(cudart.calls) < 8


def test_layers_under_way_when_another_fails_are_taken_back_too(cudart):
    failed, under_way = threading.Event(), threading.Barrier(4, timeout=300)

    def register(call: int) -> int:
        if call <= 4:
            under_way.wait()
        if call == 2:
            failed.set()
        if call == 2 or call > 4:
            return 2
        failed.wait(30)
        time.sleep(0.2)
        return 0

    cudart.on_register = register
    assert "for 3 of 6 layers" in refusal()
    assert cudart.registered == {}


@pytest.mark.parametrize("limit, named", [(64 << 10, True), (2 * MIB, False)])
def test_a_memlock_limit_below_the_pool_is_named(cudart, monkeypatch, limit, named):
    limit_memlock(monkeypatch, limit)
    cudart.on_register = lambda number: 2
    message = refusal(build_gib)
    remedy = "`ulimit -l` is 64 KiB, so try `ulimit -l unlimited`, or `--ulimit memlock=-1` of docker"
    assert message.endswith(remedy) if named else "(this machine has 640.0 GiB left)" in message


def test_a_memlock_limit_alone_refuses_nothing(cudart, monkeypatch):
    limit_memlock(monkeypatch, 64 << 10)
    assert len(build().layers) == LAYERS


def test_a_dead_worker_is_a_refusal(cudart, monkeypatch):
    def no_device(device):
        raise RuntimeError("invalid device ordinal\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "set_device", no_device)
    assert "for 0 of 8 layers, and then no more (invalid device ordinal); lower --freekv-host-memory" in refusal(build_gib)


def test_a_pool_larger_than_what_is_left_is_refused_before_it_is_written(cudart, monkeypatch):
    monkeypatch.setattr(host_memory, "room", lambda: Room(MIB - 1, "a cgroup", "raise it"))
    assert refusal(build_gib) == (
        "--freekv-host-memory: the system gave 0.0 of 1.0 GiB of pinned host memory, for 0 of 8 layers, and then no more "
        "(a cgroup has 1.0 GiB left, for 1.0); lower --freekv-host-memory, or raise it (a cgroup has 1.0 GiB left)"
    )
    assert cudart.calls == []


def test_memory_that_another_takes_between_two_layers_is_missed_before_the_next_is_written(cudart, monkeypatch):
    left = [640 * MIB]
    leave(monkeypatch, lambda: left[0])
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: len(cudart.registered) * MIB // 8)

    def register(call: int) -> int:
        left[0] = MIB // 4 if call == 3 else left[0]
        return 0

    cudart.on_register = register
    assert refusal(build_gib) == (
        "--freekv-host-memory: the system gave 0.4 of 1.0 GiB of pinned host memory, for 3 of 8 layers, and then no more "
        "(this machine has 0.2 GiB left, for 0.6); lower --freekv-host-memory, or end what takes the memory (this machine has 0.2 GiB left)"
    )
    assert len(cudart.calls) == 3 and cudart.registered == {}


def test_memory_that_another_takes_is_missed_within_a_layer(cudart, allocated, monkeypatch):
    looks = iter([640 * MIB] * 3)
    leave(monkeypatch, lambda: next(looks, 0))
    monkeypatch.setattr(pinned, "GULP_BYTES", 16 * MIB)
    assert "for 0 of 1 layers, and then no more (this machine has 0.0 GiB left, for " in refusal(
        lambda: HostPool(1, 128, MIB_PAGE, torch.bfloat16, pin=True)
    )
    assert cudart.calls == [] and 0 < resident_mib(allocated) <= 48, "it went on after there was no more"


def test_what_the_pool_itself_takes_is_not_missed(cudart, allocated, monkeypatch):
    leave(monkeypatch, lambda: (136 - resident_mib(allocated)) * MIB)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: resident_mib(allocated) * MIB)
    monkeypatch.setattr(pinned, "GULP_BYTES", 4 * MIB)
    pool = HostPool(4, 32, MIB_PAGE, torch.bfloat16, pin=True)
    assert resident_mib(allocated) == 128 and len(cudart.calls) == 4
    pool.close()


@pytest.mark.parametrize("pin, given, kind", [(True, 0, "pinned host"), (False, 2, "host")])
@pytest.mark.parametrize("error, cause", [(OSError(12, "Cannot allocate"), "[Errno 12] Cannot allocate"), (MemoryError(), "MemoryError")])
def test_memory_that_the_system_does_not_promise(cudart, monkeypatch, pin, given, kind, error, cause):
    allocate, calls = pinned.allocate, []

    def two(num_bytes: int, huge: bool) -> mmap.mmap:
        calls.append(huge)
        if len(calls) > 2:
            raise error
        return allocate(num_bytes, huge)

    monkeypatch.setattr(pinned, "allocate", two)
    message = refusal(lambda: build(pin=pin))
    assert f"GiB of {kind} memory, for {given} of 6 layers, and then no more ({cause}); lower --freekv-host-memory" in message
    assert calls == [pin] * 3 and cudart.registered == {}


def test_a_real_mmap_beyond_the_address_space():
    assert re.search(
        r"the system gave 0\.0 of 536870912\.0 GiB of host memory, for 0 of 1 layers, and then no more \(\[Errno 12\]",
        refusal(lambda: HostPool(1, 1 << 39, MIB_PAGE, torch.bfloat16, pin=False)),
    )


def test_what_is_mapped_counts_once_against_a_limit_of_the_process(cudart, monkeypatch):
    """Between layers all of the pool is mapped, so its address space leaves nothing."""
    rooms = iter([Room(MIB, "`ulimit -v`", "raise it")])
    monkeypatch.setattr(host_memory, "room", lambda: next(rooms, Room(0, "`ulimit -v`", "raise it")))
    assert len(build_gib().layers) == 8


def test_a_limit_of_the_process_is_what_the_remedy_names():
    script = """
import torch
from sglang_freekv.memory_pool.host_pool import HostPool
HostPool(8, 1 << 12, (8, 2, 16, 2048), torch.bfloat16, pin=False)
"""
    command = f'ulimit -v {24 << 20} && exec "$0" -P -c "$1"'
    run = subprocess.run(["sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=300)
    assert re.search(
        r"RuntimeError: --freekv-host-memory: the system gave (\d+)\.0 of 32\.0 GiB of host memory, for \d of 8 layers, and then no more "
        r"\(\[Errno 12\] Cannot allocate memory\); lower --freekv-host-memory, or `ulimit -v unlimited` before the server, in a new "
        r"shell if this one refuses \(`ulimit -v` has [0-3]\.\d GiB left\)",
        run.stderr,
    ), run.stderr


def test_a_kernel_without_huge_pages_will_do(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, option):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert len(pinned.allocate(4096, huge=True)) == 4096


def test_progress_is_told(cudart, monkeypatch, caplog):
    monkeypatch.setattr(host_pool, "PROGRESS_S", 0.1)
    monkeypatch.setattr(host_pool.os, "sched_getaffinity", lambda pid: {0})
    cudart.on_register = lambda number: time.sleep(0.15 * (number < 5)) or 0
    with caplog.at_level(logging.INFO):
        build_gib()
    *progress, last = caplog.messages
    assert progress and {record.threadName for record in caplog.records} == {threading.current_thread().name}
    for line in progress:
        layers, gib = re.fullmatch(r"host pool: (\d) of 8 layers, (\d\.\d) GiB pinned", line).groups()
        assert gib == f"{int(layers) / 8:.1f}"
    assert re.fullmatch(r"host pool: 1\.0 GiB pinned in \d\.\d s by 1 threads", last)


def test_a_pool_that_comes_up_fast_or_is_not_pinned_says_little(cudart, caplog):
    with caplog.at_level(logging.INFO):
        build()
        build(pin=False)
    assert [line.split(" in ")[0] for line in caplog.messages] == ["host pool: 0.1 GiB pinned"]
