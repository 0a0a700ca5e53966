"""Kernels that have a path for each dtype, compiled for a GPU that is not here: what the interpreter takes, a compiler may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_freekv.kernels import two_bit_digest, two_bit_score

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTERS = {"p_words": "*i32", "p_rows": "*i64", "p_seq_lens": "*i64", "p_page_table": "*i32", "p_logits": "*fp32", "p_selects": "*i1"}
POINTERS |= dict.fromkeys(("p_starts", "p_host_pages"), "*i64")

def compiled(kernel, pointers, numbers, **launch):
    constants = {p.name: (numbers | launch)[p.name] for p in kernel.params if p.is_constexpr}
    signature = {p.name: pointers.get(p.name, "fp32" if p.name == "scale" else "i32") for p in kernel.params}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {name: value for name, value in launch.items() if not name.isupper()}
    return triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32), options=options)

for case in sys.argv[1:]:
    dtype, *shape = case.split("-")
    D, G, S = map(int, shape)
    pointers = POINTERS | dict.fromkeys(("p_queries", "p_keys", "p_digests"), "*" + dtype)
    elements = 2 * D + D * S // 4 // ELEMENT[dtype]
    numbers = {"H": 8, "G": G, "D": D, "S": S, "E": elements, "E_WORDS": elements * ELEMENT[dtype] // 4, "WORD": 8, "FLOAT": None}
    compiled(two_bit_digest._digest_two_bit, pointers, numbers, BLOCK_S=triton.next_power_of_2(S), BLOCK_D=triton.next_power_of_2(D // 2))
    scores = compiled(two_bit_score._score_two_bit, pointers, numbers, **two_bit_score.score_launch(G, D, S))
    fused = {"bf16": "fma.rn.bf16x2", "fp16": "fma.rn.f16x2", "fp32": "fma.rn.f32"}[dtype]
    print(case, scores.metadata.shared, scores.asm["ptx"].count(fused), flush=True)
"""
CASES = [  # dtype, D, G, S; a kv head of 256 as of models with linear attention
    "bf16-128-4-8", "bf16-90-7-24", "bf16-128-2-16", "bf16-256-16-8", "fp16-128-4-8", "fp32-256-8-64",
]  # fmt: skip


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def shared():
    """Bytes of shared memory that a score needs, and its products with a sum, by case. One process compiles all: it imports for seconds."""
    done = run(COMPILE, *CASES)
    return {case: numbers for case, *numbers in map(str.split, done.stdout.splitlines())} | {"error": done.stderr[-2000:]}


@pytest.mark.parametrize("case", CASES)
def test_two_bit_kernels_compile_and_fit_a_small_gpu(shared, case):
    assert case in shared, shared["error"]
    assert int(shared[case][0]) <= 99 * 1024


@pytest.mark.parametrize("case", [case for case in CASES if "-128-" in case and "fp32" not in case])
def test_two_dimensions_of_a_key_are_made_by_one_instruction_that_rounds_once(shared, case):
    """Of 16 pages of 8 or 16 tokens, by 32 threads. Without it a score takes half as long again, and codes in bfloat16 are lost."""
    assert int(shared[case][1]) == 16 * (16 if case.endswith("-16") else 8) * 64 // 32, shared["error"]


WIDE = """
import sys
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from sglang_freekv.config import PageBudget
from sglang_freekv.kernels import attend, score
from sglang_freekv.kernels.reads import Reads

driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0))
run, shared = JITFunction.run, []

def compiled(kernel, *args, grid, warmup, **options):
    shared.append(run(kernel, *args, grid=grid, warmup=True, **options).metadata.shared)

JITFunction.run = compiled
for case in sys.argv[1:]:
    dtype, D, G = case.split("-")
    H, D, G, S, A, dtype = 2, int(D), int(G), 8, 64, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    queries, keys, digests = torch.zeros(1, H * G, D, dtype=dtype), torch.zeros(A, S, H, D, dtype=dtype), torch.zeros(A, H, 2, D, dtype=dtype)
    one, table = torch.ones(1, dtype=torch.int64), torch.zeros(1, A, dtype=torch.int32)
    reads = Reads.allocate(1, H, A, "cpu")
    shares = attend.allocate_shares(queries, keys, reads)
    attend.attend_present(queries, keys, keys, one, reads, 1.0, shares)
    attend.attend_rest(queries, keys, keys, one, reads, 1.0, shares)
    score.score_pages(queries, digests, one, one, table, PageBudget(1, 4, 2), S, scale=1.0)
    print(case, *shared, flush=True)
    shared.clear()
"""
WIDE_CASES = ["bf16-256-6", "bf16-256-16", "fp32-256-8"]  # D and G of models with linear attention, whose kv heads are wide


def test_attention_and_scores_of_wide_kv_heads_compile_and_fit_a_small_gpu():
    done = run(WIDE, *WIDE_CASES)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = {case: list(map(int, numbers)) for case, *numbers in map(str.split, done.stdout.splitlines())}
    assert list(shared) == WIDE_CASES and all(len(numbers) == 3 for numbers in shared.values())
    assert all(0 < number <= 99 * 1024 for numbers in shared.values() for number in numbers), shared


CODED = """
import re
import sys
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from sglang_freekv.kernels import attend
from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.reads import Reads

driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", int(sys.argv[1]), 32), get_current_device=lambda: 0))
run, found = JITFunction.run, []
JITFunction.run = lambda kernel, *args, grid, warmup, **options: found.append(run(kernel, *args, grid=grid, warmup=True, **options))

for case in sys.argv[2:]:
    name, code, D, G, S = case.split("-")
    D, G, S, dtype = int(D), int(G), int(S), {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    queries, keys = torch.zeros(1, 2 * G, D, dtype=dtype), torch.zeros(64, S, 2, D, dtype={"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[code])
    one, scale = torch.ones(1, dtype=torch.int64), torch.zeros(64, S, 2, dtype=torch.float16)
    reads, scales = Reads.allocate(1, 2, 64, "cpu"), Scales(scale, scale) if code == "int8" else None
    shares = attend.allocate_shares(queries, keys, reads)
    attend.attend_present(queries, keys, keys, one, reads, 1.0, shares, scales=scales)
    attend.attend_rest(queries, keys, keys, one, reads, 1.0, shares, scales=scales)
    attend.attend_pages(queries, keys, keys, one, reads, 1.0, scales=scales)
    for ptx, kernel in [(each.asm["ptx"], each) for each in found if each.metadata.name == "_attend_pages"]:
        narrow = len(re.findall(r"ld[.]shared[.](?:v[24][.])?[bsu](?:8|16)", ptx))
        print(case, kernel.metadata.shared, narrow, len(re.findall(r"ld[.]shared[.](?:v[24][.])?[bsu]32", ptx)), flush=True)
    found.clear()
"""
CODED_CASES = ["bf16-int8-128-4-8", "fp16-int8-64-8-32", "bf16-int8-256-6-2", "fp32-int8-80-1-8"]


FLOAT_CASES = ["bf16-e4m3-128-4-8", "bf16-e5m2-128-4-8"]


@pytest.mark.parametrize(
    "device, cases", [("90", CODED_CASES + FLOAT_CASES), ("80", CODED_CASES[:1] + FLOAT_CASES[1:])], ids=["sm_90", "sm_80"]
)
def test_codes_are_read_in_words(device, cases):
    """Bytes that are read one by one from shared memory would take longer than all the rest."""
    done = run(CODED, device, *cases)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [(case, *map(int, numbers)) for case, *numbers in map(str.split, done.stdout.splitlines())]
    assert [case for case, *_ in found] == [case for case in cases for _ in range(3)]
    assert all(0 < shared <= 99 * 1024 and narrow == 0 < words for _, shared, narrow, words in found), found


FLOATS = """
import re
import sys
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from sglang_freekv.kernels import append, decode, digest, two_bit_digest, write
from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.kv import KV

driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", int(sys.argv[1]), 32), get_current_device=lambda: 0))
run, found = JITFunction.run, []
JITFunction.run = lambda kernel, *args, grid, warmup, **options: found.append(run(kernel, *args, grid=grid, warmup=True, **options))

for name in sys.argv[2:]:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    new, places = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    frames = KV(torch.zeros(8, 8, 2, 128, dtype=dtype), torch.zeros(8, 8, 2, 128, dtype=dtype))
    rows, small = frames.token_rows, torch.zeros(4, 2, dtype=torch.int32)
    tables = Tables(small.view(2, 2, 2), small.view(2, 2, 2), small)
    write.write_tokens(new, new, new, places, places, places, keys=rows.keys, values=rows.values, previous_queries=new)
    append.append_tokens(new, new, places, places, small, small, tables, keys=frames.keys, values=frames.values)
    decode.decode_tokens(rows, places, KV(new, new))
    digest.digest_pages(rows.keys, small, small[:, 0], torch.zeros(4, 2, 2, 128, dtype=torch.bfloat16), 8)
    two_bit_digest.digest_two_bit(rows.keys, small, small[:, 0], torch.zeros(4, 2, 384, dtype=torch.bfloat16), 8)
    for kernel in found:
        print(name, kernel.metadata.name, len(re.findall("cvt[^ ]*" + name, kernel.asm["ptx"])), flush=True)
    found.clear()
"""


@pytest.mark.parametrize("device, floats", [("90", ["e4m3", "e5m2"]), ("80", ["e5m2"])], ids=["sm_90", "sm_80"])
def test_kernels_of_floats_of_8_bits_compile(device, floats):
    """Those that write round by hand. Those that read let the device convert."""
    done = run(FLOATS, device, *floats)
    assert done.returncode == 0, done.stderr[-2000:]
    names = ["_write_kernel", "_append_kernel", "_decode_kernel", "_digest_kernel", "_digest_two_bit"]
    found = [line.split() for line in done.stdout.splitlines()]
    assert [each[:2] for each in found] == [[each, name] for each in floats for name in names]
    converts = {(each, name): int(count) > 0 for each, name, count in found}
    assert not any(converts[each, name] for each in floats for name in names[:2])
    assert all(converts["e4m3", name] for name in names[2:] if "e4m3" in floats)  # of e5m2 Triton widens the bits itself


FOLLOW = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_freekv.kernels import attend, merge, plan, preselect, recall
from sglang_freekv.kernels.select import Sizes

WIDE = {"p_rows", "p_seq_lens", "p_counts"}
TWO_BYTES = {"p_queries", "p_keys", "p_values", "p_output", "p_learned_sinks"}
FOUR = {"p_logits", "p_weights", "p_parts", "p_norms"}
NUMBERS = {
    "H": 8, "G": 4, "D": 128, "S": 32, "BLOCK_G": 16, "BLOCK_T": 64, "BLOCK_D": 128, "BLOCK_N": 16, "FOLLOWS": True, "CODE": None, "AHEAD_FIRST": True,
    "POOLING": "softmax-mean", "HYSTERESIS": 0.0, "ON_TURN": False, "A_PART": 64, "PARTS_BLOCK": 8, "UNITS": 1, "BLOCK_S": 32, "PREFETCH": True,
    "SIZES": Sizes(SINK=16, SELECTED=32, WINDOW=16, H=8, G=4, S=32, C=64, A=64, BUDGET=64, G_BLOCK=4, C_BLOCK=64, A_BLOCK=64,
                   BUDGET_BLOCK=64, P_FEW=256, P_MANY=1024, P_BLOCK=1024),
}

def first_accesses(name, kernel, **more):
    numbers = NUMBERS | more
    constants = {p.name: numbers[p.name] for p in kernel.params if p.is_constexpr or p.name in more}
    kinds = {p.name: "i32" for p in kernel.params} | {"scale": "fp32"}
    for each in kinds:
        if each.startswith("p_"):
            kinds[each] = "*i64" if each in WIDE else "*bf16" if each in TWO_BYTES else "*fp32" if each in FOUR else "*i32"
    signature = {p.name: kinds[p.name] for p in kernel.params} | dict.fromkeys(constants, "constexpr")
    ptx = triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    found = re.findall(r"griddepcontrol.wait|(?:ld|st|atom|red|cp.async)[a-z0-9.]*[.]global", ptx)
    print(name, found[0], len(found))

first_accesses("plan", plan._plan_pages, REST=False)
first_accesses("plan", plan._plan_pages, REST=False, HYSTERESIS=1.4, ON_TURN=True)
first_accesses("plan", plan._plan_pages, REST=False, SIZES=NUMBERS["SIZES"]._replace(A=128, A_BLOCK=128))
LONG = NUMBERS["SIZES"]._replace(P_BLOCK=8192)
first_accesses("plan-of-finds", plan._plan_pages, REST=False, SIZES=LONG)
first_accesses("norms", preselect._norm_parts, REST=False, SIZES=LONG)
first_accesses("preselect", preselect._preselect, REST=False, SIZES=LONG)
first_accesses("recall", recall._recall_kernel, S=32, D=64, BLOCK_D=64, p_stamp=None)
first_accesses("rest", attend._attend_pages, REST=True, p_stamp=None)
first_accesses("merge", merge._merge_shares, p_learned_sinks=None)
first_accesses("merge-with-sinks", merge._merge_shares)
first_accesses("control", merge._merge_shares, FOLLOWS=False, p_learned_sinks=None)
first_accesses("whole", attend._attend_pages, REST=False, FOLLOWS=False, p_present=None, p_weights=None, p_stamp=None)
"""


def test_what_follows_closely_waits_before_it_reads_or_writes_anything():
    """In PTX, whose order around such a wait is the machine's: a load moved to the front of it would read what is not there yet."""
    done = run(FOLLOW)
    assert done.returncode == 0, done.stderr[-2000:]
    first = {name: access for name, access, _ in map(str.split, done.stdout.splitlines())}
    control, whole = first.pop("control"), first.pop("whole")
    plans, others = {"plan", "plan-of-finds", "norms", "preselect"}, {"recall", "rest", "merge", "merge-with-sinks"}
    assert set(first) == plans | others and set(first.values()) == {"griddepcontrol.wait"}
    assert control.startswith("ld.global") and whole.startswith("ld.global"), "these do not wait"


CODES = """
import sys
from unittest import mock
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from sglang_freekv.kernels import on_gpu
from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.kv import KV, Scales

driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0))
run, found = JITFunction.run, []

def compiled(kernel, *args, grid, warmup, **options):
    made = run(kernel, *args, grid=grid, warmup=True, **options)
    found.extend((kernel.__name__, made.metadata.shared, *map(made.asm["ptx"].count, ("ld.global", "ld.global.v4.b32", "wgmma.mma_async"))))

JITFunction.run = compiled
for case in sys.argv[1:]:
    dtype, D, HQ, H, S = case.split("-")
    D, HQ, H, S, T, R, C, dtype = int(D), int(HQ), int(H), int(S), 16, 3, 8, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    queries, keys, values = torch.zeros(T, HQ + 2 * H, D, dtype=dtype).split([HQ, H, H], 1)
    codes, scales = torch.zeros(R * C, S, H, D, dtype=torch.int8), torch.zeros(R * C, S, H, dtype=torch.float16)
    frames, rows, pages = KV(codes, codes, Scales(scales, scales)), torch.zeros(T, dtype=torch.int64), torch.zeros(T, 16, dtype=torch.int32)
    kv, slots = frames.token_rows, torch.zeros(R, H, C, dtype=torch.int32)
    on_gpu.rotate(queries, keys)
    on_gpu.decode_tokens(kv, rows, KV(torch.zeros(T, H, D, dtype=dtype), torch.zeros(T, H, D, dtype=dtype)))
    on_gpu.unrotated_keys(kv, pages[:, :H], rows, S, dtype)
    where = rows, rows, pages, pages.clone(), Tables(slots, slots, torch.zeros(R, C, dtype=torch.int32))
    on_gpu.append_tokens(keys, values, *where, keys=codes, values=codes, scales=frames.scales)
    previous = torch.zeros(R, HQ, D, dtype=dtype)
    on_gpu.write_tokens(keys, values, queries, rows, rows, rows, keys=kv[0], values=kv[1], previous_queries=previous, scales=kv.scales)
    print(case, *found, flush=True)
    found.clear()
"""
CODES_CASES = ["bf16-128-32-8-32", "bf16-80-8-2-8", "bf16-256-16-2-32", "fp32-128-32-8-32", "fp32-256-8-2-8"]  # D, Hq, H, S


def test_kernels_of_codes_compile_and_fit_a_small_gpu():
    """Rotations are done by tensor cores, but for those of float32. Codes are read 16 bytes at a time, and a scale by few threads."""
    done = run(CODES, *CODES_CASES)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [case for case, *_ in lines] == CODES_CASES
    for case, *words in lines:
        found = {words[i]: list(map(int, words[i + 1 : i + 5])) for i in range(0, len(words), 5)}
        assert set(found) == {f"_{name}_kernel" for name in ("rotate", "decode", "unrotate", "append", "write")}
        assert all(shared <= 99 * 1024 for shared, *_ in found.values()), found
        _, reads, wide, _ = found["_decode_kernel"]
        assert wide == 8 and reads - wide <= 12, found
        assert found["_unrotate_kernel"][3] and bool(found["_rotate_kernel"][3]) == case.startswith("bf16"), found


FRAMES = """
import json
from unittest import mock
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from sglang_freekv.kernels import on_gpu
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool import frames as owner
from sglang_freekv.memory_pool.device_cache import DeviceCache, Slots
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape

driver.set_active(mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0))
run, found = JITFunction.run, []
JITFunction.run = lambda kernel, *args, grid, warmup, **options: run(kernel, *args, grid=grid, warmup=True, **options)
knobs.runtime.jit_cache_hook = lambda *, key, fn, **rest: found.append(fn.name.rpartition(".")[2])  # and compile it
owner.kernels = on_gpu

for pages, rows, requests, tokens in (4096, 33, 8, 131_072), (977, 7, 1, 999):
    shape = KVShape(LayerTable.uniform(0), 1, 1, 1, (1,), KVFormat.plain(torch.float32))
    frames = owner.Frames(DeviceCache(shape, 32, Slots(rows, 3, 1, pages // 2), "cpu"), pages)
    slots = torch.zeros(rows, tokens + 4, dtype=torch.int32)
    batch = slots, torch.ones(requests, dtype=torch.int64), torch.ones(requests, dtype=torch.int64)
    page_table, shown, given = (torch.zeros(requests, tokens // 32, dtype=torch.int32) for _ in range(3))
    for now in range(2):
        frames.rows_ended(list(range(1, rows - 1))[: now * rows])
        frames.lend([1, 2])
        frames.begin_decode(*batch, given=given)
        frames.begin_extend_in_place(*batch, batch[1], given)
        frames.begin_extend_by_staging(*batch, batch[1], given, keep=now * 300)
        frames.snapshot(*batch, page_table, shown)
print(json.dumps(found))
"""


def test_frames_compile_once_for_a_gpu_and_all_sizes():
    done = run(FRAMES)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, pages = {"_note_kernel", "_lend_kernel", "_mark_kernel", "_hand_kernel"}, {"_begin_kernel", "_hold_kernel", "_forget_kernel"}
    expected = rows | pages | {"_snapshot_kernel"}
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == sorted(expected)


LONG = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_freekv.kernels import plan, preselect, seed
from sglang_freekv.kernels.select import BLOCKS, Sizes

sizes = Sizes(SINK=16, SELECTED=224, WINDOW=16, H=8, G=4, S=8, C=256, A=256, BUDGET=256, G_BLOCK=4, C_BLOCK=256, A_BLOCK=256,
              BUDGET_BLOCK=256, P_FEW=BLOCKS[0], P_MANY=BLOCKS[1], P_BLOCK=1 << 18)
NUMBERS = {"SIZES": sizes, "POOLING": "softmax-mean", "EXTRA": 224, "HYSTERESIS": 1.0, "ON_TURN": False, "FOLLOWS": True, "AHEAD_FIRST": False,
           "A_PART": 256, "REST": False, "PARTS_BLOCK": 64}
WIDE = {"p_rows", "p_seq_lens", "p_counts"}

few = sizes._replace(P_FEW=4, P_MANY=8, P_BLOCK=32)  # as tests have it, where threads have one weight each
EIGHT = {"num_warps": 8}
LONG = ((seed._seed_slots, {"num_warps": 16}), (plan._plan_pages, EIGHT | {"maxnreg": 96}), (preselect._norm_parts, EIGHT), (preselect._preselect, EIGHT))
for kernel, options in LONG:
    for numbers in (NUMBERS, NUMBERS | {"SIZES": few, "AHEAD_FIRST": True}):
        constants = {p.name: numbers[p.name] for p in kernel.params if p.is_constexpr}
        kinds = {p.name: "*i64" if p.name in WIDE else "*fp32" if p.name in ("p_logits", "p_norms") else "*i32" for p in kernel.params}
        kinds |= {name: "i32" for name in kinds if not name.startswith("p_")} | dict.fromkeys(constants, "constexpr")
        made = triton.compile(ASTSource(kernel, kinds, constants, {}), target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        shuffled = set(re.findall(r"shfl[.]sync[.]\\w+[.]b32\\s+(%r\\d+)", ptx))
        fused = [line for line in ptx.splitlines() if "fma.rn.f32" in line and shuffled & set(re.findall(r"%r\\d+", line)[1:])]
        print(made.metadata.shared, len(ptx.splitlines()), len(shuffled), len(fused), flush=True)
"""


@pytest.fixture(scope="module")
def long():
    done = run(LONG)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_context_of_a_million_tokens_is_compiled_in_parts(long):
    """All of its weights at once would be 131,072 in the registers of one program: that compiles for minutes, and spills."""
    found = [line.split() for line in long]
    assert len(found) == 8 and all(int(shared) <= 4096 and int(lines) < 40_000 for shared, lines, *_ in found), found


def test_no_thread_of_a_plan_has_a_sum_of_its_own(long):
    """A product that is fused with what another thread sends is rounded there alone. Then equal pages get weights that differ."""
    shuffled, fused = zip(*(map(int, line.split()[2:]) for line in long))
    assert min(shuffled) > 10 and not any(fused)
    assert min(shuffled[:4]) > 100, "seeding and plans have many sums"
