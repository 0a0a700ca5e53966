"""Kernels that have a path for each dtype, compiled for a GPU that is not here: what the interpreter takes, a compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_freekv.kernels import two_bit

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
dtype, D, G, S = sys.argv[1], *map(int, sys.argv[2:])
elements = 2 * D + D * S // 4 // ELEMENT[dtype]
pointers = {"p_words": "*i32", "p_rows": "*i64", "p_seq_lens": "*i64", "p_page_table": "*i32", "p_logits": "*fp32"}
pointers |= dict.fromkeys(("p_starts", "p_host_pages"), "*i64") | dict.fromkeys(("p_queries", "p_keys", "p_digests"), "*" + dtype)
numbers = {"H": 8, "G": G, "D": D, "S": S, "E": elements, "E_WORDS": elements * ELEMENT[dtype] // 4, "WORD": 8}

def compiled(kernel, **launch):
    constants = {p.name: (numbers | launch)[p.name] for p in kernel.params if p.is_constexpr}
    signature = {p.name: pointers.get(p.name, "fp32" if p.name == "scale" else "i32") for p in kernel.params}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {name: launch[name] for name in ("num_warps", "num_stages") if name in launch}
    return triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32), options=options)

compiled(two_bit._digest_two_bit, BLOCK_S=triton.next_power_of_2(S), BLOCK_D=triton.next_power_of_2(D // 2))
print(compiled(two_bit._score_two_bit, **two_bit.score_launch(G, D, ELEMENT[dtype])).metadata.shared)
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("D, G, S", [(128, 4, 8), (90, 7, 24), (256, 8, 256)])
def test_two_bit_kernels_compile_and_fit_a_small_gpu(dtype, D, G, S):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE, dtype, *map(str, (D, G, S))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) <= 99 * 1024
