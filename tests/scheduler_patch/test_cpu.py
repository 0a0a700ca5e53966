"""Slots handed out without Triton, and the stand-in for sgl_kernel."""

import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive

from sglang_freekv.config import Refusal
from sglang_freekv.scheduler_patch import cpu


def new_allocator(pages: int, page_size: int, seed: int) -> PagedTokenToKVPoolAllocator:
    """An allocator whose free pages are out of order, as after a while of serving."""
    allocator = PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.bfloat16, "cpu", kvcache=None, need_sort=False)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    allocator.free_pages = allocator.free_pages[order]
    return allocator


def ragged_batch(requests: int, page_size: int, longest: int, seed: int):
    """Prefix lengths, sequence lengths and last slots; prefixes are empty, whole pages or end inside one."""
    random = torch.Generator().manual_seed(seed)
    prefix = torch.randint(0, longest, (requests,), generator=random)
    prefix[::3] = prefix[::3] // page_size * page_size
    prefix[::5] = 0
    total = prefix + torch.randint(1, longest, (requests,), generator=random)
    page = torch.randint(1000, 2000, (requests,), generator=random)
    last = torch.where(prefix > 0, page * page_size + (prefix - 1) % page_size, -1)
    return prefix, total, last


def sglang_slots(prefix, total, last, free_pages, page_size) -> torch.Tensor:
    slots = torch.empty(int((total - prefix).sum()), dtype=torch.int64)
    alloc_extend_naive(prefix, total, last, free_pages, slots, page_size, "cpu")
    return slots


def pages_needed(prefix, total, page_size) -> int:
    return int((-(-total // page_size) + -prefix // page_size).sum())


@pytest.mark.parametrize("page_size", [2, 32, 48])
@pytest.mark.parametrize("requests", [1, 7, 40])
@pytest.mark.parametrize("longest", [3, 300])
def test_extend_takes_the_pages_that_sglang_takes(page_size, requests, longest):
    for seed in range(5):
        prefix, total, last = ragged_batch(requests, page_size, longest, seed)
        allocator = new_allocator(pages_needed(prefix, total, page_size) + 3, page_size, seed)
        free_pages = allocator.free_pages.clone()
        slots = cpu.alloc_extend(None, allocator, prefix, prefix, total, total, last, int((total - prefix).sum()))
        assert slots.dtype == torch.int64 and torch.equal(slots, sglang_slots(prefix, total, last, free_pages, page_size))
        assert torch.equal(allocator.free_pages, free_pages[-3:])


@pytest.mark.parametrize("page_size", [2, 32])
def test_decode_takes_the_pages_that_sglang_takes(page_size):
    for seed in range(5):
        _, lengths, _ = ragged_batch(24, page_size, 100, seed)
        last = torch.arange(1000, 1024) * page_size + (lengths - 1) % page_size
        allocator = new_allocator(40, page_size, seed)
        free_pages = allocator.free_pages.clone()
        slots = cpu.alloc_decode(None, allocator, lengths + 1, lengths + 1, last.int())
        assert torch.equal(slots, sglang_slots(lengths, lengths + 1, last, free_pages, page_size))
        assert len(allocator.free_pages) == 40 - int((lengths % page_size == 0).sum())


def test_nothing_is_taken_when_pages_do_not_suffice():
    allocator = new_allocator(3, 32, seed=0)
    free_pages = allocator.free_pages.clone()
    prefix, total, last = torch.tensor([0, 31]), torch.tensor([64, 65]), torch.tensor([-1, 1054])
    assert cpu.alloc_extend(None, allocator, prefix, prefix, total, total, last, 98) is None
    assert torch.equal(allocator.free_pages, free_pages)


def test_the_rest_of_a_page_needs_no_free_page():
    allocator = new_allocator(1, 32, seed=0)
    allocator.free_pages = allocator.free_pages[:0]
    one = torch.tensor([1])
    assert cpu.alloc_extend(None, allocator, one, one, one + 2, one + 2, torch.tensor([320]), 2).tolist() == [321, 322]


def test_only_our_backend_is_without_triton():
    assert not cpu.support_triton(lambda backend: True, "freekv")
    assert cpu.support_triton(lambda backend: True, "triton") and not cpu.support_triton(lambda backend: False, "torch_native")


def test_stand_in_loads_and_says_so_when_called():
    code = (
        "import sgl_kernel\n"
        "from sgl_kernel import verify_tree_greedy_cpu\n"
        "print(sgl_kernel.__file__, hasattr(sgl_kernel, 'silu_and_mul'))\n"
        "verify_tree_greedy_cpu(1)\n"
    )
    shim = cpu._shim_directory()
    environment = os.environ | {"PYTHONPATH": str(shim)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, text=True, capture_output=True)
    assert done.stdout.split() == [str(shim / "sgl_kernel" / "__init__.py"), "False"]
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: sgl_kernel.verify_tree_greedy_cpu was called, but")


def test_a_gpu_is_not_mixed_with_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Refusal, match='--device cpu: this machine has a GPU.*CUDA_VISIBLE_DEVICES=""'):
        cpu.prepare_process()


@pytest.mark.parametrize(("found", "device"), [("cuda", "cuda"), ("cuda:1", "cuda"), (RuntimeError("No accelerator"), "cpu")])
def test_device(monkeypatch, caplog, found, device):
    from sglang.srt.utils import common

    def get_device():
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(common, "get_device", get_device)
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=RuntimeError("The driver\nis too old")))
    assert cpu.usable_device(None) == device
    told = ["no usable GPU, so the CPU serves, which is slow: The driver is too old (--device cpu, if that is meant)"]
    assert caplog.messages == (told if device == "cpu" else [])
    assert cpu.usable_device("cuda:3") == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="sgl_kernel loads where there is an NVIDIA driver")
def test_environment_for_stock_sglang(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/first")
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cpu.cpu_environment() == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_WAIT_POLICY": "ACTIVE",
        "PYTHONPATH": f"{cpu._shim_directory()}{os.pathsep}/first",
    }
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert cpu.cpu_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    assert importlib.util.find_spec("sgl_kernel").origin.startswith(sys.prefix)  # this process is as it was


@pytest.mark.parametrize("dtype, asked", [(torch.float8_e4m3fn, (True, ("intel_amx",))), (torch.float32, (False, ("freekv",)))], ids=str)
def test_pools_of_fp8_kv_are_made_without_amx(dtype, asked, monkeypatch):
    """What SGLang asks before. Whoever asks for the backends again, or behind an error, hears what they are."""
    module = ModuleType("configurator")
    module.cpu_has_amx_support, module.attention_backends = lambda: False, lambda: ("freekv",)
    monkeypatch.setitem(sys.modules, "configurator", module)
    configurator = type("Configurator", (), {"__module__": "configurator", "kv_cache_dtype": dtype})()

    def configure(self, *, pre_model_load_memory: int) -> None:
        found = module.cpu_has_amx_support(), module.attention_backends()
        raise RuntimeError(found, module.attention_backends(), pre_model_load_memory)

    with pytest.raises(RuntimeError) as error:
        cpu.configure_pools(configure, configurator, pre_model_load_memory=7)
    assert error.value.args == (asked, ("freekv",), 7)
    assert (module.cpu_has_amx_support(), module.attention_backends()) == (False, ("freekv",))
