"""The kernels that move coded pages against their references: codes and scales arrive together, nothing else is touched, no source changes."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels import fill, reference
from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.checksum import checksum_pages, verify_units
from sglang_freekv.kernels.fill import fill_frames, fill_pages
from sglang_freekv.kernels.kv import KV, LARGEST_CODE, Scales
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.offload import offload_pages
from sglang_freekv.kernels.recall import recall_pages
from sglang_freekv.kernels.stage import stage_layers, stage_pages
from sglang_freekv.kernels.staged_layers import StagedLayers
from sglang_freekv.kernels.units import Units

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 3, 24), (8, 8, 128), (32, 1, 64), (3, 3, 8)]
if DEVICE == "cuda":  # too much for the interpreter
    SHAPES += [(32, 8, 128), (128, 2, 64), (33, 4, 96), (1, 8, 256)]
NO_CODE, NO_SCALE = -128, -1.0  # what is not written keeps these

shapes = pytest.mark.parametrize("S, H, D", SHAPES, ids=str)
launches = pytest.mark.parametrize("programs, integer", [(16, torch.int32), (3, torch.int64), (1, torch.int32)], ids=str)
widths = pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=["int32", "int64"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, shape, dtype=torch.int8)


def factors(*shape: int) -> torch.Tensor:
    """Scales, some of them not finite."""
    drawn = torch.rand(shape).half()
    drawn[torch.rand(shape) < 0.1] = torch.nan
    return drawn


def rows_of(T: int, H: int, D: int) -> KV:
    """Token rows as parts of wider ones."""
    new, scales = codes(T, 3 * H, D).to(DEVICE), factors(2, T, 2 * H).to(DEVICE)[..., ::2]
    return KV(new[:, H : 2 * H], new[:, 2 * H :], Scales(*scales))


def untouched(*shape: int) -> KV:
    """Token rows ``[T, H, D]`` or frames ``[F, S, H, D]`` that nothing was written to."""
    new, scales = torch.full((2, *shape), NO_CODE, dtype=torch.int8), torch.full((2, *shape[:-1]), NO_SCALE, dtype=torch.float16)
    return KV(*new.to(DEVICE), Scales(*scales.to(DEVICE)))


class Host:
    """A host pool and its scales, in memory that a device can read."""

    def __init__(self, n_page: int, H: int, S: int, D: int, written: bool = True) -> None:
        empty = untouched(n_page, H, 2, S, D)
        self.units = codes(n_page, H, 2, S, D) if written else empty.keys.cpu()
        self.scales = factors(n_page, H, 2, S) if written else empty.scales.keys.cpu()
        if DEVICE == "cuda":
            self.units, self.scales = self.units.pin_memory(), self.scales.pin_memory()

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.units, self.scales


def tensors(kv: KV) -> tuple[torch.Tensor, ...]:
    return kv.keys, kv.values, *kv.scales


def copies(kept: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in kept)


def assert_same_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(*(tensor.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in (ours, theirs)))


def written(kv: KV) -> list[int]:
    """How many codes of keys and of values, and how many scales of both, were written."""
    return [int((kind != NO_CODE).sum()) for kind in kv[:2]] + [int((kind != NO_SCALE).sum()) for kind in kv.scales]


def ids(values: list[int], integer: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=integer, device=DEVICE)


@shapes
@launches
def test_offload(S, H, D, programs, integer):
    kv = rows_of(10 * S + 3, H, D)
    before = copies(tensors(kv))
    host_pages = ids([5, -1, 8, 1, -1], integer)
    starts = torch.randint(9 * S + 4, (5, H)).to(integer).to(DEVICE)
    found, expected = Host(9, H, S, D, written=False), Host(9, H, S, D, written=False)
    for listed, first in ((host_pages, starts), (host_pages[:0], starts[:0]), (host_pages - 9, starts), (host_pages, starts[:, :1])):
        where = first.expand(-1, H), listed
        offload_pages(*kv[:2], *where, found.units, scales=kv.scales, host_scales=found.scales, programs=programs)
        reference.offload_pages(*kv[:2], *where, expected.units, scales=kv.scales, host_scales=expected.scales)
        assert_same_bits(found.tensors, expected.tensors)
        assert written(KV(found.units, found.units, Scales(found.scales, found.scales)))[1:3] == [3 * H * 2 * S * D, 3 * H * 2 * S]
        for index, page in ((0, 5), (2, 8), (3, 1)):
            start = int(starts[index, 0])  # of the last kv head the same only with one start for all
            scales = [kind[start : start + S, 0].cpu() for kind in kv.scales]
            assert_same_bits((found.scales[page, 0],), (torch.stack(scales),))
    assert_same_bits(tensors(kv), before)


def random_misses(count: int, n_page: int, n_frame: int, H: int) -> tuple[Misses, Misses]:
    """Two equal lists of distinct destinations; the first is the last unit of the last page, for the last frame."""
    target = torch.randperm(n_frame * H - 1)[: max(0, count - 1)]
    target = torch.cat((torch.tensor([n_frame * H - 1]), target))[:count].to(DEVICE)
    host_pages = torch.randint(n_page, (count,), device=DEVICE)
    host_pages[:1] = n_page - 1
    lists = Misses.allocate(90, DEVICE), Misses.allocate(90, DEVICE)
    for each in lists:
        for column in (each.host_pages, each.heads, each.frames):
            column.fill_(-(10**6))  # past the end of the list nothing may be believed
        each.extend(host_pages.int(), (target % H).int(), (target // H).int())
    return lists


@shapes
@pytest.mark.parametrize("prefetch", [False, True], ids=["one read", "two reads"])
@pytest.mark.parametrize("programs", [8, 3, 1])
def test_recall(S, H, D, prefetch, programs):
    host, n_frame = Host(9, H, S, D), 80
    before = copies(host.tensors)
    for count in (0, 1, 2, 19, 70):  # one program reads up to 64 units at once
        ours, theirs = random_misses(count, 9, n_frame, H)
        found, expected = untouched(n_frame, S, H, D), untouched(n_frame, S, H, D)
        both = {"programs": programs, "host_scales": host.scales}
        recall_pages(host.units, ours, *found[:2], scales=found.scales, prefetch=prefetch, **both)
        reference.recall_pages(host.units, theirs, *expected[:2], scales=expected.scales, **both)
        assert_same_bits(tensors(found), tensors(expected))
        assert written(found) == [count * S * D] * 2 + [count * S] * 2 and ours.length.tolist() == [0, 0, count, 1]
        if count:
            assert_same_bits(tuple(kind[-1, :, -1].cpu() for kind in found.scales), tuple(host.scales[8, -1]))
    assert_same_bits(host.tensors, before)


@shapes
@launches
def test_stage(S, H, D, programs, integer):
    host = Host(9, H, S, D)
    before = copies(host.tensors)
    host_pages, starts = ids([8, 3, 3, 0, 5], integer), ids([2 * S + 1, 0, 7 * S, 4 * S + 2, S], integer)
    for count in (5, 3, 0):  # so many pages, then -1
        found, expected = untouched(9 * S + 2, H, D), untouched(9 * S + 2, H, D)
        listed = host_pages.where(torch.arange(5, device=DEVICE) < count, -1)
        stage_pages(host.units, listed, starts, *found[:2], scales=found.scales, host_scales=host.scales, programs=programs)
        reference.stage_pages(host.units, listed, starts, *expected[:2], scales=expected.scales, host_scales=host.scales)
        assert_same_bits(tensors(found), tensors(expected))
        assert written(found) == [count * S * H * D] * 2 + [count * S * H] * 2
    stage_pages(host.units, listed[:0], starts[:0], *found[:2], scales=found.scales, host_scales=host.scales)
    assert_same_bits(tensors(found), tensors(expected))
    assert_same_bits(host.tensors, before)


@shapes
@launches
def test_stage_layers(S, H, D, programs, integer):
    """A part of the layers, each into its own token rows."""
    hosts = [Host(9, H, S, D) for _ in range(4)]
    listed, starts = ids([8, 3, 5, -1, -1], integer), ids([2 * S + 1, 0, 7 * S, 4 * S, S], integer)
    found, expected = ([untouched(9 * S + 2, H, D) for _ in hosts] for _ in range(2))

    def layers(into: list[KV]) -> StagedLayers:
        units, scales = zip(*(host.tensors for host in hosts))
        keys, values, rows_scales = zip(*into)
        return StagedLayers.of(units, keys, values, host_scales=scales, scales=rows_scales)

    stage_layers(layers(found), listed, starts, first=1, last=3, programs=programs)
    reference.stage_layers(layers(expected), listed, starts, first=1, last=3)
    for layer, (ours, theirs) in enumerate(zip(found, expected)):
        assert_same_bits(tensors(ours), tensors(theirs))
        assert written(ours) == [(0 < layer < 3) * 3 * S * H * each for each in (D, D, 1, 1)]


@shapes
@widths
def test_fill(S, H, D, integer):
    rows, R, C, P = [3, 0, 1, 4], 6, 7, 9
    seq_lens = ids([P * S, 3 * S, 3 * S + 1 - S // 2, 2 * S + S // 2 + 1], integer)  # the last one's last page passes the end
    starts = seq_lens.cumsum(0).to(integer) - seq_lens
    slots = torch.stack([torch.randperm(P)[:C] for _ in range(R * H)]).view(R, H, C).where(torch.rand(R, H, C) < 0.8, -1)
    slots[0], slots[4, :, C - 1] = 1, 2  # padding, whatever it says
    row_frames = torch.randperm(R * C).view(R, C).to(torch.int32).to(DEVICE)
    row_frames[1] = -1  # a row without slots
    tables = slots.to(torch.int32).to(DEVICE)
    source = rows_of(int(seq_lens.sum()), H, D)
    before = copies(tensors(source))
    found, expected = untouched(R * C, S, H, D), untouched(R * C, S, H, D)
    asked = *source[:2], starts, ids(rows, integer), seq_lens, Tables(tables, tables, row_frames)
    for kernel, into in ((fill_pages, found), (reference.fill_pages, expected)):
        kernel(*asked, keys=into.keys, values=into.values, source_scales=source.scales, scales=into.scales)
    assert_same_bits(tensors(found), tensors(expected))
    last = row_frames[4, C - 1].long()
    assert (found.scales.keys[row_frames[0].long()] == NO_SCALE).all() and not (found.scales.values[last] == NO_SCALE).any()
    assert_same_bits(tensors(source), before)


@shapes
@widths
def test_fill_frames(S, H, D, integer, monkeypatch):
    monkeypatch.setattr(fill, "PROGRAMS", 2)
    lens, F = ids([5 * S, 3 * S - S // 2], integer), 9  # the last page passes the end
    source = rows_of(int(lens.sum()), H, D)
    given = torch.full((2, 6), -1, dtype=torch.int32, device=DEVICE)
    given[0, [0, 3, 4]], given[1, [0, 2]] = ids([7, 0, 3]), ids([1, 5])
    found, expected = untouched(F, S, H, D), untouched(F, S, H, D)
    asked = *source[:2], lens.cumsum(0).to(integer) - lens, given[:, :5]
    for kernel, into in ((fill_frames, found), (reference.fill_frames, expected)):
        kernel(*asked, keys=into.keys, values=into.values, source_scales=source.scales, scales=into.scales)
    assert_same_bits(tensors(found), tensors(expected))
    assert_same_bits((found.scales.values[3],), (source.scales.values[4 * S : 5 * S],))
    assert written(found) == [5 * S * H * each for each in (D, D, 1, 1)]


@shapes
def test_frames_that_are_parts_of_wider_ones(S, H, D):
    """Strides of scales are their own: no kernel takes those of codes for them, or their sizes for strides."""
    F, host, source = 12, Host(9, H, S, D), rows_of(6 * S, H, D)
    wide = [untouched(F, S, 2 * H, D) for _ in range(2)]
    found, expected = (KV(*(kind[:, :, H:] for kind in kv[:2]), Scales(*(kind[:, :, 1::2] for kind in kv.scales))) for kv in wide)
    given = ids([[3, -1, 11, 0]])
    for module, into in (((recall_pages, fill_frames, stage_pages), found), ((reference.recall_pages, *MOVERS), expected)):
        misses = Misses.allocate(4, DEVICE)
        misses.extend(ids([7, 8, 0]), ids([H - 1, 0, 0]), ids([1, 2, 10]))
        module[0](host.units, misses, *into[:2], scales=into.scales, host_scales=host.scales)
        module[1](*source[:2], ids([S]), given, keys=into.keys, values=into.values, source_scales=source.scales, scales=into.scales)
        rows = KV(*(kind[4] for kind in into[:2]), Scales(*(kind[4] for kind in into.scales)))
        module[2](host.units, ids([5]), ids([0]), *rows[:2], scales=rows.scales, host_scales=host.scales)
    assert_same_bits(tensors(wide[0]), tensors(wide[1]))
    assert written(wide[0]) == [(3 + 3 * H + H) * S * each for each in (D, D, 1, 1)]


MOVERS = reference.fill_frames, reference.stage_pages


def test_codes_move_without_scales_too():
    """Codes of 8 bits whose scale is one for all, which no pool has to keep."""
    S, H, D = 4, 2, 16
    source, host = rows_of(5 * S, H, D), Host(7, H, S, D, written=False)
    host_pages, starts = ids([3, 6, 1, 2, 5]), torch.arange(5, device=DEVICE) * S
    offload_pages(*source[:2], starts[:, None].expand(-1, H), host_pages, host.units)
    staged, filled, recalled = untouched(5 * S, H, D), untouched(5, S, H, D), untouched(5, S, H, D)
    stage_pages(host.units, host_pages, starts, *staged[:2])
    fill_frames(*source[:2], ids([0]), ids([[0, 1, 2, 3, 4]]), keys=filled.keys, values=filled.values)
    misses = Misses.allocate(10, DEVICE)
    misses.extend(host_pages.repeat(H), ids([0] * 5 + [1] * 5), ids([0, 1, 2, 3, 4] * H))
    recall_pages(host.units, misses, *recalled[:2])
    for kv in (staged, filled.token_rows, recalled.token_rows):
        assert_same_bits(kv[:2], source[:2])
        assert written(kv)[2:] == [0, 0]
    assert (host.scales == NO_SCALE).all()


@pytest.mark.parametrize("module", [None, reference], ids=["kernels", "references"])
def test_scales_on_one_side_alone_are_refused(module):
    S, H, D = 4, 2, 16
    host, rows, frames = Host(3, H, S, D), untouched(3 * S, H, D), untouched(3, S, H, D)
    offload, recall, stage = (module.offload_pages, module.recall_pages, module.stage_pages) if module else MOVED
    starts, misses = ids([0]), Misses.allocate(4, DEVICE)
    for half in ("scales", "host_scales"):
        for move, given, scales in (
            (offload, (*rows[:2], starts[:, None].expand(-1, H), ids([1]), host.units), rows.scales),
            (stage, (host.units, ids([1]), starts, *rows[:2]), rows.scales),
            (recall, (host.units, misses, *frames[:2]), frames.scales),
        ):
            with pytest.raises(AssertionError):
                move(*given, **{half: scales if half == "scales" else host.scales})


MOVED = offload_pages, recall_pages, stage_pages


@shapes
def test_the_same_codes_and_scales_arrive_by_each_way(S, H, D):
    N, C = 6, 8
    source = rows_of(N * S, H, D)
    order, host_pages = torch.randperm(N), (torch.randperm(N) + 1).to(DEVICE)
    starts = torch.arange(N, device=DEVICE) * S
    host = Host(N + 2, H, S, D, written=False)
    offload_pages(*source[:2], starts[:, None].expand(-1, H), host_pages, host.units, scales=source.scales, host_scales=host.scales)
    staged = untouched(N * S, H, D)
    stage_pages(host.units, host_pages, starts, *staged[:2], scales=staged.scales, host_scales=host.scales)
    assert_same_bits(tensors(staged), tensors(source))

    tables = torch.full((2, H, C), -1, dtype=torch.int32, device=DEVICE)
    tables[1, :, :N] = order.int().to(DEVICE)
    tables[1, 0] = tables[1, 0].roll(C - N)
    filled, recalled = untouched(2 * C, S, H, D), untouched(2 * C, S, H, D)
    asked = ids([0]), ids([1]), ids([N * S]), Tables(tables, tables, torch.arange(2 * C, dtype=torch.int32, device=DEVICE).view(2, C))
    fill_pages(*source[:2], *asked, keys=filled.keys, values=filled.values, source_scales=source.scales, scales=filled.scales)
    misses = Misses.allocate(H * C, DEVICE)
    h, c = (tables[1] >= 0).nonzero(as_tuple=True)
    misses.extend(host_pages[tables[1, h, c].long()].int(), h.int(), (C + c).int())
    recall_pages(host.units, misses, *recalled[:2], scales=recalled.scales, host_scales=host.scales)
    assert_same_bits(tensors(recalled), tensors(filled))
    assert written(recalled) == [H * N * S * each for each in (D, D, 1, 1)]


def by_definition(codes: torch.Tensor, scales: torch.Tensor) -> int:
    """Of codes ``[2, S, D]`` and scales ``[2, S]``, in Python's own integers."""
    numbers = codes.contiguous().view(torch.int32).flatten().tolist() + scales.contiguous().view(torch.int16).flatten().tolist()
    total = sum(number * ((place * 0x9E3779B1) % 2**32 | 1) for place, number in enumerate(numbers)) % 2**32
    return total - 2**32 if total >= 2**31 else total


@shapes
@pytest.mark.parametrize("kernel", [checksum_pages, reference.checksum_pages], ids=["kernel", "reference"])
def test_checksums_of_codes_and_scales_are_by_definition(S, H, D, kernel):
    kv, listed = rows_of(7 * S + 3, H, D), [5, -1, 0, 13, 2, 3, 9]
    starts = torch.stack([torch.randperm(7) * S + head % 4 for head in range(H)], 1).to(DEVICE)
    checksums = torch.full((14, H), 7, dtype=torch.int32, device=DEVICE)
    kernel(*kv[:2], starts, torch.tensor(listed, device=DEVICE), checksums, S, scales=kv.scales)
    for index, page in enumerate(listed):
        for head in range(H):
            if page >= 0:
                here = slice(starts[index, head], starts[index, head] + S)
                unit, scales = (torch.stack([kind[here, head].cpu() for kind in kinds]) for kinds in (kv[:2], kv.scales))
                assert checksums[page, head] == by_definition(unit, scales)
    assert (checksums[[page for page in range(14) if page not in listed]] == 7).all()


@shapes
@pytest.mark.parametrize("frames", [True, False], ids=["frames", "rows"])
@pytest.mark.parametrize("programs, every", [(16, 1), (1, 1), (3, 2)])
def test_a_changed_code_or_scale_is_told(S, H, D, frames, programs, every):
    pages, per_start = 7, S if frames else 1
    kv, order = rows_of(pages * S, H, D), torch.randperm(pages * H)
    heads, host_pages = (order % H).int().to(DEVICE), (order // H + 3).int().to(DEVICE)
    starts = (order // H * (1 if frames else S)).int().to(DEVICE)
    checksums, first = torch.zeros(pages + 3, H, dtype=torch.int32, device=DEVICE), torch.arange(pages, device=DEVICE)
    reference.checksum_pages(*kv[:2], (first * S)[:, None].expand(-1, H), first + 3, checksums, S, scales=kv.scales)

    def faults(kernel, **options) -> list[list[int]]:
        ring = torch.zeros(65, 5, dtype=torch.int32, device=DEVICE)
        units = Units(starts, per_start, heads, host_pages, torch.tensor([pages * H, 0], dtype=torch.int32, device=DEVICE))
        kernel(*kv[:2], units, checksums, ring, every=every, layer=6, page_size=S, scales=kv.scales, **options)
        return [ring[0].tolist(), *sorted(ring[1:][ring[1:, 0] > 0].tolist())]

    assert faults(verify_units, programs=programs) == [[0, 0, 0, 0, 0]]
    last = pages * H - 1
    for changed, (index, tensor) in enumerate(((0, kv.scales.keys), (last, kv.scales.values), (last // 4 * 2, kv.values)), 1):
        token = int(starts[index]) * per_start + (S - 1) * (index > 0)
        place = tensor[token, int(heads[index])].view(-1)[-1:]
        place.copy_((place.view({1: torch.int8, 2: torch.int16}[place.element_size()]) ^ 1).view(place.dtype))
        told = [at for at in (0, last, last // 4 * 2)[:changed] if at % every == 0]
        found = faults(verify_units, programs=programs)
        assert found == faults(reference.verify_units) and found[0][0] == len(told)
        assert [fault[:3] for fault in found[1:]] == sorted([6, int(host_pages[at]), int(heads[at])] for at in told)
