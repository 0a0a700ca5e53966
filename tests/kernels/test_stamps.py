"""Stamps: what they come to, by hand and on random ones, and that a kernel which takes none has none in its code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sglang_freekv.kernels import reference_stamps as reference
from sglang_freekv.kernels.reference_stamps import AHEAD, ATTENTION, BEGIN, CORRECTION, END, PLACES, SAMPLED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, PADDING = torch.tensor([3, 0], device=DEVICE), torch.tensor([0, 0], device=DEVICE)


def settlers():
    from sglang_freekv.kernels import stamps  # declared for the interpreter where there is no GPU

    return {"reference": reference.settle_stamps, "kernel": stamps.settle_stamps}


@pytest.mark.parametrize("which", ["reference", "kernel"])
def test_recall_and_waiting_of_three_layers(which):
    stamps, totals = (torch.zeros(shape, dtype=torch.int64, device=DEVICE) for shape in ((4, 3, PLACES), 4))
    stamps[..., SAMPLED] = 1
    stamps[0, CORRECTION, 1:3], stamps[0, ATTENTION, END] = torch.tensor([100, 160]), 130  # 60, of which 30 behind the attention
    stamps[1, CORRECTION, 1:3], stamps[1, ATTENTION, END] = torch.tensor([300, 310]), 295  # 10, begun behind it
    stamps[2, CORRECTION, 1:3], stamps[2, ATTENTION, END] = torch.tensor([320, 325]), 330  # 5, all beside it
    stamps[0, AHEAD, 1:3] = torch.tensor([170, 290])  # 120
    stamps[1, AHEAD, BEGIN] = 340  # nothing to recall: it has no end
    stamps[3, ATTENTION, END] = 283  # the computation, 7 before the last recall
    settlers()[which](stamps, ROWS, totals, 2)
    assert totals.tolist() == [195, 47, 1, 1]
    assert not stamps[..., END].any() and not stamps[..., SAMPLED].any(), "the second of two is not sampled"
    settlers()[which](stamps, PADDING, totals, 2)
    assert totals.tolist() == [195, 47, 1, 1] and not stamps[..., SAMPLED].any(), "padding alone is no step"
    settlers()[which](stamps, ROWS, totals, 2)
    assert totals.tolist() == [195, 47, 1, 2] and stamps[..., SAMPLED].all()


@pytest.mark.parametrize("layers", [1, 5, 32])
def test_the_kernel_adds_as_the_reference_does(layers):
    generator = torch.Generator().manual_seed(layers)
    ours, theirs = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    for _ in range(6):
        stamps = torch.randint(1, 1 << 40, (layers + 1, 3, PLACES), generator=generator)
        stamps[..., END] *= torch.rand(layers + 1, 3, generator=generator) < 0.7
        stamps[..., SAMPLED] = 1
        stamps = stamps.to(DEVICE)
        same = stamps.clone()
        settlers()["kernel"](stamps, ROWS, ours, 3)
        settlers()["reference"](same, ROWS, theirs, 3)
        assert torch.equal(ours, theirs) and torch.equal(stamps, same)
    assert ours[reference.SAMPLED_STEPS] == 6


@pytest.mark.parametrize("sampled", [True, False])
def test_a_stamp_is_written_in_a_sampled_step_only(sampled):
    stamp = torch.tensor([int(sampled), 0, 0, 0])
    reference.write_stamp(stamp)
    assert (stamp[END] > 0) == sampled


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_freekv.kernels import attend, recall, stamps

NUMBERS = {
    "H": 8, "G": 4, "D": 128, "S": 32, "BLOCK_G": 16, "BLOCK_T": 64, "BLOCK_D": 128, "FOLLOWS": True, "UNITS": 1, "BLOCK_S": 32,
    "PREFETCH": True, "REST": False, "CODE": None,
}

def code(kernel, **more):
    numbers = NUMBERS | more
    constants = {p.name: numbers[p.name] for p in kernel.params if p.is_constexpr or p.name in more}
    kinds = {p.name: "i32" for p in kernel.params} | {"scale": "fp32"}
    for each in kinds:
        if each.startswith("p_"):
            wide = {"p_stamp": "*i64", "p_seq_lens": "*i64", "p_queries": "*bf16", "p_output": "*fp32", "p_weights": "*fp32"}
            halves = {} if kernel is recall._recall_kernel else {"p_keys": "*bf16", "p_values": "*bf16"}
            kinds[each] = (wide | halves).get(each, "*i32")
    signature = {p.name: kinds[p.name] for p in kernel.params} | dict.fromkeys(constants, "constexpr")
    return triton.compile(ASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32)).asm["ptx"]

def facts(name, ptx):
    found = re.findall(r"griddepcontrol.wait|globaltimer|(?:ld|st|atom|red)[a-z0-9.]*[.]global", ptx)
    print(name, found[0], ptx.count("globaltimer"), len(re.findall(r"[.]param [.]", ptx)))

for name, kernel, more in (("recall", recall._recall_kernel, {"D": 64, "BLOCK_D": 64}), ("attend", attend._attend_pages, {})):
    facts(name, code(kernel, **more))
    facts(name + "-off", code(kernel, p_stamp=None, **more))
facts("write", code(stamps._write_stamp))
"""


def test_what_is_timed_reads_the_clock_and_what_is_not_has_no_trace_of_it():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = {name: (first, int(clocks), int(parameters)) for name, first, clocks, parameters in map(str.split, done.stdout.splitlines())}
    assert [facts[name][1] for name in ("recall", "attend", "write")] == [2, 1, 1]
    for name in ("recall", "attend"):
        assert facts[f"{name}-off"][1] == 0 and facts[f"{name}-off"][2] == facts[name][2] - 1
        assert facts[name][0] == facts[f"{name}-off"][0] == "griddepcontrol.wait", "behind the wait for the kernel before"
