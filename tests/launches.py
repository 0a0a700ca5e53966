"""Launches of a server's kernels, recorded in its rehearsal with the code that Triton makes of them. No GPU is needed: nothing runs.

``python -P launches.py SIZES``, a JSON list of arguments of ``engine_of``, prints a JSON list of ``Launch``. Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.engine import ExtendAttention
from sglang_freekv.kernels import follow, score
from sglang_freekv.kernels.coded_extend import CodedExtend
from sglang_freekv.kernels.extend import ReferenceExtend
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.copy_engine import CopyEngineRecall
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.readback import Readback
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Streams
from sglang_freekv.policy import POLICIES
from sglang_freekv.rehearsal import rehearse
from sglang_freekv.residency import Residency
from sglang_freekv.retrieval import Retrieval

HOPPER = GPUTarget("cuda", 90, 32)


class Launch(NamedTuple):
    """A kernel as it is compiled for a launch; ``same`` are pairs of arguments that share memory."""

    kernel: str
    ttgir: str
    same: list[tuple[str, str]]


class ExtendInTwo(ReferenceExtend):
    """Adds learned sinks behind attention, as on a GPU."""

    def __call__(self, queries, keys, values, scale, learned_sinks=None):
        output = super().__call__(queries, keys, values, scale)
        return output if learned_sinks is None else kernels.add_learned_sinks(output, torch.zeros(output.shape[:2]), learned_sinks)


def pretend_to_have_a_gpu() -> None:
    """Kernels of tensors on a CPU are compiled for a Hopper GPU in this process, and must not run."""
    driver.set_active(mock.Mock(get_current_target=lambda: HOPPER, get_current_device=lambda: 0))
    follow.can_follow = score.can_follow = lambda device: True
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.pin_memory = lambda tensor: tensor
    Readback.begin = lambda counts: None


def engine_of(
    *, context: int, rows: int, pages: int, resident: int, settings: dict[str, Any], kv_heads: int = 8
) -> tuple[Retrieval, Residency]:
    """The engine of a server of Llama-3.1-8B's shape, but for its two layers and ``kv_heads``. ``resident`` frames are for resident pages."""
    config = FreeKVConfig(**settings)
    policy, streams, size = POLICIES[config.method](config), Streams.make("cpu"), config.page_size
    shape = KVShape(LayerTable.uniform(2), kv_heads, 32, 128, policy.digests.shape(128, 2), KVFormat.of(config.kv_dtype, torch.bfloat16))
    frames = (rows + 1) * config.cache_pages + resident
    store = Store.build(config, shape, pages * size, rows, 4 * size, "cpu", streams.transfers, num_frames=frames)
    residency = Residency(store.frames, torch.zeros(rows + 1, context + 4, dtype=torch.int32), config.whole_pages)
    recall = CopyEngineRecall((2, size, 129), shape.format.storage, "cpu") if config.recall == "copy-engine" else kernels.recall_pages
    attention: ExtendAttention = ExtendInTwo()
    if config.is_coded:
        attention = CodedExtend(attention, (4 * size, kv_heads, 128), torch.bfloat16, size, "cpu")
    return Retrieval(config, policy, store, streams, recall, attention), residency


def most_pages(context: int, engine: Retrieval) -> int:
    """P of a page table."""
    return -(-context // engine.config.page_size // 16) * 16


def lowered(src: Any, target: GPUTarget, options: dict[str, Any]) -> Launch:
    """In the place of ``triton.compile``: the same, up to TTGIR."""
    backend, context = make_backend(target), ir.context()
    parsed = backend.parse_options(options | src.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = src.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, src.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {})
    return Launch(src.fn.__name__, str(module), [])


def sharing(arguments: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Pairs of tensors whose memory overlaps."""
    spans = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
            spans[name] = value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
    return (pair for pair in combinations(spans, 2) if max(spans[n][0] for n in pair) < min(spans[n][1] for n in pair))


def record(batch: int, learned_sinks: bool = False, **sizes: Any) -> dict[int, Launch]:
    """The launches of one rehearsal, by identity: each kernel once in a process for every way in which it is compiled."""
    run, found = JITFunction.run, {}

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch = run(self, *args, grid=grid, warmup=True, **named)
        launch.same.extend(set(sharing(dict(zip(self.arg_names, args)))) - set(launch.same))
        found[id(launch)] = launch

    engine, residency = engine_of(**sizes)
    with mock.patch.object(JITFunction, "run", note), mock.patch("triton.compiler.compile", lowered):
        sinks = torch.zeros(32, dtype=torch.bfloat16) if learned_sinks else None
        rehearse(engine, residency, batch, most_pages(sizes["context"], engine), learned_sinks=sinks)
    return found


if __name__ == "__main__":
    pretend_to_have_a_gpu()
    launches: dict[int, Launch] = {}
    for sizes in json.loads(sys.argv[1]):
        launches |= record(**sizes)
    print(json.dumps([*launches.values()]))
