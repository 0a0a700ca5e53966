"""Trials of the kernels that move pages and tokens, or summarise them."""

from __future__ import annotations

import torch

from benchmarks import bench_recall
from benchmarks.kernel_inputs import DTYPE, Inputs, full_pages
from benchmarks.trial import Trial, per_layer
from sglang_freekv import kernels
from sglang_freekv.digests import TwoBit
from sglang_freekv.kernels import reference

STAGED_TOKENS = 32768


def append_tokens(inputs: Inputs) -> Trial:
    def run(kernel, layer, keys, values):
        new = (layer.new_keys, layer.new_values)
        where = inputs.rows, inputs.seq_lens, inputs.page_table, inputs.frames, layer.tables
        return kernel(*new, *where, keys=keys, values=values)

    layer = inputs.layers[0]
    got, expected = ([layer.keys.clone(), layer.values.clone()] for _ in range(2))
    got += run(kernels.append_tokens, layer, *got)
    expected += run(reference.append_tokens, layer, *expected)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(got, expected)), "not the reference's"
    return Trial(per_layer(inputs, lambda layer: run(kernels.append_tokens, layer, layer.keys, layer.values)))


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


def digest_two_bit(inputs: Inputs) -> Trial:
    case, pages = inputs.case, full_pages(inputs, chunk=True)
    shape = (*inputs.layers[0].digests.shape[:2], *TwoBit(case.budget, case.page_size).shape(case.head_dim, DTYPE.itemsize))
    got, expected = (torch.zeros(shape, dtype=DTYPE, device=inputs.device) for _ in range(2))
    for module, digests in ((kernels, got), (reference, expected)):
        module.digest_two_bit(pages[0].keys, pages[0].starts, pages[0].host_pages, digests, case.page_size)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), "not the reference's"
    units = len(pages[0].host_pages) * case.kv_heads
    launches = [lambda p=p: kernels.digest_two_bit(p.keys, p.starts, p.host_pages, got, case.page_size) for p in pages]
    return Trial(launches, units * (case.unit_bytes // 2 + shape[2] * DTYPE.itemsize))


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
    launches = [lambda i=i: kernels.recall_pages(pools.host, pools.misses(lengths[i]), pools.keys, pools.values) for i in range(lists)]
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
    tables = layer.tables._replace(slot_pages=slot_pages)
    got, expected = ([layer.keys.clone(), layer.values.clone()] for _ in range(2))
    kernels.fill_pages(*source, starts, rows, seq_lens, tables, keys=got[0], values=got[1])
    reference.fill_pages(*source, starts, rows, seq_lens, tables, keys=expected[0], values=expected[1])
    assert all(torch.equal(a, b) for a, b in zip(got, expected)), "not the reference's"
    num_bytes = 2 * len(rows) * case.kv_heads * case.capacity * case.unit_bytes
    arguments = *source, starts, rows, seq_lens, tables
    launches = per_layer(inputs, lambda layer: kernels.fill_pages(*arguments, keys=layer.keys, values=layer.values))
    return Trial(launches, num_bytes)


def snapshot_pages(inputs: Inputs) -> Trial:
    case, device = inputs.case, inputs.device
    width = inputs.num_pages * case.page_size
    slots = torch.randint(1 << 20, (inputs.num_rows, width), dtype=torch.int32, device=device)
    got, expected = (torch.empty_like(inputs.page_table) for _ in range(2))
    for module, target in ((kernels, got), (reference, expected)):
        module.snapshot_pages(slots, inputs.rows, inputs.seq_lens, target, case.page_size)
    assert torch.equal(got, expected), "not the reference's"
    return Trial([lambda: kernels.snapshot_pages(slots, inputs.rows, inputs.seq_lens, got, case.page_size)])
