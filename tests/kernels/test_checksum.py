"""Checksums against their definition word by word, the kernels against their references, and what changes they tell."""

from __future__ import annotations

import pytest
import torch

from sglang_freekv.kernels import reference
from sglang_freekv.kernels.checksum import checksum_pages, verify_units
from sglang_freekv.kernels.units import Units

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(4, 2, 16, torch.bfloat16), (5, 3, 24, torch.float32), (1, 1, 8, torch.float16)]
if DEVICE == "cuda":  # too much for the interpreter
    SHAPES += [(32, 8, 128, torch.bfloat16), (128, 2, 64, torch.float16), (33, 4, 96, torch.float32)]
shapes = pytest.mark.parametrize("S, H, D, dtype", SHAPES, ids=lambda value: str(value).removeprefix("torch."))
PAGES, SPARE = 7, 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def by_definition(unit: torch.Tensor) -> int:
    """Of ``[2, S, D]``, in Python's own integers."""
    total = 0
    for place, word in enumerate(unit.contiguous().view(torch.int32).flatten().tolist()):
        total += word * ((place * 0x9E3779B1) % 2**32 | 1)
    total %= 2**32
    return total - 2**32 if total >= 2**31 else total


def token_rows(S: int, H: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.randn(PAGES * S + SPARE, 3 * H, D).to(dtype).to(DEVICE)  # as keys and values lie in the output of one projection
    return new[:, H : 2 * H], new[:, 2 * H :]


def sealed(S: int, H: int, keys: torch.Tensor, values: torch.Tensor, kernel=checksum_pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts of PAGES pages, and the checksums ``[2 * PAGES, H]`` of those that were not passed over."""
    starts = torch.stack([torch.randperm(PAGES) * S + head % (SPARE + 1) for head in range(H)], 1).to(DEVICE)
    host_pages = torch.tensor([5, -1, 0, 13, 2, 3, 9], device=DEVICE)
    checksums = torch.full((2 * PAGES, H), 7, dtype=torch.int32, device=DEVICE)
    kernel(keys, values, starts, host_pages, checksums, S)
    return torch.where((host_pages >= 0)[:, None], starts, -1), checksums


@shapes
@pytest.mark.parametrize("kernel", [checksum_pages, reference.checksum_pages], ids=["kernel", "reference"])
def test_checksums_are_by_definition(S, H, D, dtype, kernel):
    keys, values = token_rows(S, H, D, dtype)
    starts, checksums = sealed(S, H, keys, values, kernel)
    for index, page in enumerate([5, -1, 0, 13, 2, 3, 9]):
        for head in range(H):
            if page >= 0:
                here = slice(starts[index, head], starts[index, head] + S)
                assert checksums[page, head] == by_definition(torch.stack((keys[here, head], values[here, head])).cpu())
    untouched = [page for page in range(2 * PAGES) if page not in (5, 0, 13, 2, 3, 9)]
    assert (checksums[untouched] == 7).all()


class Arrived:
    """Units in slots or token rows as they came, and the checksums that were made of them."""

    def __init__(self, S: int, H: int, D: int, dtype: torch.dtype, slots: bool) -> None:
        self.page_size, self.per_start = S, S if slots else 1
        self.keys, self.values = token_rows(S, H, D, dtype)
        order = torch.randperm(PAGES * H)
        self.heads, self.host_pages = (order % H).int().to(DEVICE), (order // H + 3).int().to(DEVICE)
        self.starts = (order // H * (1 if slots else S)).int().to(DEVICE)
        pages = torch.arange(PAGES, device=DEVICE)
        self.checksums = torch.zeros(PAGES + 3, H, dtype=torch.int32, device=DEVICE)
        reference.checksum_pages(self.keys, self.values, (pages * S)[:, None].expand(-1, H), pages + 3, self.checksums, S)

    def faults(self, kernel, count: int, every: int, ring: int = 64, turn: int = 0, **options) -> list[list[int]]:
        faults = torch.zeros(1 + ring, 5, dtype=torch.int32, device=DEVICE)
        told = torch.tensor([count, turn], dtype=torch.int32, device=DEVICE)
        units = Units(self.starts, self.per_start, self.heads, self.host_pages, told)
        options |= {"every": every, "layer": 6, "page_size": self.page_size}
        kernel(self.keys, self.values, units, self.checksums, faults, **options)
        return [faults[0].tolist(), *sorted(faults[1:][faults[1:, 0] > 0].tolist())]


@shapes
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "rows"])
@pytest.mark.parametrize("programs, every", [(16, 1), (1, 1), (3, 2)])
def test_a_changed_word_is_told(S, H, D, dtype, slots, programs, every):
    arrived, units = Arrived(S, H, D, dtype, slots), PAGES * H
    assert arrived.faults(verify_units, units, every, programs=programs) == [[0, 0, 0, 0, 0]]
    for index in (0, units - 1):
        head, start = int(arrived.heads[index]), int(arrived.starts[index]) * arrived.per_start
        tensor = (arrived.keys, arrived.values)[index % 2]
        word = tensor[start + S - 1 if index else start, head].view(torch.int32)
        word[index % (D * dtype.itemsize // 4)] ^= 1 << (index % 31)
    for count in (units, units - 1, 0):
        expected = [index for index in (0, units - 1) if index < count and index % every == 0]
        found = arrived.faults(verify_units, count, every, programs=programs)
        assert found == arrived.faults(reference.verify_units, count, every)
        assert found[0] == [len(expected), 0, 0, 0, 0]
        told = [[6, int(arrived.host_pages[index]), int(arrived.heads[index])] for index in expected]
        assert [fault[:3] for fault in found[1:]] == sorted(told)


def test_the_ring_keeps_count_beyond_its_length():
    arrived = Arrived(4, 2, 16, torch.bfloat16, slots=True)
    arrived.checksums += 1
    for kernel in (verify_units, reference.verify_units):
        head, *notes = arrived.faults(kernel, 2 * PAGES, 1, ring=5)
        assert head == [2 * PAGES, 0, 0, 0, 0] and len(notes) == 5


def test_each_unit_has_its_turn():
    """One unit in sixteen at a time: whatever is recalled or staged as often as that is examined in all its parts."""
    arrived = Arrived(4, 2, 16, torch.bfloat16, slots=True)
    arrived.checksums += 1
    for start, step in ((0, 1), (5, 31), (7, 32), (1, 36)):  # as many calls in a pass as a model has layers
        turns = range(start, start + 120 * step, step)
        examined = [set(map(tuple, arrived.faults(reference.verify_units, 2 * PAGES, 16, turn=turn)[1:])) for turn in turns]
        assert len(set.union(*examined)) == 2 * PAGES
        for turn, expected in list(zip(turns, examined))[::20]:
            assert set(map(tuple, arrived.faults(verify_units, 2 * PAGES, 16, turn=turn)[1:])) == expected


def test_words_that_changed_places_are_told():
    unit = torch.arange(1, 2 * 4 * 16 + 1, dtype=torch.int32).view(2, 4, 16).view(torch.float32)
    sums = {by_definition(unit), by_definition(unit.flip(0)), by_definition(unit.flip(1)), by_definition(unit.flip(2))}
    assert len(sums) == 4
