"""Recall's speed by which part of a large host pool the pages are in: python benchmarks/probe_host.py GIB registered|cuda"""
import sys
import time

import torch
from bench_recall import DTYPE, Pools
from sglang_freekv import kernels
from sglang_freekv.config import GIB
from sglang_freekv.memory_pool import pinned
from timing import time_graph

gib, kind = int(sys.argv[1]), sys.argv[2]
begin = time.time()
if kind == "registered":
    memory = pinned.allocate(gib * GIB, huge=True)
    pinned.pin(memory)
    host = torch.frombuffer(memory, dtype=DTYPE)
else:
    host = torch.empty(gib * GIB // 2, dtype=DTYPE, pin_memory=True)
print(f"{kind} {gib} GiB up in {time.time() - begin:.1f} s", flush=True)
device_memory = torch.empty(8192 * 16384, dtype=DTYPE, device="cuda")
target = torch.empty(GIB // 2, dtype=DTYPE, device="cuda")
words = GIB // 2
for start in range(0, gib, max(4, gib // 8)):
    piece = host[start * words : (start + 1) * words]
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.time()
        target.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()
    print(f"  copy of GiB {start}: {1.0737 / (time.time() - begin):.1f} GB/s", flush=True)
for first, last in sorted({(0, 4), (gib // 2, gib // 2 + 4), (gib - 4, gib), (0, 8), (0, gib // 4), (0, gib // 2), (0, gib)}):
    pools = Pools(32, "hnd", host[first * words : last * words], device_memory, 8192)
    for programs in (8, 16, 64):
        lengths, full = pools.full(4), pools.full(4)
        calls = [lambda i=i: kernels.recall_pages(pools.host, pools.misses(lengths[i]), pools.keys, pools.values, programs) for i in range(4)]
        seconds = time_graph([lambda: lengths.copy_(full), *calls], "cuda", least=5)
        took = seconds["median"] * 5 / 4
        print(f"  GiB {first}-{last}, {programs} programs: {took * 1e3:.3f} ms, {pools.num_units * pools.unit_bytes / took / 1e9:.1f} GB/s", flush=True)
