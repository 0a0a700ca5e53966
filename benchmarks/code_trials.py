"""Trials of the kernels of KV that is coded in 8 bits."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernel_inputs import CHUNK_TOKENS, DTYPE, Inputs
from benchmarks.trial import Trial, relative
from sglang_freekv import kernels
from sglang_freekv.kernels import KV, Scales, reference

CHUNKS = 4  # sets of a chunk's tensors: none is in a cache
SCALE_BYTES = torch.float16.itemsize


def coded(inputs: Inputs, *shape: int) -> KV:
    """Random codes ``[*shape, H, D]`` with scales."""
    shape = (*shape, inputs.case.kv_heads)
    codes = [torch.randint(-127, 128, (*shape, inputs.case.head_dim), dtype=torch.int8, device=inputs.device) for _ in range(2)]
    return KV(*codes, Scales(*(torch.rand(shape, device=inputs.device).half() for _ in range(2))))


def rotate(inputs: Inputs, chunk: bool) -> Trial:
    """Of the tokens of a chunk, or of one decode step, as they lie in the output of one projection."""
    case, tokens = inputs.case, CHUNK_TOKENS if chunk else inputs.case.batch
    heads = [case.query_heads, case.kv_heads, case.kv_heads]
    fused = [inputs.draw(tokens, sum(heads), case.head_dim).split(heads, 1) for _ in range(CHUNKS if chunk else len(inputs.layers))]
    errors = [relative(a, b) for a, b in zip(kernels.rotate(*fused[0][:2]), reference.rotate(*fused[0][:2]))]
    assert max(errors) < 2**-8, f"relative error {max(errors):.2g}"
    num_bytes = 2 * tokens * sum(heads[:2]) * case.head_dim * DTYPE.itemsize if chunk else 0
    return Trial([partial(kernels.rotate, *each[:2]) for each in fused], num_bytes, error=max(errors))


def append_tokens(inputs: Inputs) -> Trial:
    layer = inputs.layers[0]
    frames = coded(inputs, *layer.keys.shape[:2])
    where = inputs.rows, inputs.seq_lens, inputs.page_table, inputs.frames, layer.tables
    got, expected = (KV(frames.keys.clone(), frames.values.clone(), Scales(*(each.clone() for each in frames.scales))) for _ in range(2))
    for module, kv in ((kernels, got), (reference, expected)):
        module.append_tokens(layer.new_keys, layer.new_values, *where, keys=kv.keys, values=kv.values, scales=kv.scales)
    assert all(map(torch.equal, (*got[:2], *got.scales), (*expected[:2], *expected.scales))), "not the reference's"
    into = {"keys": frames.keys, "values": frames.values, "scales": frames.scales}
    return Trial([partial(kernels.append_tokens, each.new_keys, each.new_values, *where, **into) for each in inputs.layers])


def decode_tokens(inputs: Inputs) -> Trial:
    """One context in any order."""
    case, tokens = inputs.case, inputs.case.context
    kv, rows = coded(inputs, tokens), torch.randperm(tokens, device=inputs.device)
    got, expected = (KV(*(torch.zeros(kv.keys.shape, dtype=DTYPE, device=inputs.device) for _ in range(2))) for _ in range(2))
    kernels.decode_tokens(kv, rows, got)
    reference.decode_tokens(kv, rows, expected)
    assert all(map(torch.equal, got[:2], expected[:2])), "not the reference's"
    vectors = 2 * tokens * case.kv_heads
    num_bytes = vectors * (case.head_dim * (1 + DTYPE.itemsize) + SCALE_BYTES)
    return Trial([partial(kernels.decode_tokens, kv, rows, got)], num_bytes)


def unrotated_keys(inputs: Inputs, chunk: bool) -> Trial:
    """Of the pages of a chunk; or of a decode step in which no request fills its page, as most are."""
    case, size = inputs.case, inputs.case.page_size
    count = CHUNK_TOKENS // size if chunk else case.batch
    sets = [coded(inputs, count * size) for _ in range(CHUNKS)]
    starts = (torch.randperm(count, device=inputs.device) * size)[:, None].expand(-1, case.kv_heads)
    host_pages = torch.arange(count, device=inputs.device)
    got, expected = (module.unrotated_keys(sets[0], starts, host_pages, size, DTYPE) for module in (kernels, reference))
    assert torch.equal(got, expected), "not the reference's"
    pages = host_pages if chunk else torch.full_like(host_pages, -1)
    num_bytes = count * size * case.kv_heads * (case.head_dim * (1 + DTYPE.itemsize) + SCALE_BYTES) if chunk else 0
    return Trial([partial(kernels.unrotated_keys, kv, starts, pages, size, DTYPE) for kv in sets], num_bytes)
