# SPDX-License-Identifier: Apache-2.0
"""Serves on a machine without an NVIDIA driver: the environment that SGLang needs, and substitutes for its Triton kernels."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from sglang_freekv.config import BACKEND_NAME, Refusal

logger = logging.getLogger(__name__)


def usable_device(asked: str | None) -> str:
    """The type of the device that SGLang will run on: the user's choice, else the one that SGLang finds, else "cpu"."""
    if asked is not None:
        return asked.split(":")[0]
    from sglang.srt.utils.common import get_device

    try:
        return get_device().split(":")[0]
    except RuntimeError:  # SGLang's "No accelerator (CUDA, XPU, ...) is available"
        logger.warning("no usable GPU, so the CPU serves, which is slow: %s (--device cpu, if that is meant)", _why_no_gpu())
        return "cpu"


def _why_no_gpu() -> str:
    """CUDA's error, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is false"


def prepare_process() -> None:
    """Make SGLang run on the CPU in this process and, through the environment, in the processes that it starts.

    Raises:
        Refusal: SGLang sees a GPU here and would call CUDA kernels on CPU tensors.
    """
    if torch.cuda.is_available():
        raise Refusal(
            '--device cpu: this machine has a GPU, and SGLang would call its kernels; hide it with CUDA_VISIBLE_DEVICES="" '
            "or use --device cuda"
        )
    from sglang.srt import platforms
    from sglang.srt.utils.common import is_cpu

    os.environ.update(cpu_environment())
    is_cpu.cache_clear()
    platforms._current_platform = None  # SGLang reads the environment again when it next needs the platform
    for module in _sglang_modules("_is_cpu"):
        module._is_cpu = True  # type: ignore[attr-defined]
    if not _sgl_kernel_serves_cpu():
        for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
        sys.path.insert(0, str(_shim_directory()))


def _sglang_modules(name: str) -> list[ModuleType]:
    """Loaded modules of SGLang that have a global of this name."""
    loaded = [module for path, module in list(sys.modules.items()) if path.startswith("sglang.")]
    return [module for module in loaded if name in vars(module)]


def cpu_environment() -> dict[str, str]:
    """Environment variables for `--device cpu`. With them stock SGLang serves here too, by `--attention-backend torch_native`."""
    environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    # SGLang runs more processes than a small machine has cores. OpenMP threads that spin while they wait slow it tenfold.
    environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    if not _sgl_kernel_serves_cpu():
        old = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(_shim_directory()), *old])
    return environment


def _sgl_kernel_serves_cpu() -> bool:
    """Whether `sgl_kernel` loads and is a build for CPUs, or is the stand-in of `launch/cpu_shim` already."""
    try:
        module = importlib.import_module("sgl_kernel")
    except (ImportError, OSError):
        return False
    return hasattr(module, "assign_req_to_token_pool_cpu")


def _shim_directory() -> Path:
    launch = importlib.util.find_spec("sglang_freekv.launch")
    return Path(launch.submodule_search_locations[0]) / "cpu_shim"


def support_triton(original, backend: str) -> bool:
    """AROUND the question whether a backend runs Triton: FreeKV's does not on a CPU; SGLang would say so of any unknown name."""
    return backend != BACKEND_NAME and original(backend)


def most_ranks() -> int:
    """Ranks that SGLang can start here: one for each NUMA node, unless the user names the cores of each."""
    from sglang.srt.utils.common import get_cpu_ids_by_node

    named = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    return len(get_cpu_ids_by_node() if named == "all" else named.split("|"))


def configure_pools(original, configurator, **options):
    """AROUND the making of the pools: let KV in floats of 8 bits be without AMX, which SGLang's own attention on a CPU needs for it.

    FreeKV's attention there and PyTorch's, which computes dense layers, decode such KV themselves.
    """
    if configurator.kv_cache_dtype != torch.float8_e4m3fn:
        return original(configurator, **options)
    asked = vars(importlib.import_module(type(configurator).__module__))
    kept = {name: asked[name] for name in ("cpu_has_amx_support", "attention_backends")}

    def backends_of_amx() -> tuple[str]:
        asked["attention_backends"] = kept["attention_backends"]  # others ask, too, but later
        return ("intel_amx",)

    asked |= {"cpu_has_amx_support": lambda: True, "attention_backends": backends_of_amx}
    try:
        return original(configurator, **options)
    finally:
        asked |= kept


def without_nccl(original, *args, **kwargs):
    """AROUND the making of a group of ranks: they talk by gloo alone."""
    return original(*args, **(kwargs | {"use_pynccl": False}))


def alloc_extend(
    original, allocator, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
):
    """AROUND: allocate the slots of an extend without Triton, on releases that do not ask whether the platform has it.

    Args:
        prefix_lens, seq_lens: ``[B]`` int64 tokens of each request before and after.
        last_loc: ``[B]`` slot of each request's last token, -1 without one.
        extend_num_tokens: new tokens of the batch.

    Returns:
        ``[extend_num_tokens]`` int64 slots; None if the free pages do not suffice.
    """
    return _take_slots(allocator, prefix_lens, seq_lens, last_loc)


def alloc_decode(original, allocator, seq_lens, seq_lens_cpu, last_loc):
    """AROUND: allocate the ``[B]`` slots of a decode step without Triton. Arguments and result are as in ``alloc_extend``."""
    return _take_slots(allocator, seq_lens - 1, seq_lens, last_loc)


def _take_slots(allocator, prefix_lens, seq_lens, last_loc) -> torch.Tensor | None:
    """Take pages from the allocator and return their slots. If its pages do not suffice, return None and take none."""
    pages = pages_of(seq_lens, allocator.page_size) - pages_of(prefix_lens, allocator.page_size)
    taken = int(pages.sum())
    if taken > len(allocator.free_pages):
        return None
    slots = extend_slots(prefix_lens, seq_lens, last_loc, allocator.free_pages, allocator.page_size)
    allocator.free_pages = allocator.free_pages[taken:]
    return slots


def pages_of(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (tokens + page_size - 1) // page_size


def extend_slots(prefix_lens, seq_lens, last_loc, free_pages, page_size: int) -> torch.Tensor:
    """Slots of the new tokens of a batch: the rest of each request's last page, then free pages in order.

    Args:
        prefix_lens, seq_lens: ``[B]`` int64 tokens of each request before and after.
        last_loc: ``[B]`` slot of each request's last token, -1 without one.
        free_pages: ``[F]`` int64 pages, taken from the front, request by request.

    Returns:
        ``[sum(seq_lens - prefix_lens)]`` int64 slots.
    """
    counts = seq_lens - prefix_lens
    old_pages, new_pages = pages_of(prefix_lens, page_size), pages_of(seq_lens, page_size)
    first_page = torch.cumsum(new_pages - old_pages, 0) - new_pages  # index into free_pages of logical page 0
    request = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    nth = torch.arange(len(request), device=counts.device) - (torch.cumsum(counts, 0) - counts)[request]
    position = prefix_lens[request] + nth
    slots = last_loc[request].to(torch.int64) + 1 + nth
    fresh = position // page_size >= old_pages[request]
    pages = free_pages[(first_page[request] + position // page_size)[fresh]]
    slots[fresh] = pages * page_size + position[fresh] % page_size
    return slots
