"""The kernels that move pages against their references: what is asked for arrives, nothing else is touched, no source changes."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels import fill, reference
from sglang_freekv.kernels.append import append_tokens
from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.digest import digest_pages
from sglang_freekv.kernels.fill import fill_frames, fill_pages
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.offload import offload_pages
from sglang_freekv.kernels.page_table import snapshot_pages
from sglang_freekv.kernels.recall import recall_pages
from sglang_freekv.kernels.stage import stage_layers, stage_pages
from sglang_freekv.kernels.staged_layers import StagedLayers
from sglang_freekv.kernels.two_bit_digest import digest_two_bit
from sglang_freekv.kernels.write import write_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = (
    append_tokens, digest_pages, digest_two_bit, fill_pages, offload_pages, recall_pages, snapshot_pages, stage_layers, stage_pages,
    write_tokens,
)  # fmt: skip

SHAPES = [(4, 2, 16, torch.bfloat16), (5, 3, 24, torch.float32), (1, 1, 8, torch.float16)]
if DEVICE == "cuda":  # too much for the interpreter
    SHAPES += [(32, 8, 128, torch.bfloat16), (128, 2, 64, torch.float16), (33, 4, 96, torch.float32)]

shapes = pytest.mark.parametrize("S, H, D, dtype", SHAPES, ids=lambda value: str(value).removeprefix("torch."))
layouts = pytest.mark.parametrize("layout", ["HND", "NHD", "kinds apart"])
launches = pytest.mark.parametrize(
    "layout, programs, integer",
    [("HND", 16, torch.int32), ("NHD", 3, torch.int64), ("kinds apart", 1, torch.int32)],
    ids=["HND, 16 programs", "NHD, 3 programs", "kinds apart, 1 program"],
)
widths = pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=["int32", "int64"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def host_pool(layout: str, n_page: int, H: int, S: int, D: int, dtype: torch.dtype, poisoned: bool = False) -> torch.Tensor:
    """``[n_page, H, 2, S, D]`` of random numbers, or of NaN, in memory that a device can read."""
    shape, order = {
        "HND": ((n_page, H, 2, S, D), (0, 1, 2, 3, 4)),
        "NHD": ((n_page, 2, S, H, D), (0, 3, 1, 2, 4)),
        "kinds apart": ((2, n_page, S, H, D), (1, 3, 0, 2, 4)),
    }[layout]
    pool = torch.full(shape, torch.nan, dtype=dtype) if poisoned else torch.randn(shape).to(dtype)
    return (pool.pin_memory() if DEVICE == "cuda" else pool).permute(order)


def twin_of_host(pool: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_like(pool, memory_format=torch.preserve_format).copy_(pool)


def poisoned(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))


def assert_same_bits(found: torch.Tensor | tuple[torch.Tensor, ...], expected: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Equal element by element, of NaN too: what neither wrote is equal as well."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(*(tensor.cpu().contiguous().view(torch.uint8) for tensor in (ours, theirs)))


def ids(values: list[int], integer: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=integer, device=DEVICE)


def lent(slot_pages: torch.Tensor, R: int, C: int) -> Tables:
    """``slot_pages [R, H, C]`` with a frame for each slot, in any order."""
    return Tables(slot_pages, slot_pages, torch.randperm(R * C).view(R, C).to(torch.int32).to(DEVICE))


def slot_tables(R: int, H: int, C: int, pages: int) -> torch.Tensor:
    """``[R, H, C]`` int32: some of ``pages`` and some -1, in every kv head's own order; row 0 empty."""
    kept = torch.stack([torch.randperm(max(pages, C))[:C] for _ in range(R * H)]).view(R, H, C)
    kept[(torch.rand(R, H, C) < 0.2) | (kept >= pages)] = -1
    kept[0] = -1
    return kept.to(torch.int32).to(DEVICE)


@shapes
@widths
def test_write(S, H, D, dtype, integer):
    rows, lengths, R = [3, 1], [2 * S + 1, 1], 5
    new = draw(sum(lengths), 4 * H, D, dtype=dtype)  # as they lie in the output of one projection
    queries, keys, values = new[:, : 2 * H], new[:, 2 * H : 3 * H], new[:, 3 * H :].clone()
    where = ids(torch.randperm(4 * S)[: sum(lengths)].tolist(), integer), ids([lengths[0] - 1, lengths[0]], integer), ids(rows, integer)
    found, expected = ([*poisoned(4 * S, H, D, dtype=dtype), poisoned(R, 2 * H, D, dtype=dtype)[0]] for _ in range(2))
    places = "keys", "values", "previous_queries"
    last = write_tokens(keys, values, queries, *where, **dict(zip(places, found)))
    wanted = reference.write_tokens(keys, values, queries, *where, **dict(zip(places, expected)))
    assert_same_bits((*found, last), (*expected, wanted))


@shapes
@widths
@pytest.mark.parametrize("C", [6, 8])
def test_append(S, H, D, dtype, integer, C, monkeypatch):
    rows, R, P = [3, 0, 1, 4, 0, 2], 5, 9
    seq_lens = ids([2 * S, 1, 1, 7 * S + 1, 1, P * S - S // 2], integer)  # the first fills its page, the next begin theirs
    page_table = torch.randint(1, 1000, (len(rows), P)).to(integer).to(DEVICE)
    tables = slot_tables(R, H, C, P)
    for b, row in enumerate(rows):
        if row:
            page = int(seq_lens[b] - 1) // S
            tables[row][tables[row] == page] = -1
            for h in range(H):
                tables[row, h, torch.randint(C, ())] = page
    tables[3, H - 1, tables[3, H - 1] == 1] = -1
    tables[3, H - 1, C - 1] = 1  # the last slot
    new = draw(len(rows), 3 * H, D, dtype=dtype)  # as keys and values lie in the output of one projection
    new_keys, new_values = new[:, H : 2 * H], new[:, 2 * H :].clone()
    found, expected = poisoned(R * C + 1, S, H, D, dtype=dtype), poisoned(R * C + 1, S, H, D, dtype=dtype)
    frames = torch.full((len(rows), P), -1, dtype=torch.int32, device=DEVICE)
    frames[3, 7] = R * C  # a page that is being filled, whatever the slots say
    asked = (ids(rows, integer), seq_lens, page_table, frames, lent(tables, R, C))
    asked[-1].row_frames[2] = -1  # a row without slots
    wanted = reference.append_tokens(new_keys, new_values, *asked, keys=expected[0], values=expected[1])
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full([shape] if isinstance(shape, int) else shape, -7, **options))
    starts, filled = append_tokens(new_keys, new_values, *asked, keys=found[0], values=found[1])
    monkeypatch.undo()
    assert_same_bits(found, expected)
    assert starts.dtype == filled.dtype == torch.int32
    assert starts.tolist() == wanted[0].tolist() and starts[3].tolist() == [R * C * S] * H and filled.tolist() == wanted[1].tolist()
    assert filled[0] == page_table[0, 1] and filled[1] == filled[4] == filled[5] == -1 and not starts[1].any() and not starts[5].any()


@shapes
@widths
@pytest.mark.parametrize("starts_of, box", [("every head", "min-max"), ("the page", "min-max"), ("every head", "cuboid-mean")])
def test_digest(S, H, D, dtype, integer, starts_of, box):
    keys = draw(11 * S, H, 2 * D, dtype=dtype)[..., :D]
    keys[3 * S, 0, 1] = torch.nan
    keys[4 * S, 0, 0] = float("inf")
    host_pages = ids([4, -1, 7, 0, -1, 2], integer)
    starts = torch.randint(10 * S + 1, (6, H if starts_of == "every head" else 1)).to(integer).to(DEVICE)
    starts[2] = 3 * S
    starts = starts.expand(6, H)
    found, expected = (torch.full((9, H, 2, D), -7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    before = keys.clone()
    digest_pages(keys, starts, host_pages, found, S, box)
    reference.digest_pages(keys, starts, host_pages, expected, S, box)
    assert found[7, 0, :, 1].isnan().all()
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.nan_to_num(nan=77.0), expected.nan_to_num(nan=77.0)
    if box == "cuboid-mean" and dtype == torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter cuts off where a device rounds
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert_same_bits(found, expected)
    assert_same_bits(keys, before)


@pytest.mark.parametrize(
    "S, H, D, dtype",
    [
        (8, 2, 16, torch.bfloat16),
        (24, 3, 24, torch.float32),
        (16, 1, 40, torch.bfloat16),
        (32, 2, 6, torch.float16),
        (8, 2, 128, torch.bfloat16),
    ],
)
@widths
def test_two_bits(S, H, D, dtype, integer):
    keys = draw(11 * S, H, 2 * D, dtype=dtype)[..., :D]
    keys[3 * S, 0, 1], keys[4 * S, 0, 0] = torch.nan, float("inf")
    keys[: 2 * S] = torch.arange(2 * S, device=DEVICE)[:, None, None] % 7 - 3  # keys in the middle between two levels
    host_pages = ids([4, -1, 7, 0, -1, 2], integer)
    starts = torch.randint(10 * S + 1, (6, H)).to(integer).to(DEVICE)
    starts[0], starts[2] = 0, 3 * S
    found, expected = (torch.full((9, H, 2 * D + D * S // 4 // dtype.itemsize), -7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    before = keys.clone()
    digest_two_bit(keys, starts, host_pages, found, S)
    reference.digest_two_bit(keys, starts, host_pages, expected, S)
    assert found[7, 0, 1].isnan()
    assert_same_bits(found[..., 2 * D :], expected[..., 2 * D :])
    assert_same_bits(*(digests[..., : 2 * D].nan_to_num(nan=77.0) for digests in (found, expected)))
    assert_same_bits(keys, before)


@shapes
@launches
def test_offload(S, H, D, dtype, layout, programs, integer):
    keys, values = draw(10 * S + 3, H, D, dtype=dtype), draw(10 * S + 3, H, D, dtype=dtype)
    before = keys.clone(), values.clone()
    host_pages = ids([5, -1, 8, 1, -1], integer)
    starts = torch.randint(9 * S + 4, (5, H)).to(integer).to(DEVICE)
    found = host_pool(layout, 9, H, S, D, dtype, poisoned=True)
    expected = twin_of_host(found)
    offload_pages(keys, values, starts, host_pages, found, programs=programs)
    reference.offload_pages(keys, values, starts, host_pages, expected)
    assert_same_bits(found, expected)
    assert found[0].isnan().all() and not found[8].isnan().any()
    assert_same_bits((keys, values), before)
    offload_pages(values, keys, starts[:, :1].expand(-1, H), torch.full_like(host_pages, -1), found)
    offload_pages(values, keys, starts[:0], host_pages[:0], found)
    assert_same_bits(found, expected)
    offload_pages(keys, values, starts[:, :1].expand(-1, H), host_pages, found)  # of one start for all kv heads
    reference.offload_pages(keys, values, starts[:, :1].expand(-1, H), host_pages, expected)
    assert_same_bits(found, expected)


def random_misses(count: int, n_page: int, n_slot: int, H: int) -> tuple[Misses, Misses]:
    """Two equal lists of distinct destinations; the first is the last unit of the last page, for the last slot."""
    target = torch.randperm(n_slot * H - 1)[: max(0, count - 1)]
    target = torch.cat((torch.tensor([n_slot * H - 1]), target))[:count].to(DEVICE)
    host_pages = torch.randint(n_page, (count,), device=DEVICE)
    host_pages[:1] = n_page - 1
    lists = Misses.allocate(40, DEVICE), Misses.allocate(40, DEVICE)
    for each in lists:
        for column in (each.host_pages, each.heads, each.frames):
            column.fill_(-(10**6))  # past the end of the list nothing may be believed
        each.extend(host_pages.int(), (target % H).int(), (target // H).int())
    return lists


@shapes
@pytest.mark.parametrize("prefetch", [False, True], ids=["one unit", "two units"])
@pytest.mark.parametrize("layout, programs", [("HND", 8), ("NHD", 3), ("kinds apart", 1)])
def test_recall(S, H, D, dtype, layout, prefetch, programs):
    host = host_pool(layout, 9, H, S, D, dtype)
    before = twin_of_host(host)
    n_slot = 40
    for count in (0, 1, 2, 3, 4, 6, 19):
        ours, theirs = random_misses(count, 9, n_slot, H)
        found, expected = poisoned(n_slot, S, H, D, dtype=dtype), poisoned(n_slot, S, H, D, dtype=dtype)
        recall_pages(host, ours, *found, programs=programs, prefetch=prefetch)
        reference.recall_pages(host, theirs, *expected)
        assert_same_bits(found, expected)
        assert ours.length.tolist() == [0, 0, count, 1]
        assert int((~found[0].isnan()).sum()) == count * S * D
    assert_same_bits(host, before)


def test_a_list_is_recalled_once():
    S, H, D, dtype, n_slot = 4, 2, 16, torch.bfloat16, 40
    host = host_pool("HND", 9, H, S, D, dtype)
    misses, _ = random_misses(21, 9, n_slot, H)
    recall_pages(host, misses, *poisoned(n_slot, S, H, D, dtype=dtype))
    found, expected = poisoned(n_slot, S, H, D, dtype=dtype), poisoned(n_slot, S, H, D, dtype=dtype)
    recall_pages(host, misses, *found)
    assert_same_bits(found, expected)
    for slot in range(6):
        unit = (ids([slot % 9]), ids([slot % H]), ids([n_slot - 1 - slot]))
        misses.extend(*unit)
        recall_pages(host, misses, *found)
        other = Misses.allocate(1, DEVICE)
        other.extend(*unit)
        reference.recall_pages(host, other, *expected)
        assert_same_bits(found, expected)
        assert misses.length.tolist() == [0, 0, 1, slot + 3]


@shapes
@launches
def test_stage(S, H, D, dtype, layout, programs, integer):
    host = host_pool(layout, 9, H, S, D, dtype)
    before = twin_of_host(host)
    host_pages, starts = ids([8, 3, 3, 0, 5], integer), ids([2 * S + 1, 0, 7 * S, 4 * S + 2, S], integer)
    found, expected = (torch.full((2, 9 * S + 2, H, D), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    stage_pages(host, host_pages, starts, *found, programs=programs)
    reference.stage_pages(host, host_pages, starts, *expected)
    assert_same_bits(found, expected)
    assert int((~found.isnan()).sum()) == 2 * 5 * S * H * D
    for count in (3, 0):  # so many pages, then -1
        found, expected = (torch.full_like(expected, torch.nan) for _ in range(2))
        listed = host_pages.where(torch.arange(5, device=DEVICE) < count, -1)
        stage_pages(host, listed, starts, *found, programs=programs)
        reference.stage_pages(host, listed, starts, *expected)
        assert_same_bits(found, expected)
        assert int((~found.isnan()).sum()) == 2 * count * S * H * D
    stage_pages(host, host_pages[:0], starts[:0], *found)
    assert_same_bits(found, expected)
    assert_same_bits(host, before)


@shapes
@launches
def test_stage_layers(S, H, D, dtype, layout, programs, integer):
    """A part of the layers, each into its own token rows."""
    hosts = [host_pool(layout, 9, H, S, D, dtype) for _ in range(4)]
    listed, starts = ids([8, 3, 5, -1, -1], integer), ids([2 * S + 1, 0, 7 * S, 4 * S, S], integer)
    found, expected = ([poisoned(9 * S + 2, H, D, dtype=dtype) for _ in hosts] for _ in range(2))
    stage_layers(StagedLayers.of(hosts, *zip(*found)), listed, starts, first=1, last=3, programs=programs)
    reference.stage_layers(StagedLayers.of(hosts, *zip(*expected)), listed, starts, first=1, last=3)
    for layer, (ours, theirs) in enumerate(zip(found, expected)):
        assert_same_bits(ours, theirs)
        assert int((~ours[0].isnan()).sum()) == (0 < layer < 3) * 3 * S * H * D


@shapes
@widths
def test_fill(S, H, D, dtype, integer):
    rows, R, C, P = [3, 0, 1, 4], 6, 7, 9
    seq_lens = ids([P * S, 3 * S, 3 * S + 1 - S // 2, 2 * S + S // 2 + 1], integer)  # the last one's last page passes the end
    starts = seq_lens.cumsum(0).to(integer) - seq_lens
    tables = slot_tables(R, H, C, P)
    tables[0] = 1  # padding, whatever it says
    tables[4, :, C - 1] = 2
    source = draw(2, int(seq_lens.sum()), H, D, dtype=dtype)
    before = source.clone()
    found, expected = poisoned(R * C, S, H, D, dtype=dtype), poisoned(R * C, S, H, D, dtype=dtype)
    asked = (starts, ids(rows, integer), seq_lens, lent(tables, R, C))
    asked[-1].row_frames[1] = -1  # a row without slots
    fill_pages(*source, *asked, keys=found[0], values=found[1])
    reference.fill_pages(*source, *asked, keys=expected[0], values=expected[1])
    assert_same_bits(found, expected)
    frames = asked[-1].row_frames.long()
    assert found[0][frames[0]].isnan().all() and not found[0][frames[4, C - 1]].isnan().any()
    assert_same_bits(source, before)


@shapes
@widths
def test_fill_frames(S, H, D, dtype, integer, monkeypatch):
    monkeypatch.setattr(fill, "PROGRAMS", 2)
    lens, F = ids([5 * S, 3 * S - S // 2], integer), 9  # the last page passes the end
    source = draw(2, int(lens.sum()), H, D, dtype=dtype)
    given = torch.full((2, 6), -1, dtype=torch.int32, device=DEVICE)
    given[0, [0, 3, 4]], given[1, [0, 2]] = ids([7, 0, 3]), ids([1, 5])
    found, expected = poisoned(F, S, H, D, dtype=dtype), poisoned(F, S, H, D, dtype=dtype)
    asked = lens.cumsum(0).to(integer) - lens, given[:, :5]
    fill_frames(*source, *asked, keys=found[0], values=found[1])
    reference.fill_frames(*source, *asked, keys=expected[0], values=expected[1])
    assert_same_bits(found, expected)
    assert torch.equal(found[1][3], source[1, 4 * S : 5 * S]) and found[0][[2, 4, 6, 8]].isnan().all()


@widths
@pytest.mark.parametrize("S, P, T", [(4, 6, 22), (4, 6, 20), (5, 300, 1398), (5, 300, 1400), (1, 7, 7), (1, 7, 5), (32, 3, 96)])
def test_snapshot(S, P, T, integer):
    req_to_token = torch.randint(0, 10**6, (5, T + 3), dtype=torch.int32, device=DEVICE)[:, :T]
    seq_lens = ids([T, 2 * S, 2 * S - 1, 1, 0, S + 1], integer)
    rows = ids([4, 2, 1, 0, 3, 2], integer)
    found, expected = (torch.full((6, P), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    snapshot_pages(req_to_token, rows, seq_lens, found, S)
    reference.snapshot_pages(req_to_token, rows, seq_lens, expected, S)
    assert_same_bits(found, expected)
    assert found[1, 2] == req_to_token[2, 2 * S] // S  # the page that the next token begins
    assert not found[2, 2:].any() and not found[0, -(-T // S) :].any()


@layouts
def test_the_same_bits_arrive_by_each_way(layout):
    S, H, D, dtype = 4, 2, 16, torch.bfloat16
    N, C = 6, 8
    source = draw(2, N * S, H, D, dtype=dtype)
    order = torch.randperm(N)
    host_pages = (torch.randperm(N) + 1).to(DEVICE)
    starts = torch.arange(N, device=DEVICE) * S
    host = host_pool(layout, N + 2, H, S, D, dtype, poisoned=True)
    offload_pages(*source, starts[:, None].expand(-1, H), host_pages, host)

    staged = torch.full_like(source, torch.nan)
    stage_pages(host, host_pages, starts, *staged)
    assert_same_bits(staged, source)

    tables = torch.full((2, H, C), -1, dtype=torch.int32, device=DEVICE)
    tables[1, 0, :N], tables[1, 1, C - N :] = order.int().to(DEVICE), order.flip(0).int().to(DEVICE)
    filled, recalled = poisoned(2 * C, S, H, D, dtype=dtype), poisoned(2 * C, S, H, D, dtype=dtype)
    row_frames = torch.arange(2 * C, dtype=torch.int32, device=DEVICE).view(2, C)
    fill_pages(*source, ids([0]), ids([1]), ids([N * S]), Tables(tables, tables, row_frames), keys=filled[0], values=filled[1])
    misses = Misses.allocate(H * C, DEVICE)
    h, c = (tables[1] >= 0).nonzero(as_tuple=True)
    misses.extend(host_pages[tables[1, h, c].long()].int(), h.int(), (C + c).int())
    recall_pages(host, misses, *recalled)
    assert_same_bits(recalled, filled)
    assert int((~recalled[0].isnan()).sum()) == H * N * S * D
