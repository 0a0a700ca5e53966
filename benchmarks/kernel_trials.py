"""One trial for each kernel: its inputs, the check against its reference, and the launches to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import bench_recall
from kernel_inputs import DTYPE, Case, Inputs, check_plans, full_pages
from sglang_freekv import kernels
from sglang_freekv.digests import TwoBit
from sglang_freekv.kernels import Reads, reference

TAU = 0.9
STAGED_TOKENS = 32768
TIES = 0.01  # share of the kv heads, and one more, that may choose other pages than the reference: weights that all but tie


class Trial(NamedTuple):
    """A kernel that has passed its check.

    Args:
        launches: to be timed in rotation.
        num_bytes: that one launch moves; 0 where time is launch and latency.
        ceiling: field of ``Ceilings`` that bounds it.
        error: relative, or the share of choices that are the reference's.
        idle: launches that are not the kernel's.
    """

    launches: list[Callable[[], object]]
    num_bytes: int = 0
    ceiling: str = "device"
    error: float | None = None
    idle: int = 0


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _mostly(same: torch.Tensor) -> float:
    """The share of the kv heads ``same [B, H]`` that do what the reference does; raises AssertionError if it is too small."""
    others = int((~same).sum())
    assert others <= 1 + TIES * same.numel(), f"{others} of {same.numel()} kv heads choose other pages than the reference"
    return float(same.float().mean())


def per_layer(inputs: Inputs, launch: Callable) -> list[Callable[[], object]]:
    return [lambda layer=layer: launch(layer) for layer in inputs.layers]


def append_tokens(inputs: Inputs) -> Trial:
    def run(kernel, layer, keys, values):
        new = (layer.new_keys, layer.new_values)
        return kernel(*new, inputs.rows, inputs.seq_lens, inputs.page_table, layer.slot_pages, keys, values)

    layer = inputs.layers[0]
    got, expected = ([layer.keys.clone(), layer.values.clone()] for _ in range(2))
    got += run(kernels.append_tokens, layer, *got)
    expected += run(reference.append_tokens, layer, *expected)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(got, expected)), "not the reference's"
    return Trial(per_layer(inputs, lambda layer: run(kernels.append_tokens, layer, layer.keys, layer.values)))


def needs_correction(inputs: Inputs) -> Trial:
    case, layer = inputs.case, inputs.layers[0]

    def run(kernel, layer, previous, counts):
        return kernel(layer.queries, inputs.rows, previous, TAU, counts, case.kv_heads)

    got, expected = ((layer.previous.clone(), inputs.counts.clone()) for _ in range(2))
    flags, right = run(kernels.needs_correction, layer, *got), run(reference.needs_correction, layer, *expected)
    cosine = torch.cosine_similarity(layer.queries.float(), layer.previous[inputs.rows].float(), dim=-1)
    near = (cosine.unflatten(1, (case.kv_heads, -1)).mean(-1) - TAU).abs() < 1e-4
    assert torch.equal(flags | near, right | near) and torch.equal(got[0], expected[0]), "not the reference's"
    assert torch.equal(got[1][inputs.rows, kernels.CORRECTED], flags.sum(1)), "the counts are not those of the flags"
    num_bytes = 3 * layer.queries.nbytes
    return Trial(per_layer(inputs, lambda layer: run(kernels.needs_correction, layer, layer.previous, inputs.counts)), num_bytes)


def score_pages(inputs: Inputs) -> Trial:
    case, layer = inputs.case, inputs.layers[0]

    def run(kernel, layer):
        where = (inputs.rows, inputs.seq_lens, inputs.page_table)
        return kernel(layer.queries, layer.digests, *where, case.budget, case.page_size, case.head_dim**-0.5)

    got, expected = run(kernels.score_pages, layer), run(reference.score_pages, layer)
    read = _candidates(inputs)
    error = relative(got[read], expected[read])
    assert error < 1e-3, f"relative error {error:.2g}"
    num_bytes = _score_bytes(inputs, read, 2 * case.head_dim)
    return Trial(per_layer(inputs, lambda layer: run(kernels.score_pages, layer)), num_bytes, error=error)


def score_two_bit(inputs: Inputs) -> Trial:
    case, where = inputs.case, (inputs.rows, inputs.seq_lens, inputs.page_table, inputs.case.budget, inputs.case.page_size)
    units = inputs.layers[0].digests.shape[:2]
    digests = [inputs.draw(*units, *_two_bit(case).shape(case.head_dim, DTYPE.itemsize)) for _ in inputs.layers]  # any bits will do

    def run(kernel, layer, digests):
        return kernel(layer.queries, digests, *where, case.head_dim**-0.5)

    got, expected = (run(kernel, inputs.layers[0], digests[0]) for kernel in (kernels.score_two_bit, reference.score_two_bit))
    read = _candidates(inputs)
    error = relative(got[read], expected[read])
    assert error < 1e-2, f"relative error {error:.2g}"  # keys are made in the dtype
    num_bytes = _score_bytes(inputs, read, digests[0].shape[2])
    return Trial([lambda args=args: run(kernels.score_two_bit, *args) for args in zip(inputs.layers, digests)], num_bytes, error=error)


def digest_two_bit(inputs: Inputs) -> Trial:
    case, pages = inputs.case, full_pages(inputs, chunk=True)
    shape = (*inputs.layers[0].digests.shape[:2], *_two_bit(case).shape(case.head_dim, DTYPE.itemsize))
    got, expected = (torch.zeros(shape, dtype=DTYPE, device=inputs.device) for _ in range(2))
    for module, digests in ((kernels, got), (reference, expected)):
        module.digest_two_bit(pages[0].keys, pages[0].starts, pages[0].host_pages, digests, case.page_size)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), "not the reference's"
    units = len(pages[0].host_pages) * case.kv_heads
    launches = [lambda p=p: kernels.digest_two_bit(p.keys, p.starts, p.host_pages, got, case.page_size) for p in pages]
    return Trial(launches, units * (case.unit_bytes // 2 + shape[2] * DTYPE.itemsize))


def _two_bit(case: Case) -> TwoBit:
    return TwoBit(case.budget, case.page_size)


def _candidates(inputs: Inputs) -> torch.Tensor:
    """``[B, Hq, P]`` bool: logits that a score writes."""
    case = inputs.case
    pages = torch.arange(inputs.num_pages, device=inputs.device)
    end = (inputs.seq_lens + case.page_size) // case.page_size - case.budget.window
    return ((pages >= case.budget.sink) & (pages < end[:, None]))[:, None].expand(-1, case.query_heads, -1)


def _score_bytes(inputs: Inputs, read: torch.Tensor, elements: int) -> int:
    """Digests of so many elements read and logits written, of the candidates ``read [B, Hq, P]``."""
    case = inputs.case
    units = int(read.sum()) // (case.query_heads // case.kv_heads)
    return units * elements * DTYPE.itemsize + int(read.sum()) * 4


def plan_pages(inputs: Inputs, early: bool = True) -> Trial:
    """The plan before the attention. Not ``early``: of what turned alone."""
    case = inputs.case
    same = min(_mostly(check_plans(inputs, layer, layer.logits[1], kernels, early)) for layer in inputs.layers[:2])
    reads = Reads.allocate(case.batch, case.kv_heads, case.budget.total, inputs.device)

    def run(layer, which):
        where = (inputs.rows, inputs.seq_lens, inputs.page_table, case.budget, layer.turned, early, layer.slot_pages, layer.attended)
        kernels.plan_pages(layer.logits[which], *where, reads, inputs.corrected, inputs.ahead, inputs.counts, case.page_size)

    launches = [lambda layer=layer, which=which: run(layer, which) for which in (1, 0) for layer in inputs.layers]
    planned = case.batch * case.kv_heads if early else int(sum(layer.turned.sum() for layer in inputs.layers)) / len(inputs.layers)
    return Trial(launches, _plan_bytes(inputs, planned), error=same)


def plan_rest(inputs: Inputs, early: bool = True) -> Trial:
    """The plan behind the attention. Early there is little left of it."""
    case = inputs.case
    same = min(_mostly(check_plans(inputs, layer, layer.logits[1], kernels, early)) for layer in inputs.layers[:2])
    begins = (inputs.seq_lens % case.page_size == 0)[:, None]

    def run(layer, which):
        where = (inputs.rows, inputs.seq_lens, inputs.page_table, case.budget, layer.turned, early, layer.slot_pages, layer.attended)
        kernels.plan_rest(layer.logits[which], *where, inputs.ahead, inputs.counts, case.page_size)

    launches = [lambda layer=layer, which=which: run(layer, which) for which in (1, 0) for layer in inputs.layers]
    planned = sum(int((layer.turned & begins if early else ~layer.turned | begins).sum()) for layer in inputs.layers) / len(inputs.layers)
    return Trial(launches, _plan_bytes(inputs, planned), error=same)


def _plan_bytes(inputs: Inputs, planned: float) -> int:
    """Logits that ``planned`` kv heads read; the lists that a plan fills are empty before."""
    for misses in (inputs.corrected, inputs.ahead):
        misses.clear()
    return int(planned * inputs.case.query_heads / inputs.case.kv_heads * inputs.num_pages * 4)


def attend_pages(inputs: Inputs, in_two: bool) -> Trial:
    """At once, or in two calls, where of those kv heads that turned a share of the list is not there at first."""
    case, scale = inputs.case, inputs.case.head_dim**-0.5

    def run(kernel, layer, queries, keys, values):
        if not in_two:
            return kernel(queries, keys, values, inputs.seq_lens, layer.reads._replace(present=None), scale)
        arguments = queries, keys, values, inputs.seq_lens, layer.reads, scale
        return kernel(*arguments, kernel(*arguments))

    layer = inputs.layers[0]
    exact = run(reference.attend_pages, layer, layer.queries.float(), layer.keys.float(), layer.values.float())
    low, got = (run(module.attend_pages, layer, layer.queries, layer.keys, layer.values) for module in (reference, kernels))
    error, allowed = relative(got, exact), 2 * relative(low, exact) + 1e-3
    assert error < allowed, f"relative error {error:.2g}, of PyTorch in bfloat16 {relative(low, exact):.2g}"
    num_bytes = case.batch * case.kv_heads * case.budget.total * case.unit_bytes
    launches = per_layer(inputs, lambda layer: run(kernels.attend_pages, layer, layer.queries, layer.keys, layer.values))
    return Trial(launches, num_bytes, error=error)


def digest_pages(inputs: Inputs, chunk: bool) -> Trial:
    case, pages = inputs.case, full_pages(inputs, chunk)
    got, expected = (inputs.layers[0].digests.clone() for _ in range(2))
    for module, digests in ((kernels, got), (reference, expected)):
        module.digest_pages(pages[0].keys, pages[0].starts, pages[0].host_pages, digests, case.page_size)
    assert torch.equal(got, expected), "not the reference's"
    launches = [
        lambda p=p, layer=layer: kernels.digest_pages(p.keys, p.starts, p.host_pages, layer.digests, case.page_size)
        for p, layer in zip(pages, inputs.layers)
    ]
    units = len(pages[0].host_pages) * case.kv_heads
    return Trial(launches, units * (case.unit_bytes // 2 + 2 * case.head_dim * 2))


def offload_pages(inputs: Inputs, chunk: bool) -> Trial:
    case, pages = inputs.case, full_pages(inputs, chunk)
    written, untouched = pages[0].host_pages.cpu(), torch.tensor([0])
    before = inputs.host[untouched].clone()
    expected = torch.empty(int(written.max()) + 1, *inputs.host.shape[1:], dtype=inputs.host.dtype)
    reference.offload_pages(*pages[0], expected)
    kernels.offload_pages(*pages[0], inputs.host)
    if inputs.device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(inputs.host[written].view(torch.int16), expected[written].view(torch.int16)), "not the reference's"
    assert torch.equal(inputs.host[untouched].view(torch.int16), before.view(torch.int16)), "page 0 was written"
    num_bytes = len(written) * case.kv_heads * case.unit_bytes
    return Trial([lambda p=p: kernels.offload_pages(*p, inputs.host) for p in pages], num_bytes, "to_host")


def recall_pages(inputs: Inputs) -> Trial:
    """One layer's misses of a step of the whole batch."""
    case = inputs.case
    units = case.batch * case.kv_heads * case.new_pages
    size = max(4 * units, 4096 if inputs.device == "cuda" else 64) * case.unit_bytes // 2
    memory = torch.empty(size, dtype=torch.bfloat16, device=inputs.device)
    pools = bench_recall.Pools(case.page_size, "hnd", inputs.host_memory, memory, units, case.kv_heads)
    pools.check(kernels.recall_pages)
    lists = 32 if inputs.device == "cuda" else 2
    lengths, full = pools.full(lists), pools.full(lists)
    launches = [
        lambda i=i: kernels.recall_pages(pools.host, pools.misses(lengths[i]), pools.keys, pools.values) for i in range(lists)
    ]
    return Trial([lambda: lengths.copy_(full), *launches], units * pools.unit_bytes, "to_device", idle=1)


def stage_pages(inputs: Inputs) -> Trial:
    case, device = inputs.case, inputs.device
    count = min(STAGED_TOKENS // case.page_size, len(inputs.host) // 2)
    got, expected = (
        [torch.zeros(count * case.page_size, case.kv_heads, case.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for _ in range(2)
    )
    lists = [torch.randperm(len(inputs.host), device=device)[:count] for _ in range(4)]
    starts = torch.randperm(count, device=device) * case.page_size
    kernels.stage_pages(inputs.host, lists[0], starts, *got)
    reference.stage_pages(inputs.host, lists[0], starts, *expected)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, expected)), "not the reference's"
    num_bytes = count * case.kv_heads * case.unit_bytes
    return Trial([lambda p=p: kernels.stage_pages(inputs.host, p, starts, *got) for p in lists], num_bytes, "to_device")


def fill_pages(inputs: Inputs) -> Trial:
    """The slots of as many requests as an extend batch of 128K tokens of context has."""
    case, device = inputs.case, inputs.device
    rows = inputs.rows[: max(1, min(case.batch, 131072 // case.context))]
    tokens = case.context // case.page_size * case.page_size
    seq_lens = torch.full((len(rows),), tokens, device=device)
    starts = torch.arange(len(rows), device=device) * tokens
    source = [inputs.draw(len(rows) * tokens, case.kv_heads, case.head_dim) for _ in range(2)]
    slot_pages = torch.full((inputs.num_rows, case.kv_heads, case.capacity), -1, dtype=torch.int32, device=device)
    for row in rows:
        for head in range(case.kv_heads):
            slot_pages[row, head] = torch.randperm(tokens // case.page_size, device=device)[: case.capacity].to(torch.int32)
    layer = inputs.layers[0]
    got, expected = ([layer.keys.clone(), layer.values.clone()] for _ in range(2))
    kernels.fill_pages(*source, starts, rows, seq_lens, slot_pages, *got)
    reference.fill_pages(*source, starts, rows, seq_lens, slot_pages, *expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected)), "not the reference's"
    num_bytes = 2 * len(rows) * case.kv_heads * case.capacity * case.unit_bytes
    launches = per_layer(inputs, lambda layer: kernels.fill_pages(*source, starts, rows, seq_lens, slot_pages, layer.keys, layer.values))
    return Trial(launches, num_bytes)


def seed_slots(inputs: Inputs) -> Trial:
    case, layer = inputs.case, inputs.layers[0]

    def run(kernel, layer, *tables):
        kernel(layer.logits[0], inputs.rows, inputs.seq_lens, case.budget, *tables, case.page_size)

    got, expected = ([layer.slot_pages.clone(), layer.attended.clone()] for _ in range(2))
    run(kernels.seed_slots, layer, *got)
    run(reference.seed_slots, layer, *expected)
    same = _mostly(torch.cat([a == b for a, b in zip(got, expected)], -1)[inputs.rows].all(-1))
    num_bytes = case.batch * case.query_heads * inputs.num_pages * 4
    launches = per_layer(inputs, lambda layer: run(kernels.seed_slots, layer, layer.slot_pages, layer.attended))
    return Trial(launches, num_bytes, error=same)


def snapshot_pages(inputs: Inputs) -> Trial:
    case, device = inputs.case, inputs.device
    width = inputs.num_pages * case.page_size
    slots = torch.randint(1 << 20, (inputs.num_rows, width), dtype=torch.int32, device=device)
    got, expected = (torch.empty_like(inputs.page_table) for _ in range(2))
    for module, target in ((kernels, got), (reference, expected)):
        module.snapshot_pages(slots, inputs.rows, inputs.seq_lens, target, case.page_size)
    assert torch.equal(got, expected), "not the reference's"
    return Trial([lambda: kernels.snapshot_pages(slots, inputs.rows, inputs.seq_lens, got, case.page_size)])


KERNELS: dict[str, Callable[[Inputs], Trial]] = {
    "append_tokens": append_tokens,
    "needs_correction": needs_correction,
    "score_pages": score_pages,
    "score_two_bit": score_two_bit,
    "plan_pages": plan_pages,
    "plan_pages-late": lambda inputs: plan_pages(inputs, early=False),
    "plan_rest": plan_rest,
    "plan_rest-late": lambda inputs: plan_rest(inputs, early=False),
    "attend_pages": lambda inputs: attend_pages(inputs, in_two=False),
    "attend_pages-in-two": lambda inputs: attend_pages(inputs, in_two=True),
    "recall_pages": recall_pages,
    "digest_pages-decode": lambda inputs: digest_pages(inputs, chunk=False),
    "digest_pages-chunk": lambda inputs: digest_pages(inputs, chunk=True),
    "digest_two_bit-chunk": digest_two_bit,
    "offload_pages-decode": lambda inputs: offload_pages(inputs, chunk=False),
    "offload_pages-chunk": lambda inputs: offload_pages(inputs, chunk=True),
    "stage_pages": stage_pages,
    "fill_pages": fill_pages,
    "seed_slots": seed_slots,
    "snapshot_pages": snapshot_pages,
}
