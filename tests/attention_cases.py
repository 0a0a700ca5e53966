"""Requests to attend for: queries, frames of which some are nobody's, and lists of what to read."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels.reads import Reads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED_BFLOAT16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bfloat16")
LOW = [(torch.float16, torch.int32), pytest.param(torch.bfloat16, torch.int32, marks=INTERPRETED_BFLOAT16)]
SPLITS = pytest.mark.parametrize("programs", [1, 264], ids=["one split", "most splits"])


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """New tensors hold NaN, or True: an element that is left out shows."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else True)

    monkeypatch.setattr(torch, "empty", poisoned)


def wide(queries: torch.Tensor) -> torch.Tensor:
    """The same queries as a view of rows that hold more, as in a fused qkv projection."""
    batch, heads, head_dim = queries.shape
    qkv = torch.full((batch, heads + 2, head_dim + 8), float("nan"), dtype=queries.dtype, device=queries.device)
    view = qkv[:, 1 : heads + 1, :head_dim]
    view.copy_(queries)
    return view


def some_rows(batch: int, num_rows: int, index: torch.dtype) -> torch.Tensor:
    """Distinct rows, but the second and the last request are padding."""
    rows = torch.randperm(num_rows - 1)[:batch] + 1
    if batch > 1:
        rows[[1, -1]] = 0
    return rows.to(DEVICE, index)


def attention_case(
    H, G, D, S, dtype=torch.float32, index=torch.int64, seq_lens=(1, 7, 163, 97, 160, 12), width=37, capacity=41, budget=None
):
    """Arguments of attend_pages, and rows; all memory that no request may read holds NaN. Contexts beyond ``width`` pages attend to ``budget``."""
    batch = len(seq_lens)
    num_rows = batch + 3
    rows = some_rows(batch, num_rows, index)
    slots, pages = torch.full((batch, H, width), -1, dtype=torch.int32), torch.full((batch, H, width), 1 << 20, dtype=torch.int32)
    cache = torch.full((2, num_rows * capacity, S, H, D), float("nan"))
    for b, (row, tokens) in enumerate(zip(rows.tolist(), seq_lens)):
        if row == 0:
            continue
        last = (tokens - 1) // S
        number = width if last < width or budget is None else budget
        for h in range(H):
            listed = torch.cat((torch.randperm(last)[: number - 1], torch.tensor([last])))
            listed = listed[torch.randperm(len(listed))]
            where = row * capacity + torch.randperm(capacity)[: len(listed)]
            slots[b, h, : len(listed)], pages[b, h, : len(listed)] = where.int(), listed.int()
            for slot, page in zip(where.tolist(), listed.tolist()):
                visible = min(S, tokens - page * S)
                cache[:, slot, :visible, h] = torch.randn(2, visible, D)
    queries = torch.randn(batch, H * G, D, device=DEVICE, dtype=dtype)
    lens = torch.tensor(seq_lens, dtype=index, device=DEVICE)
    keys, values = cache.to(DEVICE, dtype)
    return (queries, keys, values, lens, Reads(slots.to(DEVICE), pages.to(DEVICE), None, budget), D**-0.5), rows


def softmax_with_sinks(logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """``[Hq, D]`` from ``logits [Hq, N]`` and ``values [Hq, N, D]``: the weights do not add up to 1."""
    top = torch.maximum(logits.amax(1), sinks)[:, None]
    parts = (logits - top).exp()
    return (parts[..., None] * values).sum(1) / (parts.sum(1, keepdim=True) + (sinks[:, None] - top).exp())
