"""The rehearsal of a start: what is compiled, and which sizes of a server it is compiled for. No GPU is needed, and nothing is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REHEARSE = """
import json
import sys
from triton import knobs
from launches import engine_of, most_pages, pretend_to_have_a_gpu
from sglang_freekv.rehearsal import compile_all

pretend_to_have_a_gpu()

def kernels_of(batch, **sizes):
    found = set()

    def note(*, key, fn, **rest):
        found.add((fn.name.rpartition(".")[2], key))
        return True  # do not compile it

    engine, residency = engine_of(**sizes)
    knobs.runtime.jit_cache_hook = note
    try:
        compile_all(engine, residency, batch, most_pages(sizes["context"], engine))
    finally:
        knobs.runtime.jit_cache_hook = None
    return found

first, other = (kernels_of(**sizes) for sizes in json.loads(sys.argv[1]))
print(json.dumps([sorted(name for name, _ in first), sorted(name for name, _ in other - first)]))
"""

FIRST = {"context": 131_072, "batch": 32, "rows": 32, "pages": 64, "resident": 40}
OTHER = {"context": 40_000, "batch": 24, "rows": 25, "pages": 81, "resident": 0}
BEGIN = {
    "_note_kernel",
    "_lend_kernel",
    "_mark_kernel",
    "_begin_kernel",
    "_hand_kernel",
    "_forget_kernel",
    "_hold_kernel",
    "_snapshot_kernel",
}
STEP = {"_score_pages", "_append_kernel", "_needs_correction", "_recall_kernel", "_attend_pages", "_merge_shares"}
EXTEND = {
    "_stage_kernel",
    "_stage_layers_kernel",
    "_write_kernel",
    "_offload_kernel",
    "_digest_kernel",
    "_fill_kernel",
    "_fill_frames_kernel",
}
SELECTING = ["_plan_pages"] * 4 + ["_seed_slots"]  # they hold all candidates in registers, and know how many to select


@pytest.mark.parametrize(
    "settings, others, unlike, most",
    [
        ({}, {}, set(), 33),
        ({"canary": "full", "recall_timing": 100}, {"canary": "full", "recall_timing": 48},
         {"_checksum_kernel", "_verify_kernel", "_write_stamp", "_settle_stamps"}, 39),
        ({}, {"budget_tokens": 1536, "sink_tokens": 256, "window_tokens": 480}, set(), 33),
        ({"recall": "copy-engine"}, {"recall": "copy-engine"}, {"_recall_kernel"}, 31),
        ({"kv_dtype": "int8"}, {"kv_dtype": "int8"}, {"_rotate_kernel", "_decode_kernel", "_unrotate_kernel"}, 36),
        ({"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e4m3"}, {"_decode_kernel"}, 34),
    ],
    ids=["sizes", "canary and timing", "budget", "copy engine", "int8", "fp8"],
)  # fmt: skip
def test_a_start_of_other_sizes_compiles_only_what_selects_anew(settings, others, unlike, most):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(TESTS)}
    sizes = json.dumps([FIRST | {"settings": settings}, OTHER | {"settings": others}])
    done = subprocess.run([sys.executable, "-P", "-c", REHEARSE, sizes], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, new = json.loads(done.stdout.splitlines()[-1])
    assert set(first) == (BEGIN | STEP | EXTEND | set(SELECTING)) ^ unlike and len(first) <= most
    assert new == SELECTING
