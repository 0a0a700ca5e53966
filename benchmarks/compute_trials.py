"""Trials of the kernels that decide what a step attends to, and of attention."""

from __future__ import annotations

import torch

from benchmarks.kernel_inputs import CHUNK_TOKENS, DTYPE, Inputs, check_plans
from benchmarks.trial import Trial, per_layer, relative
from sglang_freekv import kernels
from sglang_freekv.digests import TwoBit
from sglang_freekv.kernels import Heads, Reads, Tables, reference

TAU = 0.9
TIES = 0.01  # share of the kv heads, and one more, that may choose other pages than the reference: weights that all but tie


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
        return kernel(layer.queries, layer.digests, *where, case.budget, case.page_size, scale=case.head_dim**-0.5)

    got, expected = run(kernels.score_pages, layer), run(reference.score_pages, layer)
    read = _candidates(inputs)
    error = relative(got[read], expected[read])
    assert error < 1e-3, f"relative error {error:.2g}"
    num_bytes = _score_bytes(inputs, read, 2 * case.head_dim)
    return Trial(per_layer(inputs, lambda layer: run(kernels.score_pages, layer)), num_bytes, error=error)


def score_two_bit(inputs: Inputs) -> Trial:
    case, where = inputs.case, (inputs.rows, inputs.seq_lens, inputs.page_table, inputs.case.budget, inputs.case.page_size)
    units = inputs.layers[0].digests.shape[:2]
    digests = [
        inputs.draw(*units, *TwoBit(case.budget, case.page_size).shape(case.head_dim, DTYPE.itemsize)) for _ in inputs.layers
    ]  # any bits will do

    def run(kernel, layer, digests):
        return kernel(layer.queries, digests, *where, scale=case.head_dim**-0.5)

    got, expected = (run(kernel, inputs.layers[0], digests[0]) for kernel in (kernels.score_two_bit, reference.score_two_bit))
    read = _candidates(inputs)
    error = relative(got[read], expected[read])
    assert error < 1e-2, f"relative error {error:.2g}"  # keys are made in the dtype
    num_bytes = _score_bytes(inputs, read, digests[0].shape[2])
    return Trial([lambda args=args: run(kernels.score_two_bit, *args) for args in zip(inputs.layers, digests)], num_bytes, error=error)


def plan_pages(inputs: Inputs, ahead_first: bool = True) -> Trial:
    """The plan before attention. Without ``ahead_first`` it selects for corrected kv heads alone."""
    case = inputs.case
    same = min(_mostly(check_plans(inputs, layer, layer.logits[1], kernels, ahead_first)) for layer in inputs.layers[:2])
    reads = Reads.allocate(case.batch, case.kv_heads, case.budget.total, inputs.device)
    lost = torch.zeros(case.batch, case.kv_heads, dtype=torch.bool, device=inputs.device)

    def run(layer, which):
        where = inputs.candidates(layer.logits[which]), Heads(layer.corrected, lost), layer.tables
        misses = inputs.misses_now, inputs.misses_ahead
        kernels.plan_pages(*where, reads, *misses, inputs.counts, ahead_first=ahead_first)

    launches = [lambda layer=layer, which=which: run(layer, which) for which in (1, 0) for layer in inputs.layers]
    planned = case.batch * case.kv_heads if ahead_first else int(sum(layer.corrected.sum() for layer in inputs.layers)) / len(inputs.layers)
    return Trial(launches, _plan_bytes(inputs, planned), error=same)


def plan_rest(inputs: Inputs, ahead_first: bool = True) -> Trial:
    """The plan behind attention. With ``ahead_first`` it has little left to do."""
    case = inputs.case
    same = min(_mostly(check_plans(inputs, layer, layer.logits[1], kernels, ahead_first)) for layer in inputs.layers[:2])
    begins = (inputs.seq_lens % case.page_size == 0)[:, None]
    lost = torch.zeros(case.batch, case.kv_heads, dtype=torch.bool, device=inputs.device)

    def run(layer, which):
        where = inputs.candidates(layer.logits[which]), Heads(layer.corrected, lost), layer.tables
        kernels.plan_rest(*where, inputs.misses_ahead, inputs.counts, ahead_first=ahead_first)

    launches = [lambda layer=layer, which=which: run(layer, which) for which in (1, 0) for layer in inputs.layers]
    planned = sum(int((layer.corrected & begins if ahead_first else ~layer.corrected | begins).sum()) for layer in inputs.layers) / len(
        inputs.layers
    )
    return Trial(launches, _plan_bytes(inputs, planned), error=same)


def seed_slots(inputs: Inputs) -> Trial:
    case, layer = inputs.case, inputs.layers[0]

    def run(kernel, layer, tables):
        kernel(inputs.candidates(layer.logits[0]), tables)

    got, expected = (Tables(*(table.clone() for table in layer.tables)) for _ in range(2))
    run(kernels.seed_slots, layer, got)
    run(reference.seed_slots, layer, expected)
    same = _mostly(torch.cat([a == b for a, b in zip(got[:2], expected[:2])], -1)[inputs.rows].all(-1))
    num_bytes = case.batch * case.query_heads * inputs.num_pages * 4
    launches = per_layer(inputs, lambda layer: run(kernels.seed_slots, layer, layer.tables))
    return Trial(launches, num_bytes, error=same)


def attend_pages(inputs: Inputs, in_two: bool) -> Trial:
    """At once, or in two calls, where a share of a corrected kv head's list is not there at first."""
    case, scale = inputs.case, inputs.case.head_dim**-0.5

    def run(module, layer, queries, keys, values):
        arguments = queries, keys, values, inputs.seq_lens, layer.reads, scale
        if not in_two:
            return module.attend_pages(*arguments)
        shares = module.allocate_shares(queries, keys, layer.reads)
        module.attend_present(*arguments, shares)
        module.attend_rest(*arguments, shares)
        return module.merge_shares(*shares, queries.dtype)

    layer = inputs.layers[0]
    exact = run(reference, layer, layer.queries.float(), layer.keys.float(), layer.values.float())
    low, got = (run(module, layer, layer.queries, layer.keys, layer.values) for module in (reference, kernels))
    error, allowed = relative(got, exact), 2 * relative(low, exact) + 1e-3
    assert error < allowed, f"relative error {error:.2g}, of PyTorch in bfloat16 {relative(low, exact):.2g}"
    num_bytes = case.batch * case.kv_heads * case.budget.total * case.unit_bytes
    launches = per_layer(inputs, lambda layer: run(kernels, layer, layer.queries, layer.keys, layer.values))
    return Trial(launches, num_bytes, error=error)


def add_learned_sinks(inputs: Inputs) -> Trial:
    """Behind the attention of a chunk of a prompt."""
    case, tokens = inputs.case, CHUNK_TOKENS if inputs.device == "cuda" else 64
    outputs = [inputs.draw(tokens, case.query_heads, case.head_dim) for _ in range(2)]
    weights, sinks = 8 + inputs.draw(tokens, case.query_heads).float(), inputs.draw(case.query_heads)
    got, exact = kernels.add_learned_sinks(outputs[0], weights, sinks), reference.add_learned_sinks(outputs[0].float(), weights, sinks)
    error, allowed = relative(got, exact), torch.finfo(DTYPE).eps
    assert error < allowed, f"relative error {error:.2g}, expected that of one rounding, {allowed:.2g}"
    return Trial([lambda x=x: kernels.add_learned_sinks(x, weights, sinks) for x in outputs], 2 * got.nbytes + weights.nbytes, error=error)


def _mostly(same: torch.Tensor) -> float:
    """The share of the kv heads ``same [B, H]`` that do what the reference does; raises AssertionError if it is too small."""
    others = int((~same).sum())
    assert others <= 1 + TIES * same.numel(), f"{others} of {same.numel()} kv heads choose other pages than the reference"
    return float(same.float().mean())


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


def _plan_bytes(inputs: Inputs, planned: float) -> int:
    """Logits that ``planned`` kv heads read; the lists that a plan fills are empty before."""
    for misses in (inputs.misses_now, inputs.misses_ahead):
        misses.clear()
    return int(planned * inputs.case.query_heads / inputs.case.kv_heads * inputs.num_pages * 4)
