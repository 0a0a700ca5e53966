"""No thread overwrites what another has yet to read, or reads what another has yet to write, in any kernel as a GPU runs it.

Triton may give a read and a write of the same elements different threads, and no barrier stands between unless a kernel has one
(``tl.debug_barrier``). Its interpreter runs one thread, so the kernels are compiled here for a GPU that is not there, and their TTGIR is
searched for a read and a write of one argument's memory, in either order, with a path between them that has no such barrier. Barriers of
reductions and of changes of layout do not count, nor does it help that both use the same addresses: if a tensor is smaller than the threads,
several of them read an element and one writes it.

Every thread reads a scalar, one thread writes it, and it may run ahead of the others. So a scalar that is read and written is a hazard,
unless the value only becomes a part of scalars that are written (a counter), or both are elements with different constant numbers.

Programs of one launch are not compared with each other, nor are two writes.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from hazards import BARRIERS, Hazard, hazards
from ttgir import Program

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
SIZES = {"context": 131_072, "rows": 16, "pages": 64, "resident": 40}
# The default server, on turn; one with learned sinks, whose rows have 256 slots, more than a program has threads; one with large pages;
# three with coded KV; and one whose query heads share a kv head.
SERVERS = (
    {"batch": 16, "settings": {"selection": "on-turn", "canary": "full", "recall_timing": 100}},
    {
        "batch": 3,
        "learned_sinks": True,
        "settings": {"page_size": 8, "digest": "two-bit", "hysteresis": 1.4, "selection": "on-turn", "canary": "sample"},
    },
    {"batch": 3, "settings": {"page_size": 256, "digest": "two-bit", "pooling": "max", "dense_below_tokens": 8192}},
    {"batch": 3, "settings": {"page_size": 8, "digest": "two-bit", "kv_dtype": "int8", "canary": "full"}},
    {"batch": 16, "settings": {"kv_dtype": "int8"}},
    {"batch": 3, "settings": {"page_size": 8, "digest": "two-bit", "kv_dtype": "fp8_e4m3"}},
    {"batch": 3, "kv_heads": 1, "settings": {}},
)

ROWS = "no row is in a launch twice"
UNCHANGED = "there is a barrier in each round of the loop, and without a round the number is written as it was read"
NOTES = "weights, marks, chosen pages and missing pages lie one behind the other"
SAME = "what is written is true where what was read is"
READ_COUNT, WRITE_COUNT = "count = tl.load(p_free_count)", "tl.store(p_free_count, count)"
READ_CHOSEN = "b_wanted = tl.load(p_chosen + o_q - SIZES.SINK, mask=m_chosen, other=0)"
READ_WEIGHTS = "b_weight = tl.load(p_scratch + o_p, mask=m_candidate, other=EXCLUDED)"
READ_MARKS = "m_held = tl.load(p_marks + o_p, mask=o_p < end, other=0) > 0"
WRITE_HELD = "tl.store(p_marks + P + num_chosen + tl.cumsum(m_held.to(tl.int32), 0) - 1, o_p, mask=m_held)"
WRITE_CHOSEN = "tl.store(p_marks + P + b_rank, o_p, mask=m_chosen)"
CLEAR_MARKS, WRITE_MARKS = (
    "tl.store(p_marks + o_p, 0, mask=m_candidate)",
    "tl.store(p_marks + o_p, m_chosen.to(tl.int32), mask=m_candidate)",
)
READ_HELD = "m_chosen = tl.load(p_marks + o_p, mask=m_candidate, other=0) > 0"
READ_WEIGHT = "b_weight = tl.load(p_scratch + b_page, mask=m_candidate, other=LIGHTEST)"
READ_MARK, KEEP = "b_mark = tl.load(p_scratch + P + b_page, mask=m_page, other=0)", "tl.store(p_scratch + P + b_page, 2, mask=m_kept)"
READ_KEPT = "m_missing = m_wanted & ~m_resident & (tl.load(p_marks + b_wanted, mask=m_wanted, other=2) < 2)"
WRITE_MISSING = "tl.store(p_missing + num_missing + (b_ranks >> 16) - 1, b_wanted, mask=m_missing)"
READ_HAND = "m_wants = m_full & (tl.load(p_in_hand + b_row, mask=m_full, other=0) < 0)"
WRITE_HAND = "tl.store(p_in_hand + b_row, b_frame, mask=m_served)"
TURNS = f"{ROWS}, and the second turn is of other rows than the first"

NO_HAZARD = {  # kernel, argument, the lines in their order: why different threads never touch the same element there
    ("_note_kernel", "p_in_hand", "tl.store(p_in_hand + b_row, -1, mask=b_row > 0)",
     "b_hand = tl.load(p_in_hand + b_row, mask=b_row > 0, other=-1)"): ROWS,
    ("_note_kernel", "p_row_frames", "tl.store(p_slots, WHOLE, mask=o_c < C)", "b_slot = tl.load(p_slots, mask=o_c < C, other=-1)"): ROWS,
    ("_note_kernel", "p_row_frames", "tl.store(p_row_frames + b_row * C, ASKED, mask=b_first == WHOLE)",
     "b_first = tl.load(p_row_frames + b_row * C, mask=b_row > 0, other=0)"): ROWS,
    ("_lend_kernel", "p_row_frames", "tl.store(p_slots + o_c, b_frame, mask=m_served)", "asked = tl.load(p_slots) == ASKED"): ROWS,
    ("_lend_kernel", "p_free_count", "count, stranded = tl.load(p_free_count), 0", WRITE_COUNT): UNCHANGED,
    ("_begin_kernel", "p_frame_of", "tl.store(p_frame_of + b_page, b_hand, mask=m_taken | m_stale)  # nothing in hand of a stale page",
     "b_frame = tl.load(p_frame_of + b_page, mask=m_begins, other=-1)"): "a page that begins is one row's alone",
    ("_begin_kernel", "p_in_hand", "tl.store(p_in_hand + b_row, -1, mask=m_taken)",
     "b_hand = tl.load(p_in_hand + b_row, mask=m_begins, other=-1)"): ROWS,
    ("_begin_kernel", "p_in_hand", WRITE_HAND, READ_HAND): TURNS,
    ("_hand_kernel", "p_in_hand", WRITE_HAND, READ_HAND): TURNS,
    ("_hand_kernel", "p_free_count", "count, hands = tl.load(p_free_count), (p_page_of, p_in_hand, p_row_frames, p_free)", WRITE_COUNT):
        UNCHANGED,
    ("_hold_kernel", "p_free_count", READ_COUNT, WRITE_COUNT): UNCHANGED,
    ("_forget_kernel", "p_free_count", READ_COUNT, WRITE_COUNT): UNCHANGED,
    ("_plan_pages", "p_notes", READ_WEIGHTS, CLEAR_MARKS): NOTES,
    ("_plan_pages", "p_notes", READ_WEIGHTS, WRITE_MARKS): NOTES,
    ("_plan_pages", "p_notes", READ_WEIGHTS, WRITE_CHOSEN): NOTES,
    ("_plan_pages", "p_notes", READ_MARKS, WRITE_HELD): NOTES,
    ("_plan_pages", "p_notes", WRITE_HELD, READ_MARKS): NOTES,
    ("_plan_pages", "p_notes", READ_HELD, WRITE_MARKS): SAME,
    ("_plan_pages", "p_notes", READ_HELD, WRITE_CHOSEN): NOTES,
    ("_plan_pages", "p_notes", READ_WEIGHT, KEEP): NOTES,
    ("_plan_pages", "p_notes", READ_MARK, KEEP): SAME,
    ("_preselect", "p_notes", READ_WEIGHTS, "tl.store(p_scratch + P + o_p, 0, mask=m_candidate)"): NOTES,
    ("_preselect", "p_notes", READ_WEIGHTS, "tl.store(p_weights + o_p, ordered(b_weight), mask=o_p < end)"):
        "the weights that are written next are another part's",
    ("_plan_pages", "p_notes", READ_CHOSEN, WRITE_MISSING): NOTES,
    ("_plan_pages", "p_notes", READ_KEPT, WRITE_MISSING): NOTES,
    ("_plan_pages", "p_notes", WRITE_MISSING, READ_CHOSEN): NOTES,
    ("_plan_pages", "p_notes", WRITE_MISSING, READ_KEPT): NOTES,
}  # fmt: skip


@pytest.fixture(scope="module")
def launches() -> list[tuple[str, str, list[set[str]]]]:
    """Kernel, TTGIR and arguments that share memory, of every kernel of ``SERVERS``. One process compiles all, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", ROOT / "tests" / "launches.py", json.dumps([SIZES | server for server in SERVERS])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(kernel, ttgir, list(map(set, same))) for kernel, ttgir, same in json.loads(done.stdout)]


def line_at(place: str) -> str:
    file, _, line = place.partition(":")
    return linecache.getline(str(KERNELS / file), int(line)).strip()


def lines_of(kernel: str, hazard: Hazard) -> tuple[str, str, str, str]:
    """The row of ``NO_HAZARD`` that would excuse it."""
    return kernel, hazard.argument, line_at(hazard.first[1]), line_at(hazard.second[1])


def without_barriers(ttgir: str) -> Program:
    return Program("\n".join(line for line in ttgir.splitlines() if not line.strip().startswith(BARRIERS)))


def jitted() -> Iterator[tuple[str, ast.FunctionDef]]:
    """File and function of Triton, of all in ``kernels``."""
    for file in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list):
                yield file.name, node


def test_every_kernel_is_compiled(launches):
    """A function of Triton that no other one calls is launched from Python."""
    called = {inner.id for _, function in jitted() for inner in ast.walk(function) if isinstance(inner, ast.Name)}
    assert {kernel for kernel, _, _ in launches} == {function.name for _, function in jitted()} - called


def test_every_read_and_write_is_compiled(launches):
    """Also those of a path that only some settings take. Of equal ones in a file Triton may keep one."""
    compiled = {operation.place for _, ttgir, _ in launches for operation in Program(ttgir).operations}
    found = defaultdict(set)
    for file, function in jitted():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and re.fullmatch("tl.(load|store|atomic_.*)", ast.unparse(node.func)):
                found[file, ast.unparse(node)] |= {f"{file}:{line}" for line in range(node.lineno, node.end_lineno + 1)}
    absent = [access for access, places in found.items() if not places & compiled]
    assert not absent, "\n".join(["expected these in TTGIR; add a setting to SERVERS that leads there", *map(str, absent)])


def test_a_barrier_stands_between_reads_and_writes(launches):
    found = {lines_of(kernel, hazard): hazard for kernel, ttgir, same in launches for hazard in hazards(Program(ttgir), same)}
    new = [f"{key[0]}: {found[key]}" for key in found.keys() - NO_HAZARD]
    assert not new, "\n".join(["expected a tl.debug_barrier() between, or a row of NO_HAZARD that says why it needs none", *sorted(new)])
    stale = NO_HAZARD.keys() - found
    assert not stale, "\n".join(["these rows of NO_HAZARD excuse nothing any more; remove them", *map(str, stale)])


@pytest.mark.parametrize("kernel, arguments", {
    "_note_kernel": {"p_in_hand", "p_row_frames", "p_free_count"},
    "_lend_kernel": {"p_row_frames"},
    "_begin_kernel": {"p_frame_of", "p_in_hand", "p_free", "p_free_count"},
    "_hand_kernel": {"p_in_hand"},
    "_hold_kernel": {"p_frame_of"},
    "_forget_kernel": {"p_frame_of"},
    "_needs_correction": {"p_previous"},
    "_plan_pages": {"p_notes", "p_attended", "p_slot_pages", "p_read_pages"},
    "_preselect": {"p_notes"},
    "_recall_kernel": {"p_length"},
    "_settle_stamps": {"p_stamps", "p_totals"},
}.items())  # fmt: skip
def test_kernels_without_their_barriers_have_hazards(launches, kernel, arguments):
    found = set()
    for name, ttgir, same in launches:
        if name == kernel:
            bare = hazards(without_barriers(ttgir), same)
            found |= {hazard.argument for hazard in bare if lines_of(kernel, hazard) not in NO_HAZARD}
    assert arguments <= found


def test_slots_that_are_taken_back_are_read_behind_a_barrier(launches):
    """Without it an H100 lost frames of rows with 256 slots."""
    read, write = "b_slot = tl.load(p_slots, mask=o_c < C, other=-1)", "tl.store(p_slots, WHOLE, mask=o_c < C)"
    lost = "_note_kernel", "p_row_frames", read, write
    for kernel, ttgir, same in launches:
        if kernel == "_note_kernel":
            assert lost in {lines_of(kernel, hazard) for hazard in hazards(without_barriers(ttgir), same)}
            assert lost not in {lines_of(kernel, hazard) for hazard in hazards(Program(ttgir), same)}


POINTERS = "tensor<256x!tt.ptr<i32>, #blocked>"
SPLAT = f"tt.splat %p : !tt.ptr<i32> -> {POINTERS}"
READ, WRITE, BARRIER = f"%r = tt.load %a : {POINTERS}", f"tt.store %a, %x : {POINTERS}", "ttg.barrier all"
LOOP, WHILE = "scf.for %i = %n to %n step %n  : i32 {", "scf.while (%w = %n) : (i32) -> i32 {"
COUNT, ONE = "%s = tt.load %p : !tt.ptr<i32>", "%one = arith.constant 1 : i32"
ADDED, STORED = "%t = arith.addi %s, %one : i32", "tt.store %p, %t : !tt.ptr<i32>"
SPREAD = "%y = tt.splat %s : i32 -> tensor<256xi32, #blocked>"
NEXT = "%q1 = tt.addptr %p, %one : !tt.ptr<i32>, i32"
OVERWRITTEN, EARLY = ("reads", "writes"), ("writes", "reads")


@pytest.mark.parametrize("lines, expected", [
    ([READ, WRITE], {OVERWRITTEN}),
    ([WRITE, READ], {EARLY}),
    ([READ, BARRIER, WRITE], set()),
    ([READ, f"tt.store %b, %x : {POINTERS}"], set()),
    ([READ, "%y, %z = tt.split %r : A -> B", f"tt.store %b, %z : {POINTERS}"], set()),
    (["%y, %z = tt.split %x : A -> B", READ, f"tt.store %a, %z : {POINTERS}"], {OVERWRITTEN}),
    ([LOOP, READ, BARRIER, WRITE, "}"], {EARLY}),
    ([LOOP, READ, BARRIER, WRITE, BARRIER, "}"], set()),
    ([READ, LOOP, BARRIER, "}", WRITE], {OVERWRITTEN}),
    ([READ, "scf.if %c {", BARRIER, "}", WRITE], {OVERWRITTEN}),
    ([READ, "scf.if %c {", BARRIER, "} else {", "}", WRITE], {OVERWRITTEN}),
    ([READ, "scf.if %c {", BARRIER, "} else {", BARRIER, "}", WRITE], set()),
    (["scf.if %c {", READ, "} else {", WRITE, "}"], set()),
    (["%z = " + WHILE, READ, "scf.condition(%c) %w : i32", "} do {", "^bb0(%u: i32):", WRITE, BARRIER, "scf.yield %u : i32", "}"],
     {OVERWRITTEN}),
    (["%z = " + WHILE, BARRIER, READ, "scf.condition(%c) %w : i32", "} do {", "^bb0(%u: i32):", "scf.yield %u : i32", "}", WRITE],
     {OVERWRITTEN}),
    ([READ, "cf.cond_br %c, ^bb1, ^bb2", "^bb1:  // pred: ^bb0", "tt.return", "^bb2:  // pred: ^bb0", BARRIER, WRITE], set()),
    ([READ, "cf.cond_br %c, ^bb1, ^bb2", "^bb1:  // pred: ^bb0", BARRIER, "tt.return", "^bb2:  // pred: ^bb0", WRITE], {OVERWRITTEN}),
    ([READ, f"%d = arith.select %c, %b, %a : {POINTERS}", f"tt.store %d, %x : {POINTERS}"], {OVERWRITTEN}),
    ([READ, f"%d = scf.if %c -> ({POINTERS}) {{", f"scf.yield %a : {POINTERS}", "} else {", f"scf.yield %b : {POINTERS}", "}",
      f"tt.store %d, %x : {POINTERS}"], {OVERWRITTEN}),
    ([READ, "%d:2 = scf.for %i = %n to %n step %n iter_args(%e = %b, %f = %a) -> (A, A)  : i32 {", f"scf.yield %f, %e : {POINTERS}", "}",
      f"tt.store %d#0, %x : {POINTERS}"], {OVERWRITTEN}),
    ([f"%r = ttg.async_copy_global_to_local %a, %m : {POINTERS} -> M", BARRIER, WRITE], {OVERWRITTEN}),
    ([COUNT, ONE, ADDED, SPREAD, STORED], {OVERWRITTEN}),
    ([COUNT, ONE, ADDED, STORED], set()),
    ([COUNT, ONE, ADDED, WRITE], {OVERWRITTEN}),
    ([COUNT, SPREAD, ONE, NEXT, "tt.store %q1, %n : !tt.ptr<i32>"], set()),
    ([COUNT, SPREAD, "%q1 = tt.addptr %p, %n : !tt.ptr<i32>, i32", "tt.store %q1, %n : !tt.ptr<i32>"], {OVERWRITTEN}),
    (["%o = tt.atomic_rmw add, relaxed, gpu, %p, %n, %c : (!tt.ptr<i32>, i32, i1) -> i32", COUNT, "scf.if %s {", "}"], {EARLY}),
])  # fmt: skip
def test_hazards_are_paths_without_a_barrier(lines, expected):
    arguments = "%p: !tt.ptr<i32>, %q: !tt.ptr<i32>, %n: i32, %c: i1, %x: T, %m: M"
    first = [f"tt.func public @k({arguments}) {{", f"%a = {SPLAT}", f"%b = {SPLAT.replace('%p', '%q')}"]
    found = hazards(Program("\n".join([*first, *lines, "tt.return", "}"])))
    assert {(hazard.first[0], hazard.second[0]) for hazard in found} == expected and {hazard.argument for hazard in found} <= {"p"}


def test_arguments_that_share_memory_are_one():
    text = "\n".join(
        ["tt.func @k(%p: !tt.ptr<i32>, %q: !tt.ptr<i32>, %n: i32) {", COUNT, "scf.if %s {", "}", "tt.store %q, %n : !tt.ptr<i32>"]
    )
    assert not hazards(Program(text)) and hazards(Program(text), [{"n", "q"}, {"n", "p"}])


def test_an_operation_that_is_not_known_is_refused():
    text = "tt.func @k(%p: !tt.ptr<i32>) {\n%d = tt.descriptor_load %p : !tt.ptr<i32>"
    with pytest.raises(ValueError, match="tt.descriptor_load .* teach tests/hazards.py"):
        hazards(Program(text))
